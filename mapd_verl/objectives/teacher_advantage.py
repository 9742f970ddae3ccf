"""Thinking Machines' on-policy distillation: the sampled reverse KL as an advantage."""

import torch

from mapd_verl.objectives.sampled import AdvantageObjective


class TeacherAdvantage(AdvantageObjective):
    """``A'_t = A_t - c (S_t - T_t)``, ``c`` the weight: an unbiased reverse-KL gradient, as a policy gradient."""

    name = "teacher_advantage"

    def advantages(self, advantages: torch.Tensor, log_ratio: torch.Tensor, weight: float) -> torch.Tensor:
        return advantages + weight * log_ratio
