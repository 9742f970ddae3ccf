"""GRPO: nothing is added."""

from mapd_verl.objectives.base import Objective


class NoObjective(Objective):
    """The actor's own loss, untouched."""

    name = "none"
