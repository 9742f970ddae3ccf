"""RLSD's scaled advantage (arXiv 2604.03128)."""

import torch

from mapd_verl.objectives.sampled import AdvantageObjective


class ScaledAdvantage(AdvantageObjective):
    """``A'_t = A_t [(1 - l) + l clip(exp(sign(A_t) d_t), 1 - e, 1 + e)]``, ``e`` = ``ratio_clip``, ``l`` the weight."""

    name = "scaled_advantage"

    def advantages(self, advantages: torch.Tensor, log_ratio: torch.Tensor, weight: float) -> torch.Tensor:
        clip = self.config.ratio_clip
        assert clip is not None
        ratio = torch.exp(torch.sign(advantages) * log_ratio).clamp(1.0 - clip, 1.0 + clip)
        return advantages * ((1.0 - weight) + weight * ratio)
