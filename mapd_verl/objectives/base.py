"""The interface of objectives.

An objective says what it needs to see and where it enters the update: as an auxiliary loss on both views' whole
distributions (:class:`AuxiliaryLoss`), or through the sampled token's two log-probabilities (``sampled.py``) as a
gated loss, a change of the advantage or of the reward. Each kind has the one method that is called at that place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mapd_verl.config import ObjectiveConfig
from mapd_verl.divergence import Divergence, TopK, sampled_estimator
from mapd_verl.divergence.sampled import Estimator


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
    """``L = L_GRPO + weight * agg_t m_t l_t``, with ``l_t`` from both views' distributions at policy tokens."""

    in_update = True

    @abstractmethod
    def divergence(self) -> Divergence:
        """The divergence ``l_t`` over the whole vocabulary, clipped as the recipe says."""

    def of_distributions(self) -> Divergence | None:
        """What the head computes of both views' distributions; None where the sampled token alone is compared."""
        estimator = self.config.estimator
        if estimator.name == "sampled":
            return None
        if estimator.name == "topk":
            assert estimator.k is not None and estimator.of is not None  # the schema's check
            return TopK(self.divergence(), estimator.k, estimator.of)
        return self.divergence()

    def sampled(self) -> Estimator | None:
        """``l_t`` of the sampled token's log-probabilities ``S, T, S_old``; None where distributions are compared."""
        estimator = self.config.estimator
        return sampled_estimator(str(estimator.sample)) if estimator.name == "sampled" else None
