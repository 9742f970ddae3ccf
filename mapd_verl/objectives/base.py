"""The interface of objectives.

An objective says what it needs to see and where it enters the update: as an auxiliary loss on both views' whole
distributions (:class:`AuxiliaryLoss`), or through the sampled token's two log-probabilities (``sampled.py``) as a
gated loss, a change of the advantage or of the reward. Each kind has the one method that is called at that place.
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

    #: Whether the update itself runs a second, privileged forward.
    in_update: ClassVar[bool] = False
    #: Whether the teacher scores the sampled tokens before the update.
    needs_signal: ClassVar[bool] = False

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @property
    def needs_teacher(self) -> bool:
        """Whether privileged contexts have to be chosen at all."""
        return self.in_update or self.needs_signal

    @property
    def weight(self) -> float:
        """Lambda, before any schedule."""
        return self.config.weight


class AuxiliaryLoss(Objective):
    """``L = L_GRPO + weight * agg_t m_t l_t``, with ``l_t`` from both views' logits at policy tokens."""

    in_update = True

    @abstractmethod
    def divergence(self) -> Divergence:
        """The divergence ``l_t``."""

    def token_losses(self, student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        """``l_t`` in nats, ``[N]``, from two ``[N, V]`` tensors; differentiable in the student's."""
        return divergence_from_logits(
            student_logits, teacher_logits, self.divergence(), chunk_tokens=self.config.chunk_tokens
        )
