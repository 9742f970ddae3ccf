"""Stop, best checkpoint and resume, on verl's own trainer."""

from __future__ import annotations

import json

import pytest

from mapd_verl.errors import UserError

from .test_e2e import OPTIM, SMOOTH, assert_same, files, run

__all__ = ["files"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

SAVE = ("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]")


def test_a_run_that_breaks_a_rule_stops_and_leaves_its_best_checkpoint(files, tmp_path):
    out = tmp_path / "stopped"
    rules = (
        "mapd.watch.action=stop",
        "mapd.watch.keep_best=true",
        "mapd.watch.min_searches=5",
        "mapd.watch.patience=2",
    )
    with pytest.raises(UserError, match=r"stopped at step 2: agent/searches .* is below 5 for 2 steps") as error:
        run(files, out, *rules, "trainer.test_freq=1", *SAVE, steps=6)
    best = json.loads((out / "best/best.json").read_text())
    kept = out / "best" / f"global_step_{best['step']}"
    assert best["step"] in (1, 2) and str(kept) in str(error.value)
    assert (kept / "actor").is_dir() and (kept / "data.pt").is_file()
    # The rotation of verl's own checkpoints left it alone, and a run goes on from it.
    again = run(
        files,
        tmp_path / "again",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={kept}",
        steps=best["step"] + 1,
    )
    assert [step["training/global_step"] for step in again] == [best["step"] + 1]


def test_two_and_two_steps_are_four(files, tmp_path):
    """A run killed after its checkpoint goes on with the same questions, losses and learning rate."""
    schedule = (f"{OPTIM}.total_training_steps=4", "data.shuffle=true", "data.train_batch_size=2")
    batch = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", *SAVE, *schedule, *SMOOTH)
    whole = run(files, tmp_path / "whole", *batch, steps=4)
    first = run(files, tmp_path / "parts", *batch, steps=2)
    rest = run(files, tmp_path / "parts", *batch, "trainer.resume_mode=auto", steps=4)[len(first) :]
    assert [step["training/global_step"] for step in rest] == [3, 4]
    keys = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "distillation/kl", "critic/score/mean", "actor/lr")
    assert_same([*first, *rest], whole, keys)
    questions = {
        name: [
            sorted({json.loads(line)["question"] for line in (tmp_path / name / f"rollouts/{step}.jsonl").open()})
            for step in (1, 2, 3, 4)
        ]
        for name in ("whole", "parts")
    }
    assert questions["parts"] == questions["whole"]


MODES = {
    "mapd_colocate_async": ("trainer.v1.colocate_async.num_warmup_batches=1",),
    # Two pretended accelerators: one trains, the other answers. Two updates between two hand-overs of the weights, so
    # that verl takes and restores its snapshot of the rollouts' policy.
    "mapd_separate_async": (
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=mapd_cpu",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.val_before_train=true",
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_asynchronous_modes_train_too(files, tmp_path, mode):
    steps = run(files, tmp_path / mode, f"trainer.v1.trainer_mode={mode}", *MODES[mode], steps=3)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["agent/rollouts"] > 0
        assert step["distillation/kl"] > 0
        expected = step["actor/pg_loss"] + 0.001 * step["actor/kl_loss"] + 0.05 * step["distillation/loss"]
        assert step["actor/loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
