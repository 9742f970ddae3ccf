"""The policy before the step's update; the live teacher's equal while a step has one mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mapd_verl.teachers.base import Teacher
from mapd_verl.teachers.weights import copy_of, lent


class Snapshot(Teacher):
    """Keeps one copy of the trainable weights (this rank's shards), and a second while the teacher runs."""

    name = "snapshot"
    _weights: dict[str, torch.Tensor] | None = None

    def before_update(self, engine: Any) -> None:
        self._weights = copy_of(engine.module)

    @contextmanager
    def module(self, engine: Any) -> Iterator[torch.nn.Module]:
        if self._weights is None:  # scored before the update: the policy is its own snapshot
            yield engine.module
        else:
            with lent(engine.module, self._weights) as module:
                yield module
