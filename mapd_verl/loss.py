"""The actor's loss with the distillation term: ``L = L_GRPO + lambda * agg_t m_t l_t``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl.objectives.base import AuxiliaryLoss
from mapd_verl.verl_seams import AggregationType, Metric, agg_loss, no_padding_2_padding

#: Key of the per-token term in the engine's model output, nested like ``input_ids``.
DIVERGENCE = "divergence"

#: Raw sums that the micro-batches report; the trainer turns them into means (``metrics.py``).
RAW = "distillation/raw/"
#: Turns with a column of their own; later ones share the last.
MAX_TURNS = 6
ACTIONS = ("think", "search", "answer")


class MapdLoss:
    """verl's own loss function, and the objective's term on top.

    Args:
        base: verl's ``partial(ppo_loss, config=...)`` as the worker built it.
        objective: the term.
    """

    def __init__(self, base: partial, objective: AuxiliaryLoss) -> None:
        self.base = base
        self.objective = objective
        #: Set by the engine for the micro-batch at hand.
        self.teacher_seconds = 0.0

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """verl's loss interface.

        Args:
            model_output: of the engine, with :data:`DIVERGENCE`.
            data: the micro-batch.

        Returns:
            the loss to differentiate (scalar), and metrics.
        """
        loss, metrics = self.base(model_output=model_output, data=data, dp_group=dp_group)
        token_losses = no_padding_2_padding(model_output[DIVERGENCE], data)  # [B, T]
        mask = data["response_mask"].to_padded_tensor(0).bool()
        config = self.base.keywords["config"]
        # The actor's own aggregation with the counts that verl has just put there (over the whole mini-batch
        # and all ranks), so that lambda means the same for any split. Tokens without a context count with 0.
        term = agg_loss(
            loss_mat=token_losses, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info
        )
        metrics["distillation/loss"] = Metric(value=term, aggregation=AggregationType.SUM)
        for name, value in self._raw_sums(token_losses.detach(), mask, data).items():
            metrics[RAW + name] = Metric(value=value, aggregation=AggregationType.SUM)
        return loss + self.objective.weight * term, metrics

    def _raw_sums(self, token_losses: torch.Tensor, mask: torch.Tensor, data: TensorDict) -> dict[str, float]:
        """Sums and token counts, in all and by turn and action; the same keys for every micro-batch."""
        has_context = data["privilege_source"].reshape(-1, 1) > 0
        distilled = mask & has_context
        groups = {"all": distilled}
        for field, names in (
            ("turn_ids", [f"turn_{i}" for i in range(MAX_TURNS)]),
            ("action_ids", list(ACTIONS)),
        ):
            if field not in data:
                continue
            ids = data[field].to_padded_tensor(-1)[:, : mask.shape[1]].clamp(max=len(names) - 1)
            groups |= {name: distilled & (ids == i) for i, name in enumerate(names)}
        sums = {"policy_tokens": mask.sum().item(), "teacher_seconds": self.teacher_seconds}
        for name, group in groups.items():
            sums[f"sum/{name}"] = (token_losses * group).sum().item()
            sums[f"tokens/{name}"] = group.sum().item()
        return sums
