"""Names of how a divergence is computed, readable without torch. The maths: ``mapd_verl/divergence``."""

from __future__ import annotations

ESTIMATORS = ("full", "topk", "sampled")
TOPK_OF = ("student", "teacher", "union")

#: Estimates of the reverse KL from the sampled token whose expected gradient is right.
SAMPLED_NAMES = ("score", "k1_weighted", "k2", "k3_weighted")

#: Those whose expected gradient is not, and why. ``d`` is ``S - T``, ``r`` the ratio to the policy that sampled.
REFUSED = {
    "k1": "differentiating d itself gives grad S, whose mean under the policy is 0: it trains nothing",
    "k3": "differentiating exp(-d) - 1 + d without the weight r gives (1 - exp(-d)) grad S, whose mean is the gradient "
    "of the forward KL(teacher || student)",
    "k2_weighted": "r * d^2 / 2 with the weight's gradient follows the mean of d^2 / 2, which is not the reverse KL",
    "abs": "|d| gives sign(d) grad S, which weighs a small difference like a large one: not the reverse KL",
}


def refusal(name: str) -> str:
    """One line for a name that is no :data:`SAMPLED_NAMES`."""
    names = ", ".join(SAMPLED_NAMES)
    if name in REFUSED:
        return f"{name!r} has the wrong expected gradient: {REFUSED[name]}; use {names}"
    return f"unknown sampled estimator {name!r}, choose from {names}"
