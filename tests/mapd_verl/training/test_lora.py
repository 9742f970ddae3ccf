"""LoRA: the live teacher has its adapters on, the fixed one is the base model, and only adapters learn."""

from __future__ import annotations

import pytest
import torch

from mapd_verl.config import ObjectiveConfig
from mapd_verl.config.method import TeacherConfig
from mapd_verl.loss import MapdLoss
from mapd_verl.objectives import make_objective
from mapd_verl.teachers import make_teacher
from mapd_verl.teachers.live import Live
from mapd_verl.teachers.weights import copy_of, local

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine_and_worker(folder):
    worker = make_worker(folder, lora_rank=4)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():  # adapters as training leaves them: B starts at 0, where they do nothing
        for name, p in worker.engine.module.named_parameters():
            if "lora_B" in name:
                local(p).copy_(0.2 * torch.randn(local(p).shape, generator=g))
    return worker.engine, worker


def rows():
    made = random_rows(5)
    for row in made:
        row.advantage = 0.0
    return made


def kl():
    return MapdLoss(base_loss(), make_objective(ObjectiveConfig(weight=1.0)))


def log_probs(engine, prompt, response, adapters):
    """The module's own logits, with its adapters on or off."""
    from contextlib import nullcontext

    with torch.no_grad(), nullcontext() if adapters else engine.module.disable_adapter():
        logits = engine.module(input_ids=torch.tensor([prompt + response]), use_cache=False).logits
    return torch.log_softmax(logits[0, -len(response) - 1 : -1].double(), -1)


@pytest.mark.parametrize("kind", ["live", "fixed"])
@pytest.mark.parametrize("lean", [True, False])
def test_the_teacher_has_the_adapters_that_its_kind_says(engine_and_worker, kind, lean):
    engine, worker = engine_and_worker
    engine.lean = lean
    engine.teacher = make_teacher(TeacherConfig(kind=kind))
    engine.teacher.prepare(engine)
    try:
        loss, gradients, _ = run(worker, kl(), make_batch(rows(), 2))
    finally:
        engine.lean, engine.teacher = True, Live(TeacherConfig())
    total, tokens = 0.0, 0
    for row in rows():
        student = log_probs(engine, row.prompt, row.response, adapters=True)
        teacher = log_probs(engine, row.teacher_prompt, row.response, adapters=kind == "live")
        mask = torch.tensor(row.mask)
        total += ((student.exp() * (student - teacher)).sum(-1) * mask).sum().item()
        tokens += int(mask.sum())
    assert loss == pytest.approx(total / tokens, rel=1e-4)
    assert gradients and all("lora_" in name for name in gradients)
    assert any(g.abs().max() > 0 for g in gradients.values())


def test_the_fixed_teacher_of_an_adapter_costs_no_copy(engine_and_worker):
    engine, _ = engine_and_worker
    teacher = make_teacher(TeacherConfig(kind="fixed"))
    teacher.prepare(engine)
    assert teacher._weights == {} and teacher.head == "student"
    snapshot = make_teacher(TeacherConfig(kind="snapshot"))
    snapshot.before_update(engine)
    assert snapshot._weights and all("lora_" in name for name in snapshot._weights), "adapters are all that moves"
    assert set(copy_of(engine.module)) == set(snapshot._weights)
