"""Whole training runs on verl's own trainer: real agent loop, real retrieval service, real protocols."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mapd_verl import processes
from mapd_verl.data.join import STATES
from mapd_verl.launch import prepare
from protocol_cache import ProtocolStore, question_id
from protocol_cache.reviews import Review, protocol_digest, put_reviews
from retrieval_server.launch import start_sidecar

from . import world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
RECIPE = Path(__file__).parents[3] / "recipes/laptop/mapd.yaml"


@contextmanager
def alone():
    """One heavy run at a time on this machine."""
    with (Path(tempfile.gettempdir()) / "mapd-e2e.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world.write_files(folder)
    world.write_student(folder / "student")
    with start_sidecar(folder / "corpus.jsonl") as sidecar:
        yield folder, sidecar.url


def run(files, out: Path, *overrides: str, steps: int = 2, unchecked: tuple[str, ...] = ()) -> list[dict]:
    """Train and return the logged metrics of each step; ``unchecked`` overrides pass by the recipe's checks."""
    folder, url = files
    common = [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={folder}/student",
        f"mapd.protocols.path={folder}/protocols.sqlite",
        f"mapd.agent.retriever_urls=[{url}]",
        "mapd.agent.max_searches=2",
        "mapd.agent.max_turn_tokens=24",
        "data.train_batch_size=4",
        "data.max_response_length=160",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={out}",
    ]
    out.mkdir(parents=True, exist_ok=True)
    with alone():
        _, command, env = prepare(RECIPE, [*common, *overrides])
        processes.run([*command, *unchecked], out / "train.log", env, what="training")
    lines = [json.loads(line) for path in sorted((out / "metrics").glob("*.jsonl")) for line in path.open()]
    return [line["data"] for line in lines if "training/global_step" in line["data"]]


OPTIM = "actor_rollout_ref.actor.optim"
#: Adam with a large epsilon: a gradient that is all rounding (rollouts are summed as they finish) stays one, and two
#: equal runs stay equal beyond their first step.
SMOOTH = (f"{OPTIM}.lr=1e-2", f"++{OPTIM}.override_optimizer_config={{eps:0.01}}")


def assert_same(one: list[dict], other: list[dict], keys: tuple[str, ...], first: float = 1e-5) -> None:
    """The first step's metrics agree to ``first``, relative; later ones more loosely.

    Rollouts finish, and are summed, in another order each time. The first step shows that as rounding; Adam divides
    each gradient by its own size, so that one which is all rounding moves a weight by a whole step: see ``SMOOTH``.
    """
    for key in keys:
        for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-2 if step else first, abs=1e-6), (key, step + 1)


def test_mapd_learns_from_protocols_and_own_rollouts(files, tmp_path):
    # Mini-batches of 3 x 4 rollouts: verl fills the step's 16 up to 24 with padding rows, as it does when
    # rollouts are left out. A recipe may not ask for this, so it goes past the recipe's checks.
    steps = run(
        files,
        tmp_path / "mapd",
        "mapd.objective.weight=0.05",
        unchecked=("actor_rollout_ref.actor.ppo_mini_batch_size=3",),
    )
    assert len(steps) == 2
    for step in steps:
        assert step["agent/rollouts"] == 16
        # Half of the questions have a protocol; the others fall back to a sibling, or to nothing.
        assert step["mapd/source/protocol"] == pytest.approx(0.5)
        assert step["mapd/source/own_rollout"] + step["mapd/source/none"] == pytest.approx(0.5)
        assert step["mapd/protocols/joined"] == 2 and step["mapd/protocols/missing"] == 2
        assert step["mapd/protocols/cache_joined"] == 2 and step["mapd/protocols/skipped"] == 0
        assert step["distillation/kl"] > 0
        assert step["timing_s/teacher_forward"] > 0
        assert step["distillation/kl/task_single_hop"] > 0
        assert 0 < step["distillation/token_share"] <= 1
        assert step["agent/searches"] > 0
        assert math.isfinite(step["actor/loss"])
        # The logged loss is the actor's own plus lambda times the term (plus the KL to the reference).
        expected = step["actor/pg_loss"] + 0.001 * step["actor/kl_loss"] + 0.05 * step["distillation/loss"]
        assert step["actor/loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    rollouts = [json.loads(line) for line in (tmp_path / "mapd/rollouts/1.jsonl").open()]
    assert {row["privilege_source"] for row in rollouts} >= {"protocol"}
    assert all("Plan: " in row["teacher_prompt"] for row in rollouts if row["privilege_source"] == "protocol")
    validated = [json.loads(line) for line in (tmp_path / "mapd/validation/2.jsonl").open()]
    assert len(validated) == len(world.QUESTIONS)
    for row in validated:
        assert {"question_id", "kind", "prediction", "targets", "score", "searches", "output", "step"} <= set(row)


def test_weight_zero_is_verls_stock_trainer(files, tmp_path):
    """Same seed, same rollouts: the same losses and gradient norms, as far as two stock runs agree.

    That the engine is bitwise verl's is shown in ``test_engine.py``.
    """
    ours = run(files, tmp_path / "ours", "mapd.objective.weight=0", "mapd.forward=stock", *SMOOTH)
    stock = run(files, tmp_path / "stock", "trainer.v1.trainer_mode=sync", *SMOOTH)
    lean = run(files, tmp_path / "lean", "mapd.objective.weight=0", "mapd.forward=lean", *SMOOTH)
    assert any(abs(step["actor/pg_loss"]) > 0 for step in stock)
    keys = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean")
    assert_same(ours, stock, keys)
    assert_same(lean, stock, keys)
    assert not any(key.startswith("distillation/") for step in ours for key in step)


def test_the_rollouts_own_log_probs_can_stand_in_for_the_old_ones(files, tmp_path):
    """``bypass_mode`` saves a forward a step; here rollout and actor are one fp32 model, so the losses are the same."""
    keys = ("mapd.objective.weight=0.05", *SMOOTH)
    plain = run(files, tmp_path / "plain", *keys)
    bypass = run(files, tmp_path / "bypass", *keys, "algorithm.rollout_correction.bypass_mode=true")
    assert_same(bypass, plain, ("actor/loss", "actor/pg_loss", "actor/grad_norm", "distillation/kl"), first=1e-4)
    assert all(abs(step["actor/ppo_kl"]) < 1e-5 for step in bypass)


@pytest.mark.parametrize("context", ["empty", "shuffled", "answer_only"])
def test_the_controls(files, tmp_path, context):
    (step,) = run(files, tmp_path / context, f"mapd.privilege.context={context}", steps=1)
    assert step[f"mapd/source/{context}"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / context / "rollouts/1.jsonl").open()]
    if context == "empty":
        assert step["distillation/kl"] == 0.0
        assert step["distillation/loss"] == 0.0
        return
    assert step["distillation/kl"] > 0
    answers = dict(zip(world.QUESTIONS, world.targets(), strict=True))
    for row in rows:
        own = answers[row["question"]]
        if context == "answer_only":
            assert f"Answer: {own}" in row["teacher_prompt"] and "Plan: " not in row["teacher_prompt"]
        else:
            # The first two questions have protocols: each reads the other's, the rest either.
            first, second = world.QUESTIONS[:2]
            foreign = {first: {second}, second: {first}}.get(row["question"], {first, second})
            assert any(f"the answer is {answers[question]}." in row["teacher_prompt"] for question in foreign)


def test_the_joins_policies_reach_the_step(files, tmp_path):
    """A question without a protocol is left out, one marked as bad falls back: each step's metrics say so."""
    folder, _ = files
    cache = tmp_path / "protocols.sqlite"
    shutil.copy(folder / "protocols.sqlite", cache)
    with ProtocolStore(cache) as store:
        first, second = list(store)
        assert first.protocol is not None
        third = question_id(world.QUESTIONS[2], world.SOURCE, "train")
        reason = "leak: plan step 1 names the answer"
        store.put(replace(first, question_id=third, status="rejected", protocol=None, reason=reason))
    put_reviews(cache, [Review(second.question_id, protocol_digest(second.protocol), "bad", "vague")])
    overrides = ("mapd.protocols.missing=skip", "data.train_batch_size=3", "mapd.protocols.reviewed_bad=fallback")
    small = ("actor_rollout_ref.actor.ppo_mini_batch_size=3",)
    steps = run(files, tmp_path / "out", f"mapd.protocols.path={cache}", *overrides, *small)
    assert len(steps) == 2
    for step in steps:
        found = {key.removeprefix("mapd/protocols/"): value for key, value in step.items() if "mapd/protocols" in key}
        expected = dict.fromkeys(STATES, 0) | {"joined": 1, "rejected": 1, "reviewed_bad": 1}
        of_cache = {f"cache_{state}": count for state, count in (expected | {"missing": 1}).items()}
        assert found == expected | of_cache | {"skipped": 1}
        assert step["mapd/source/protocol"] == pytest.approx(1 / 3)
