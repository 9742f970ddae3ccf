"""Which policy tokens carry the signal (``mapd.filter``): one rule for the ragged tensors of the engine and the
padded ones of the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

from mapd_verl import insight, views
from mapd_verl.config.method import FilterConfig
from mapd_verl.errors import UserError

#: Batch fields that a filter may read.
FILTER_FIELDS = ("turn_ids", "action_ids", "task_ids")


class TokenFilter:
    """See :class:`FilterConfig`."""

    def __init__(self, config: FilterConfig) -> None:
        self._wanted: dict[str, list[int]] = {}
        if config.task_types is not None:
            self._wanted["task_ids"] = [insight.TASKS.index(name) for name in config.task_types]
        if config.turns is not None:
            self._wanted["turn_ids"] = list(config.turns)
        if config.actions is not None:
            self._wanted["action_ids"] = [insight.ACTIONS.index(name) for name in config.actions]

    def __bool__(self) -> bool:
        """Whether any token may be left out."""
        return bool(self._wanted)

    def selected(self, batch: TensorDict, selection: views.TokenSelection) -> torch.Tensor:
        """Which of the selected tokens count, ``[N]`` bool."""
        keep = torch.ones(len(selection), dtype=torch.bool, device=selection.rows.device)
        return self._apply(
            batch,
            keep,
            per_row=lambda ids: ids.reshape(-1)[selection.rows],
            per_token=lambda ids: views.take(ids, selection),
        )

    def padded(self, batch: TensorDict, mask: torch.Tensor) -> torch.Tensor:
        """``mask`` (``[B, T]`` bool) without the tokens that don't count."""
        width = mask.shape[1]
        return self._apply(
            batch,
            mask,
            per_row=lambda ids: ids.reshape(-1, 1),
            per_token=lambda ids: ids.to_padded_tensor(-1)[:, :width],
        )

    def _apply(
        self,
        batch: TensorDict,
        keep: torch.Tensor,
        per_row: Callable[[torch.Tensor], torch.Tensor],
        per_token: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Raises ``UserError`` where the batch lacks the field that the filter reads."""
        for field, wanted in self._wanted.items():
            if field not in batch:
                raise UserError(f"mapd.filter: the batch has no {field} (another agent loop than mapd_search?)")
            numbers = (per_row if field == "task_ids" else per_token)(batch[field])
            keep = keep & torch.isin(numbers, torch.tensor(wanted, device=numbers.device))
        return keep
