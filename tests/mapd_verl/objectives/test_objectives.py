import pytest
import torch

from mapd_verl.config import EstimatorConfig, ObjectiveConfig
from mapd_verl.config.schema import OBJECTIVE_NAMES
from mapd_verl.divergence import ForwardKL, TopK, divergence_from_logits
from mapd_verl.objectives import OBJECTIVES, AuxiliaryLoss, make_objective

#: What each needs beside its weight.
KEYS = {
    "jsd": {"beta": 0.5},
    "sigmoid_gated": {"sharpness": 5.0},
    "bounded_advantage": {"sharpness": 5.0},
    "scaled_advantage": {"ratio_clip": 0.2},
}


def test_the_schema_knows_the_registry():
    assert tuple(OBJECTIVES) == OBJECTIVE_NAMES


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_weight_zero_is_grpo_whatever_the_name(name):
    assert make_objective(ObjectiveConfig(name=name, weight=0.0, **KEYS.get(name, {}))).needs_teacher is False


@pytest.mark.parametrize("name", [n for n, kind in OBJECTIVES.items() if issubclass(kind, AuxiliaryLoss)])
def test_each_objective_is_zero_at_the_teacher_and_pulls_towards_it(name):
    objective = make_objective(ObjectiveConfig(name=name, weight=0.1, **KEYS.get(name, {})))
    assert isinstance(objective, AuxiliaryLoss) and objective.needs_teacher and objective.weight == 0.1
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9)

    def token_losses(s, t):
        return divergence_from_logits(s, t, objective.of_distributions())

    before = token_losses(student, teacher)
    (gradient,) = torch.autograd.grad(before.sum(), student)
    after = token_losses(student.detach() - 0.1 * gradient, teacher)
    assert (after < before).all()
    assert token_losses(teacher.clone(), teacher).abs().max() < 1e-6


def test_no_objective_adds_nothing():
    assert make_objective(ObjectiveConfig(name="none", weight=0.5)).needs_teacher is False


def test_the_recipe_chooses_the_estimator():
    topk = make_objective(ObjectiveConfig(clip=0.05, estimator=EstimatorConfig(name="topk", k=64, of="union")))
    assert isinstance(topk, AuxiliaryLoss) and topk.sampled() is None
    divergence = topk.of_distributions()
    assert isinstance(divergence, TopK) and (divergence.k, divergence.of) == (64, "union")
    assert divergence.inner.clip == 0.05
    sampled = make_objective(ObjectiveConfig(estimator=EstimatorConfig(name="sampled", sample="k3_weighted")))
    assert isinstance(sampled, AuxiliaryLoss) and sampled.of_distributions() is None
    assert sampled.sampled() is not None
    end = make_objective(ObjectiveConfig(name="jsd", beta=0.0))
    assert isinstance(end, AuxiliaryLoss) and isinstance(end.of_distributions(), ForwardKL)
