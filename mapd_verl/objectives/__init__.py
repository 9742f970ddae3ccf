"""Objectives: what a signal does to the update. A recipe names one; adding one adds a file and a line here."""

from __future__ import annotations

from mapd_verl.config import ObjectiveConfig
from mapd_verl.objectives.base import AuxiliaryLoss, Objective
from mapd_verl.objectives.bounded_advantage import BoundedAdvantage
from mapd_verl.objectives.forward_kl import ForwardKLObjective
from mapd_verl.objectives.gated import SigmoidGatedLoss
from mapd_verl.objectives.jsd import JSDObjective
from mapd_verl.objectives.none import NoObjective
from mapd_verl.objectives.reverse_kl import ReverseKLObjective
from mapd_verl.objectives.sampled import AdvantageObjective, GatedLoss, RewardObjective
from mapd_verl.objectives.scaled_advantage import ScaledAdvantage
from mapd_verl.objectives.teacher_advantage import TeacherAdvantage
from mapd_verl.objectives.teacher_reward import TeacherReward

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (
        NoObjective,
        ReverseKLObjective,
        ForwardKLObjective,
        JSDObjective,
        SigmoidGatedLoss,
        BoundedAdvantage,
        ScaledAdvantage,
        TeacherAdvantage,
        TeacherReward,
    )
}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective a recipe names; with weight 0 it is GRPO, whatever the name, and runs no teacher."""
    return OBJECTIVES[config.name](config) if config.weight > 0 else NoObjective(config)


__all__ = [
    "OBJECTIVES",
    "AdvantageObjective",
    "AuxiliaryLoss",
    "GatedLoss",
    "Objective",
    "RewardObjective",
    "make_objective",
]
