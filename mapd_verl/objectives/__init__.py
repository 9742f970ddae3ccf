"""Objectives: what a signal does to the update. A recipe names one; adding one adds a file and a line here."""

from __future__ import annotations

from mapd_verl.config import ObjectiveConfig
from mapd_verl.objectives.base import AuxiliaryLoss, Objective
from mapd_verl.objectives.forward_kl import ForwardKLObjective
from mapd_verl.objectives.jsd import JSDObjective
from mapd_verl.objectives.none import NoObjective
from mapd_verl.objectives.reverse_kl import ReverseKLObjective

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective for objective in (NoObjective, ReverseKLObjective, ForwardKLObjective, JSDObjective)
}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective a recipe names; with weight 0 it is GRPO, whatever the name, and runs no teacher."""
    return OBJECTIVES[config.name](config) if config.weight > 0 else NoObjective(config)


__all__ = ["OBJECTIVES", "AuxiliaryLoss", "Objective", "make_objective"]
