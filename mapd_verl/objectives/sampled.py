"""Objectives on the sampled token's two log-probabilities, scored before the update; interfaces.

``S_t`` is the student's log-probability of ``y_t``, ``T_t`` the teacher's, ``d_t = sg(T_t - S_t)``; where a token has
no teacher ``d_t`` is 0. None of these is a divergence: docs/objective.md says what each computes.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from mapd_verl.objectives.base import Objective


class GatedLoss(Objective):
    """``L = L_GRPO + weight * agg_t m_t l_t`` with ``l_t`` from log-probabilities of the sampled token."""

    needs_signal = True

    @abstractmethod
    def token_losses(self, log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
        """``l_t``, same shape.

        Args:
            log_probs: the student's at this moment; carries gradient.
            teacher_log_probs: ``T_t``; none reaches it.
        """


class AdvantageObjective(Objective):
    """Changes ``A_t`` before the update and adds no loss."""

    needs_signal = True

    @abstractmethod
    def advantages(self, advantages: torch.Tensor, log_ratio: torch.Tensor, weight: float) -> torch.Tensor:
        """``A'_t``, ``[B, T]``.

        Args:
            advantages: ``A_t``, ``[B, T]``.
            log_ratio: ``d_t``, ``[B, T]``, 0 where nothing is to change.
            weight: lambda at this step.
        """


class RewardObjective(Objective):
    """Changes token rewards before advantages are computed, and adds no loss."""

    needs_signal = True

    @abstractmethod
    def reward_change(
        self, log_ratio: torch.Tensor, successful: torch.Tensor, mask: torch.Tensor, weight: float
    ) -> torch.Tensor:
        """What is added to the token rewards, ``[B, T]``.

        Args:
            log_ratio: ``d_t``, ``[B, T]``.
            successful: which trajectories earned the success score, ``[B]`` bool.
            mask: policy tokens, ``[B, T]`` bool.
            weight: beta at this step.
        """
