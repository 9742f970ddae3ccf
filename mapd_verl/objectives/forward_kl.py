"""The mode-covering sibling of MAPD's term (OPSD with beta 0)."""

from mapd_verl.divergence import Divergence, ForwardKL
from mapd_verl.objectives.base import AuxiliaryLoss


class ForwardKLObjective(AuxiliaryLoss):
    """``l_t = KL( sg pi_theta(.|x, z, y_<t) || pi_theta(.|x, y_<t) )`` over the whole vocabulary."""

    name = "forward_kl"

    def divergence(self) -> Divergence:
        return ForwardKL(self.config.clip)
