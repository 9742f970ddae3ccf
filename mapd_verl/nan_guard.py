"""The NaN guard: a loss or gradient that is no finite number leaves its batch on disk before anything else happens.

verl skips the optimizer step and prints a line; the batch is gone by the time somebody looks.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from mapd_verl.config.safety import NanGuardConfig
from mapd_verl.errors import UserError

if TYPE_CHECKING:

    class _Base:
        """The part of verl's FSDP engine that the mixin stands on."""

        def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool) -> Any: ...
        def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any: ...
        def optimizer_step(self) -> float: ...

else:
    _Base = object


class NanGuard(_Base):
    """Mixin before an engine. ``skip`` leaves the skipping itself to verl: a NaN loss makes a NaN gradient norm."""

    nan_guard: NanGuardConfig = NanGuardConfig(action="off")
    nan_folder: Path = Path("nan")
    _mini_batch: TensorDict | None = None
    _updates = 0
    _dumps = 0
    _dumped = False

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        if self.nan_guard.action != "off" and not forward_only:
            self._mini_batch, self._dumped = data, False
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only and self.nan_guard.action != "off" and not math.isfinite(output["loss"]):
            # The metrics say which term it was.
            self._report("loss", output["loss"], micro_batch, output["metrics"])
        return loss, output

    def optimizer_step(self) -> float:
        grad_norm = super().optimizer_step()
        self._updates += 1
        if self.nan_guard.action != "off" and not math.isfinite(grad_norm) and not self._dumped:
            assert self._mini_batch is not None
            self._report("gradient norm", grad_norm, self._mini_batch, {})
        self._mini_batch = None
        return grad_norm

    def _report(self, what: str, value: float, batch: TensorDict, metrics: dict[str, Any]) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        where = "no batch written: mapd.nan_guard.max_dumps is used up"
        if self._dumps < self.nan_guard.max_dumps:
            path = self.nan_folder / f"update{self._updates}_rank{rank}_{time.time_ns()}.pt"
            dump(path, batch, {"what": what, "value": value, "update": self._updates, "rank": rank}, metrics)
            self._dumps += 1
            where = f"batch: {path}"
        self._dumped = True
        text = f"the {what} of update {self._updates} is {value} on rank {rank}; {where}"
        if self.nan_guard.action == "stop":
            raise UserError(text)
        print(f"mapd.nan_guard: {text}", flush=True)


def dump(path: Path, batch: TensorDict, facts: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Write a batch so that ``torch.load(path, weights_only=True)`` reads it anywhere, without verl.

    The file holds ``facts``, ``metrics`` (as text) and ``fields``: each tensor field as a list of its rows.

    Raises:
        OSError: the folder can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {
        key: [row.detach().cpu().clone() for row in value.unbind()]
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    text = {key: str(getattr(value, "values", value)) for key, value in metrics.items()}
    unfinished = path.with_suffix(".part")
    torch.save({"facts": facts, "metrics": text, "fields": fields}, unfinished)
    unfinished.rename(path)
