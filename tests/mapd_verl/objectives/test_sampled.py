"""Objectives on the sampled token, against the papers' formulas term by term in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapd_verl.config import ObjectiveConfig
from mapd_verl.objectives import AdvantageObjective, GatedLoss, RewardObjective, make_objective

FLOATS = st.floats(-5, 5, allow_subnormal=False)


def make(name, **keys):
    return make_objective(ObjectiveConfig(name=name, **{"weight": 0.2, **keys}))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(FLOATS, FLOATS)
def test_sdars_gate(s, t):
    objective = make("sigmoid_gated", sharpness=5.0)
    assert isinstance(objective, GatedLoss) and objective.needs_signal and not objective.in_update
    student, teacher = tensor([s]).requires_grad_(), tensor([t]).requires_grad_()
    loss = objective.token_losses(student, teacher)
    gate = 1 / (1 + math.exp(-5 * (t - s)))
    assert loss.item() == pytest.approx(gate * (t - s), abs=1e-12)
    loss.sum().backward()
    # Only the linear part carries gradient: neither the gate nor the teacher does.
    assert student.grad.item() == pytest.approx(-gate, abs=1e-12) and teacher.grad is None


@given(FLOATS, FLOATS)
def test_evisds_bounded_change_keeps_the_sign(a, d):
    objective = make("bounded_advantage", sharpness=5.0)
    assert isinstance(objective, AdvantageObjective)
    changed = objective.advantages(tensor([[a]]), tensor([[d]]), 0.2).item()
    assert changed == pytest.approx(a + 0.2 * abs(a) * math.tanh(5 * d), abs=1e-12)
    assert changed * a >= 0 and abs(changed - a) <= 0.2 * abs(a) + 1e-12


@given(FLOATS, FLOATS)
def test_rlsds_scale(a, d):
    changed = make("scaled_advantage", ratio_clip=0.2).advantages(tensor([[a]]), tensor([[d]]), 0.5).item()
    ratio = min(max(math.exp(math.copysign(1.0, a) * d if a else 0.0), 0.8), 1.2)
    assert changed == pytest.approx(a * (0.5 + 0.5 * ratio), abs=1e-12)


def test_thinking_machines_advantage_is_the_reverse_kl_gradient_in_expectation():
    """On a vocabulary of five, the expectation taken exactly."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(5, dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    advantages = make("teacher_advantage").advantages(torch.zeros(5), (log_q - log_p).detach(), 1.0)
    surrogate = -(log_p.detach().exp() * advantages * log_p).sum()
    (estimate,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(estimate, exact)


def test_where_no_teacher_speaks_no_advantage_changes():
    a = torch.tensor([[1.0, -2.0, 0.0]])
    zeros = torch.zeros_like(a)
    for name, keys in (
        ("bounded_advantage", {"sharpness": 5.0}),
        ("scaled_advantage", {"ratio_clip": 0.2}),
        ("teacher_advantage", {}),
    ):
        assert torch.equal(make(name, **keys).advantages(a, zeros, 0.3), a)


def test_dgpo_changes_wrong_trajectories_only_and_policy_tokens_only():
    objective = make("teacher_reward")
    assert isinstance(objective, RewardObjective)
    d = torch.tensor([[0.5, -1.0, 2.0], [0.5, -1.0, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    change = objective.reward_change(d, torch.tensor([False, True]), mask, 0.1)
    torch.testing.assert_close(change, torch.tensor([[0.05, -0.1, 0.0], [0.0, 0.0, 0.0]]))
