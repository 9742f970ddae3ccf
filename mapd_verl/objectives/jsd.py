"""OPSD's generalised Jensen-Shannon divergence (arXiv 2601.18734)."""

from mapd_verl.divergence import Divergence, make_jsd
from mapd_verl.objectives.base import AuxiliaryLoss


class JSDObjective(AuxiliaryLoss):
    """``l_t = JSD_beta`` of both views over the whole vocabulary; ``beta`` is the teacher's weight."""

    name = "jsd"

    def divergence(self) -> Divergence:
        if self.config.beta is None:
            raise ValueError("mapd.objective.beta: jsd needs it")
        return make_jsd(self.config.beta, self.config.clip)
