"""The NaN guard around verl's real engine."""

from __future__ import annotations

import math

import pytest
import torch

from mapd_verl.config import ObjectiveConfig
from mapd_verl.config.safety import NanGuardConfig
from mapd_verl.errors import UserError
from mapd_verl.loss import MapdLoss
from mapd_verl.objectives import make_objective

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(make_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def engine(worker, tmp_path):
    engine = worker.engine
    engine.nan_folder, engine._dumps = tmp_path / "nan", 0
    yield engine
    engine.nan_guard = NanGuardConfig(action="off")


def update(engine, rows, kind=MapdLoss) -> float:
    loss = kind(base_loss(), make_objective(ObjectiveConfig(weight=0.1)))
    with engine.train_mode(zero_grad_on_exit=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(make_batch(rows, 2), loss, forward_only=False)
        return engine.optimizer_step()


def broken_rows():
    rows = random_rows(0)
    rows[2].advantage = math.nan
    return rows


def test_stop_names_the_update_and_leaves_the_batch(engine):
    engine.nan_guard = NanGuardConfig(action="stop")
    with pytest.raises(UserError, match=r"loss of update .* is nan on rank 0; batch: "):
        update(engine, broken_rows())
    (file,) = engine.nan_folder.iterdir()
    kept = torch.load(file, weights_only=True)
    assert kept["facts"]["what"] == "loss" and math.isnan(kept["facts"]["value"])
    # The micro-batch with the bad row, whole: enough to run it again.
    responses = [row.tolist() for row in kept["fields"]["responses"]]
    assert broken_rows()[2].response in responses
    assert any(row.isnan().any() for row in kept["fields"]["advantages"])
    assert "nan" in kept["metrics"]["actor/pg_loss" if "actor/pg_loss" in kept["metrics"] else "pg_loss"]


def test_skip_leaves_the_weights_and_goes_on(engine, capsys):
    engine.nan_guard = NanGuardConfig(action="skip", max_dumps=1)
    before = [p.full_tensor().clone() for p in engine.module.parameters()]
    assert math.isnan(update(engine, broken_rows()))
    assert math.isnan(update(engine, broken_rows()))
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, engine.module.parameters(), strict=True))
    assert len(list(engine.nan_folder.iterdir())) == 1
    assert "max_dumps is used up" in capsys.readouterr().out
    assert math.isfinite(update(engine, random_rows(1)))


class FiniteWithANanGradient(MapdLoss):
    def __call__(self, model_output, data, dp_group=None):
        loss, metrics = super().__call__(model_output, data, dp_group)
        return loss + torch.sqrt(0.0 * model_output["log_probs"].values().sum()), metrics


def test_a_gradient_that_overflows_under_a_finite_loss_is_caught_too(engine):
    engine.nan_guard = NanGuardConfig(action="stop")
    with pytest.raises(UserError, match="gradient norm of update"):
        update(engine, random_rows(2), FiniteWithANanGradient)
    (file,) = engine.nan_folder.iterdir()
    assert len(torch.load(file, weights_only=True)["fields"]["responses"]) == 4


def test_off_and_healthy_write_nothing(engine):
    engine.nan_guard = NanGuardConfig(action="stop")
    assert math.isfinite(update(engine, random_rows(3)))
    engine.nan_guard = NanGuardConfig(action="off")
    update(engine, broken_rows())
    assert not engine.nan_folder.exists()
