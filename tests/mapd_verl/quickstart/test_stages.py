"""Resuming, folders and metrics of a run."""

import json

import pytest

from mapd_verl.config.recipe import load_recipe
from mapd_verl.errors import UserError
from mapd_verl.quickstart.options import Options, parse
from mapd_verl.quickstart.run import _folder
from mapd_verl.quickstart.stages import Arm, Progress, Stages, checkpoint, metrics, service
from mapd_verl.quickstart.state import RunState
from retrieval_server.launch import start_sidecar


def test_options():
    assert parse([]).arms == ("mapd",) and parse([]).seeds == (0,) and not parse([]).compare
    compare = parse(["--compare"])
    assert (compare.arms, compare.seeds, compare.compare) == (("mapd", "grpo"), (0, 1, 2), True)
    assert parse(["--compare", "--seeds", "7"]).seeds == (7,)
    assert parse(["--set", "a=1", "b=2"]).overrides == ("a=1", "b=2")


def stages(tmp_path, **options):
    given = Options(run=tmp_path, **options)
    return Stages(given, RunState(tmp_path))


@pytest.mark.parametrize("name", ["mapd", "grpo"])
def test_the_overrides_of_an_arm_are_known_keys(tmp_path, name):
    mine = stages(tmp_path, steps=3, overrides=("data.val_max_samples=5",))
    arm = Arm(name, f"laptop/{name}", 7)
    config = load_recipe(arm.recipe, mine.overrides(arm, "http://127.0.0.1:1"))
    assert config.trainer.total_training_steps == 3
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (7, 7)
    assert config.mapd.agent.retriever_urls == ["http://127.0.0.1:1"]
    assert (config.mapd.protocols.path is None) == (name == "grpo")


def test_an_attempt_with_other_inputs_is_removed_and_the_same_is_kept(tmp_path):
    folder = tmp_path / "arm"
    Stages._drop_other_attempt(folder, "a")
    (folder / "global_step_20").mkdir()
    Stages._drop_other_attempt(folder, "a")
    assert (folder / "global_step_20").exists()
    Stages._drop_other_attempt(folder, "b")
    assert not (folder / "global_step_20").exists()


def test_the_newest_checkpoint_counts_by_step_not_by_name(tmp_path):
    for step in (9, 10):
        hf = tmp_path / f"global_step_{step}" / "actor" / "huggingface"
        hf.mkdir(parents=True)
        (hf / "model.safetensors").touch()
    assert checkpoint(tmp_path).parts[-3] == "global_step_10"
    with pytest.raises(UserError, match="without a checkpoint"):
        checkpoint(tmp_path / "global_step_9")


def test_metrics_join_attempts_and_skip_a_torn_line(tmp_path, capsys):
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "000.jsonl").write_text('{"step": 1, "data": {"a": 1, "b": 1}}\n{"step": 2, "da')
    (folder / "001.jsonl").write_text('{"step": 1, "data": {"a": 2}}\n{"step": 5, "data": {"agent/acc": 0.5}}\n')
    assert metrics(tmp_path) == {1: {"a": 2, "b": 1}, 5: {"agent/acc": 0.5}}
    progress = Progress(tmp_path, 10)
    progress()
    assert capsys.readouterr().out == ""
    with (folder / "001.jsonl").open("a") as file:
        for step in (6, 10):
            file.write(json.dumps({"step": step, "data": {"agent/acc": 0.25}}) + "\n")
    progress()
    assert capsys.readouterr().out == "  step 10/10: EM 0.25\n"


def test_a_folder_has_one_run_at_a_time(tmp_path):
    options = Options(run=tmp_path / "run")
    with _folder(options), pytest.raises(UserError, match="another quickstart"), _folder(options):
        pass
    with _folder(options):  # released
        pass


def test_fresh_removes_a_runs_folder_and_nothing_else(tmp_path):
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    with _folder(Options(run=mine)):
        (mine / "data").mkdir()
        (mine / "state.json").write_text('{"stages": {}}')
    with _folder(Options(run=mine, fresh=True)):
        assert [path.name for path in mine.iterdir()] == [".lock"]
    yours.mkdir()
    (yours / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a folder that this command made"), _folder(Options(run=yours, fresh=True)):
        pass
    assert (yours / "thesis.tex").exists()


def test_a_full_disk_is_said_before_the_run(tmp_path, monkeypatch):
    import mapd_verl.quickstart.run as run

    monkeypatch.setattr(run, "_DISK_NEEDED", 10**18)
    with pytest.raises(UserError, match="GB free on this disk"), _folder(Options(run=tmp_path / "run")):
        pass


def test_a_service_that_does_not_start_is_one_line(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("not json\n")
    with (
        pytest.raises(UserError, match=r"corpus\.jsonl:1: not valid JSON"),
        service(start_sidecar, corpus, log=tmp_path / "logs" / "r.log"),
    ):
        pass
