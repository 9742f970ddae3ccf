"""DGPO's reward of wrong trajectories (arXiv 2508.20324)."""

import torch

from mapd_verl.objectives.sampled import RewardObjective


class TeacherReward(RewardObjective):
    """``r_t = score_t - beta (S_t - T_t) m_t [the trajectory is wrong]``, ``beta`` the weight.

    The paper's teacher is another model that reads the student's own prompt: ``mapd.teacher.kind: external``,
    ``mapd.privilege.context: empty``.
    """

    name = "teacher_reward"

    def reward_change(
        self, log_ratio: torch.Tensor, successful: torch.Tensor, mask: torch.Tensor, weight: float
    ) -> torch.Tensor:
        return weight * log_ratio * (mask & ~successful.unsqueeze(-1))
