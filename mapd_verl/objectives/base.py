"""The interface of objectives.

An objective says what it needs to see and where it enters the update. So far everything enters as an
auxiliary loss on a live teacher's logits. Signals that change the advantage (EviSD) or the reward (DGPO)
become further subclasses of :class:`Objective` beside :class:`AuxiliaryLoss`, each with the one method that
the trainer calls at that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from mapd_verl.config import ObjectiveConfig
from mapd_verl.divergence import Divergence, divergence_from_logits


class Objective(ABC):
    """One row of the table of methods, its privileged context apart."""

    #: What a recipe calls it.
    name: ClassVar[str]

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @property
    def needs_teacher(self) -> bool:
        """Whether the update runs a second, privileged forward."""
        return isinstance(self, AuxiliaryLoss)


class AuxiliaryLoss(Objective):
    """``L = L_GRPO + weight * agg_t m_t l_t``, with ``l_t`` from both views' logits at policy tokens."""

    @property
    def weight(self) -> float:
        """Lambda."""
        return self.config.weight

    @abstractmethod
    def divergence(self) -> Divergence:
        """The divergence ``l_t``."""

    def token_losses(self, student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        """``l_t`` in nats, ``[N]``, from two ``[N, V]`` tensors; differentiable in the student's."""
        return divergence_from_logits(
            student_logits, teacher_logits, self.divergence(), chunk_tokens=self.config.chunk_tokens
        )
