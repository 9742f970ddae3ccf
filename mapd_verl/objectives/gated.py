"""SDAR's gated term (arXiv 2605.15155)."""

import torch

from mapd_verl.objectives.sampled import GatedLoss


class SigmoidGatedLoss(GatedLoss):
    """``l_t = sg sigmoid(b d_t) * (sg(T_t) - S_t)``, ``b`` = ``sharpness``.

    Its gradient raises the sampled token's probability, the more the better the teacher likes it: gated
    self-imitation, no reverse-KL gradient (with the gate fixed at 1/2 its expectation on policy is zero).
    """

    name = "sigmoid_gated"

    def token_losses(self, log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
        assert self.config.sharpness is not None
        gap = teacher_log_probs.detach() - log_probs
        return torch.sigmoid(self.config.sharpness * gap.detach()) * gap
