"""The interface of objectives.

An objective says what it needs to see and where it enters the update. So far everything enters as an
auxiliary loss on both views' distributions. Signals that change the advantage (EviSD) or the reward (DGPO)
become further subclasses of :class:`Objective` beside :class:`AuxiliaryLoss`, each with the one method that
the trainer calls at that place.
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

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @property
    def needs_teacher(self) -> bool:
        """Whether the update runs a second, privileged forward."""
        return isinstance(self, AuxiliaryLoss)


class AuxiliaryLoss(Objective):
    """``L = L_GRPO + weight * agg_t m_t l_t``, with ``l_t`` from both views' distributions at policy tokens."""

    @property
    def weight(self) -> float:
        """Lambda."""
        return self.config.weight

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
