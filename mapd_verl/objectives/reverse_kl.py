"""MAPD (arXiv 2607.24280), and GRPO+OPSD when the context is an own rollout."""

from mapd_verl.divergence import Divergence, ReverseKL
from mapd_verl.objectives.base import AuxiliaryLoss


class ReverseKLObjective(AuxiliaryLoss):
    """``l_t = KL( pi_theta(.|x, y_<t) || sg pi_theta(.|x, z, y_<t) )`` over the whole vocabulary."""

    name = "reverse_kl"

    def divergence(self) -> Divergence:
        return ReverseKL(self.config.clip)
