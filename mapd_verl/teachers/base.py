"""Whose weights the teacher forward runs with.

A teacher is a place in time of the policy's own weights, or another model. The engine asks for the module to run
(:meth:`Teacher.module`), inside a context in which its weights are the teacher's; outside of it the student's are
there again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from mapd_verl.config.method import TeacherConfig


class Teacher:
    """One per actor rank, made before a checkpoint is loaded. The hooks do nothing unless a subclass says so."""

    #: What a recipe calls it.
    name: ClassVar[str]
    #: Whose output head the teacher's hidden states go through: the ``student``'s as it is, one that is ``lent`` (gone
    #: when the module is given back), or its ``own``.
    head: str = "lent"

    def __init__(self, config: TeacherConfig) -> None:
        self.config = config

    def prepare(self, engine: Any) -> None:
        """Called once, with the policy's initial weights in place."""

    def before_update(self, engine: Any) -> None:
        """Called once per training step, before its first mini-batch."""

    def after_step(self, engine: Any) -> None:
        """Called after each optimizer step."""

    @contextmanager
    def module(self, engine: Any) -> Iterator[torch.nn.Module]:
        """The module to run, for the time of the context."""
        yield engine.module

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """This rank's part of what a resumed run needs; None if it needs nothing."""
        return None

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        raise ValueError(f"mapd.teacher.kind={self.name} keeps no state")
