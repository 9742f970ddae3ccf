"""Reverse KL from the sampled token alone: estimators whose expected gradient is right.

``S`` is the student's log-probability of the sampled token, ``T`` the teacher's, ``S_old`` that of the policy that
sampled it; ``d = S - T``; ``r = exp(S - S_old)``; ``sg`` stops the gradient. Samples come from ``exp(S_old)``. The
target is the gradient of ``KL(student || teacher)``, which is ``E_student[d * grad S]``.

Weighted by ``r`` with its gradient, ``E_old[r f(d)] = E_student[f(d)]`` holds as functions of the parameters, so its
gradient is that of ``E_student[f(d)]``: right for each ``f`` whose mean is the reverse KL (k1, k3) and for no other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mapd_verl.config.estimators import refusal

#: Bounds against overflow, as in Skill-SD (arXiv 2604.10674): of ``T - S`` and of ``S - S_old``.
MAX_LOG_RATIO, MAX_LOG_WEIGHT = 20.0, 10.0

Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _weight(student: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (student - old).clamp(max=MAX_LOG_WEIGHT).exp()


def score(student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``r * sg(d)``: ``d`` as a stop-gradient (negative) advantage, as Thinking Machines' on-policy distillation."""
    return _weight(student, old) * (student - teacher).detach()


def k1_weighted(student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``r * d``, both with gradient. Its further term ``r * grad S`` has mean 0 and adds variance only."""
    return _weight(student, old) * (student - teacher)


def k2(student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``sg(r) * d^2 / 2``: the gradient is ``r d grad S``, as :func:`score`; the *value* is no estimate of the KL."""
    return _weight(student, old).detach() * (student - teacher).square() / 2


def k3_weighted(student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``r * (exp(-d) - 1 + d)``, both with gradient: Skill-SD's (arXiv 2604.10674). Never negative."""
    difference = student - teacher
    return _weight(student, old) * (torch.exp((-difference).clamp(max=MAX_LOG_RATIO)) - 1 + difference)


#: What ``mapd.objective.estimator.sample`` may name.
SAMPLED: dict[str, Estimator] = {"score": score, "k1_weighted": k1_weighted, "k2": k2, "k3_weighted": k3_weighted}


def sampled_estimator(name: str) -> Estimator:
    """The estimator ``f(S, T, S_old)``, elementwise; ``T`` and ``S_old`` carry no gradient.

    Raises:
        ValueError: one line with the reason for a refused name, or the names to choose from.
    """
    if name not in SAMPLED:
        raise ValueError(refusal(name))
    return SAMPLED[name]
