"""A moving average of the policy (SDPO, arXiv 2601.20802)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mapd_verl.teachers.base import Teacher
from mapd_verl.teachers.weights import copy_of, lent


class EMA(Teacher):
    """``teacher = decay * teacher + (1 - decay) * policy`` after each optimizer step, in float32; starts as the policy.

    Keeps one float32 copy of the trainable weights (this rank's shards), and a second copy while the teacher runs.
    """

    name = "ema"

    def prepare(self, engine: Any) -> None:
        self._weights = {name: weight.float() for name, weight in copy_of(engine.module).items()}

    def after_step(self, engine: Any) -> None:
        for name, weight in copy_of(engine.module).items():
            self._weights[name].lerp_(weight.float(), 1.0 - self.config.ema_decay)

    @contextmanager
    def module(self, engine: Any) -> Iterator[torch.nn.Module]:
        with lent(engine.module, self._weights) as module:
            yield module

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: weight.cpu() for name, weight in self._weights.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(state[name])
