"""Teachers and entry points in whole runs on verl's trainer: what each reports is what its formula says."""

from __future__ import annotations

import pytest

from .test_e2e import files, run

__all__ = ["files"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def total(step, weight):
    """The logged loss: the policy's, the KL to the reference, and the weighted term."""
    return step["actor/pg_loss"] + 0.001 * step["actor/kl_loss"] + weight * step["distillation/loss"]


def test_a_snapshot_under_a_moving_lambda_with_two_mini_batches(files, tmp_path):
    steps = run(
        files,
        tmp_path / "snapshot",
        "mapd.objective.weight=0.1",
        "mapd.teacher.kind=snapshot",
        "mapd.schedule.kind=linear",
        "mapd.schedule.steps=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        steps=3,
    )
    assert [step["distillation/weight"] for step in steps] == pytest.approx([0.075, 0.05, 0.025])
    for step in steps:
        assert step["actor/loss"] == pytest.approx(total(step, step["distillation/weight"]), rel=1e-4, abs=1e-6)
        assert step["distillation/kl"] > 0 and step["distillation/entropy/teacher"] > 0


def test_an_average_is_kept_through_a_resume(files, tmp_path):
    keys = ("mapd.teacher.kind=ema", "mapd.teacher.ema_decay=0.5", "mapd.objective.token_clip=0.5")
    save = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]")
    (first,) = run(files, tmp_path / "ema", *keys, *save, steps=1)
    assert (tmp_path / "ema/global_step_1/actor/teacher_rank_0_of_1.pt").is_file()
    _, second = run(files, tmp_path / "ema", *keys, *save, "trainer.resume_mode=auto", steps=2)
    assert (first["training/global_step"], second["training/global_step"]) == (1, 2)
    assert 0 < second["distillation/kl"] <= 0.5


@pytest.mark.parametrize(
    "name, keys",
    [
        (
            "bounded_advantage",
            ("mapd.objective.weight=0.2", "mapd.objective.sharpness=5", "mapd.filter.actions=[answer]"),
        ),
        ("scaled_advantage", ("mapd.objective.weight=0.5", "mapd.objective.ratio_clip=0.2")),
    ],
)
def test_the_advantage_changes_and_never_its_sign(files, tmp_path, name, keys):
    steps = run(files, tmp_path / name, f"mapd.objective.name={name}", *keys)
    for step in steps:
        assert step["distillation/log_ratio/std"] > 0
        assert step["distillation/advantage_change"] > 0
        assert step["distillation/advantage_sign_changes"] == 0
        assert "distillation/loss" not in step
    whole = 1.0 if name == "scaled_advantage" else 0.9
    assert 0 < steps[0]["distillation/token_share"] <= whole


def test_a_gated_loss_of_the_policy_before_training(files, tmp_path):
    steps = run(
        files,
        tmp_path / "gated",
        "mapd.objective.name=sigmoid_gated",
        "mapd.objective.sharpness=5",
        "mapd.objective.weight=0.01",
        "mapd.teacher.kind=fixed",
    )
    for step in steps:
        assert step["distillation/loss"] != 0
        assert step["actor/loss"] == pytest.approx(total(step, 0.01), rel=1e-4, abs=1e-6)


def test_another_model_rewards_wrong_trajectories(files, tmp_path):
    """Here the other model is the student before training: at the first step nothing changes, later something does."""
    folder, _ = files
    steps = run(
        files,
        tmp_path / "reward",
        "mapd.objective.name=teacher_reward",
        "mapd.objective.weight=0.1",
        "mapd.teacher.kind=external",
        f"mapd.teacher.path={folder}/student",
        "mapd.privilege.context=empty",
        "mapd.privilege.fallback=none",
    )
    assert steps[0]["distillation/log_ratio/mean"] == pytest.approx(0.0, abs=1e-6)
    assert steps[0]["distillation/reward_change"] == pytest.approx(0.0, abs=1e-6)
    assert abs(steps[1]["distillation/log_ratio/mean"]) > 1e-4
    assert abs(steps[1]["distillation/reward_change"]) > 1e-6
    # The score that verl charts stays the plain one.
    assert all(step["critic/score/max"] <= 1.0 and step["critic/score/min"] >= 0.0 for step in steps)
