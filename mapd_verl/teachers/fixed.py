"""The policy before training: OPSD's own teacher (arXiv 2601.18734)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mapd_verl.teachers.base import Teacher
from mapd_verl.teachers.weights import copy_of, lent


class Fixed(Teacher):
    """With LoRA the base model without its adapters, which costs nothing; else one copy of the weights."""

    name = "fixed"

    def prepare(self, engine: Any) -> None:
        # A checkpoint is loaded later: a resumed run has the same teacher as the first.
        self._adapters = hasattr(engine.module, "disable_adapter")
        self._weights = {} if self._adapters else copy_of(engine.module)
        if self._adapters:
            self.head = "student"  # adapters on the head itself are refused (head.py)

    @contextmanager
    def module(self, engine: Any) -> Iterator[torch.nn.Module]:
        if self._adapters:
            with engine.module.disable_adapter():
                yield engine.module
        else:
            with lent(engine.module, self._weights) as module:
                yield module
