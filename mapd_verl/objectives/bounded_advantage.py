"""EviSD's bounded change of the advantage (arXiv 2608.01359)."""

import torch

from mapd_verl.objectives.sampled import AdvantageObjective


class BoundedAdvantage(AdvantageObjective):
    """``A'_t = A_t + lambda |A_t| tanh(tau d_t)``, ``tau`` = ``sharpness``.

    With lambda below 1 no sign changes, and where ``A_t`` is 0 nothing does. The paper's ``a_t`` (search and answer
    actions only) is ``mapd.filter.actions``.
    """

    name = "bounded_advantage"

    def advantages(self, advantages: torch.Tensor, log_ratio: torch.Tensor, weight: float) -> torch.Tensor:
        assert self.config.sharpness is not None
        return advantages + weight * advantages.abs() * torch.tanh(self.config.sharpness * log_ratio)
