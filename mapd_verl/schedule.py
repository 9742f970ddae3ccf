"""Lambda as a function of the training step."""

from __future__ import annotations

import math

from mapd_verl.config.method import ScheduleConfig


def factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """What ``objective.weight`` is multiplied by.

    Args:
        step: of the training, counted from 1.
        total_steps: of the training; where a null ``steps`` ends.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    length = config.steps if config.steps is not None else max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / length)
    if config.kind == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    return 1.0 + (config.end - 1.0) * done
