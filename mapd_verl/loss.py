"""The actor's loss with the distillation term: ``L = L_GRPO + lambda * agg_t m_t l_t``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl import insight
from mapd_verl.config.method import FilterConfig
from mapd_verl.objectives.base import AuxiliaryLoss
from mapd_verl.objectives.sampled import GatedLoss
from mapd_verl.token_filter import TokenFilter
from mapd_verl.verl_seams import AggregationType, Metric, agg_loss, no_padding_2_padding, ppo_loss, tensordict_utils

#: Key of the per-token term in the engine's model output, nested like ``input_ids``.
DIVERGENCE = "divergence"
#: ``T_t`` of the sampled tokens, scored before the update; a batch field nested like ``responses``, 0 without teacher.
TEACHER_LOG_PROBS = "teacher_log_probs"
#: Lambda at this step, where a schedule moves it; travels with the batch.
WEIGHT = "mapd_weight"
#: What the engine reports beside it, for the charts alone: the teacher's log-probability of the sampled token, and
#: both views' entropies; nested like ``input_ids``.
SIGNALS = ("teacher_log_prob", "student_entropy", "teacher_entropy")

#: Raw sums that the micro-batches report; the trainer turns them into means (``metrics.py``).
RAW = "distillation/raw/"


class MapdLoss:
    """verl's own loss function, and the objective's term on top.

    Args:
        base: verl's ``partial(ppo_loss, config=...)`` as the worker built it.
        objective: the term.
        token_filter: which policy tokens carry it.
    """

    def __init__(
        self, base: partial, objective: AuxiliaryLoss | GatedLoss, token_filter: TokenFilter | None = None
    ) -> None:
        self.base = base
        self.objective = objective
        self.token_filter = token_filter or TokenFilter(FilterConfig())
        #: Set by the engine for the micro-batch at hand.
        self.teacher_seconds = 0.0
        self.divergence_seconds = 0.0

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """verl's loss interface.

        Args:
            model_output: of the engine, with :data:`DIVERGENCE` for an auxiliary loss.
            data: the micro-batch, with :data:`TEACHER_LOG_PROBS` for a gated one, and perhaps :data:`WEIGHT`.

        Returns:
            the loss to differentiate (scalar), and metrics.
        """
        loss, term, token_losses, distilled, metrics = self._terms(model_output, data, dp_group)
        metrics["distillation/loss"] = Metric(value=term, aggregation=AggregationType.SUM)
        for name, value in self._raw_sums(token_losses.detach(), distilled, data, model_output).items():
            metrics[RAW + name] = Metric(value=value, aggregation=AggregationType.SUM)
        return loss + self._weight(data) * term, metrics

    def value(self, model_output: dict[str, torch.Tensor], data: TensorDict) -> torch.Tensor:
        """The loss alone, scalar."""
        loss, term, *_ = self._terms(model_output, data, None)
        return loss + self._weight(data) * term

    def _terms(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """verl's loss, the objective's, both scalar; ``l_t`` and which tokens carry it, ``[B, T]``; verl's metrics."""
        loss, metrics = self.base(model_output=model_output, data=data, dp_group=dp_group)
        mask = data["response_mask"].to_padded_tensor(0).bool()
        has_context = data["privilege_source"].reshape(-1, 1) > 0
        distilled = self.token_filter.padded(data, mask & has_context)
        token_losses = self._token_losses(model_output, data, distilled)  # [B, T]
        config = self.base.keywords["config"]
        # The actor's own aggregation with the counts that verl has just put there (over the whole mini-batch
        # and all ranks), so that lambda means the same for any split. Tokens without a context count with 0.
        term = agg_loss(
            loss_mat=token_losses, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info
        )
        return loss, term, token_losses, distilled, metrics

    def _weight(self, data: TensorDict) -> float:
        return tensordict_utils.get_non_tensor_data(data=data, key=WEIGHT, default=self.objective.weight)

    def _token_losses(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, distilled: torch.Tensor
    ) -> torch.Tensor:
        """``l_t``, ``[B, T]``; 0 for tokens that carry no signal."""
        losses = self._unclipped(model_output, data, distilled)
        clip = self.objective.config.token_clip
        return losses if clip is None else losses.clamp(max=clip)

    def _unclipped(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, distilled: torch.Tensor
    ) -> torch.Tensor:
        width = distilled.shape[1]
        if isinstance(self.objective, GatedLoss):
            teacher = data[TEACHER_LOG_PROBS].to_padded_tensor(0.0)[:, :width]
            student = no_padding_2_padding(model_output["log_probs"], data)
            student, teacher = (x.masked_fill(~distilled, 0.0) for x in (student, teacher))
            return self.objective.token_losses(student, teacher)
        estimator = self.objective.sampled()
        if estimator is None:
            return no_padding_2_padding(model_output[DIVERGENCE], data)
        student, teacher = (no_padding_2_padding(model_output[name], data) for name in ("log_probs", SIGNALS[0]))
        old = data["old_log_probs"].to_padded_tensor(0.0)[:, :width]
        # Where nothing is distilled, 0 stands for all three, so that nothing overflows on its way to being masked.
        student, teacher, old = (x.masked_fill(~distilled, 0.0) for x in (student, teacher, old))
        return estimator(student, teacher.detach(), old).masked_fill(~distilled, 0.0)

    def _raw_sums(
        self,
        token_losses: torch.Tensor,
        distilled: torch.Tensor,
        data: TensorDict,
        model_output: dict[str, torch.Tensor],
    ) -> dict[str, float]:
        """The same keys for every micro-batch."""
        mask = data["response_mask"].to_padded_tensor(0).bool()
        width = mask.shape[1]
        ids = {n: data[n].to_padded_tensor(-1)[:, :width] for n in ("turn_ids", "action_ids") if n in data}
        if "task_ids" in data:
            ids["task_ids"] = data["task_ids"].reshape(-1, 1)
        sums = insight.raw_sums(token_losses, mask, distilled, ids)
        if SIGNALS[0] in model_output:
            padded = [no_padding_2_padding(model_output[name].detach(), data) for name in ("log_probs", *SIGNALS)]
            sums |= insight.signal_sums(distilled, *padded)
        return sums | {"teacher_seconds": self.teacher_seconds, "divergence_seconds": self.divergence_seconds}


#: verl's policy losses that are sums over tokens (``actor.policy_loss.loss_mode``).
_TOKEN_WISE = ("vanilla", "gpg", "cispo", "dppo_tv", "dppo_kl", "sapo")


def foreseeable(loss_function: Any) -> bool:
    """Whether each token's derivatives follow from that token's own outputs, so that ``head.py`` can ask early."""
    base = loss_function.base if isinstance(loss_function, MapdLoss) else loss_function
    if not isinstance(base, partial) or base.func is not ppo_loss:
        return False
    policy_loss = base.keywords["config"].policy_loss
    return (policy_loss.get("loss_mode", "vanilla") if policy_loss is not None else "vanilla") in _TOKEN_WISE


def loss_value(loss_function: Any, model_output: dict[str, torch.Tensor], data: TensorDict) -> torch.Tensor:
    """The scalar that a foreseeable loss function returns, without the metrics where they can be left out."""
    if isinstance(loss_function, MapdLoss):
        return loss_function.value(model_output, data)
    return loss_function(model_output=model_output, data=data, dp_group=None)[0]
