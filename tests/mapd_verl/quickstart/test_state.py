"""A finished stage is not done twice; a changed input or a lost output is."""

import json

import pytest

from mapd_verl.errors import UserError
from mapd_verl.quickstart.state import RunState, fingerprint


class Work:
    """A stage that writes its output and counts its calls."""

    def __init__(self, output, fails=False):
        self.calls, self.output, self.fails = 0, output, fails

    def __call__(self):
        self.calls += 1
        if self.fails:
            raise UserError("it failed")
        self.output.write_text("x")
        return {"n": self.calls}


def test_done_stages_are_kept_over_processes(tmp_path):
    work = Work(tmp_path / "out")
    first = RunState(tmp_path).stage("s", "in1", (work.output,), work)
    again = RunState(tmp_path).stage("s", "in1", (work.output,), work)
    assert work.calls == 1
    assert not first["resumed"] and again["resumed"] and again["result"] == {"n": 1}


def test_other_inputs_and_lost_outputs_are_done_again(tmp_path):
    work = Work(tmp_path / "out")
    state = RunState(tmp_path)
    state.stage("s", "in1", (work.output,), work)
    state.stage("s", "in2", (work.output,), work)
    assert work.calls == 2
    work.output.unlink()
    state.stage("s", "in2", (work.output,), work)
    assert work.calls == 3


def test_a_failed_stage_is_not_done(tmp_path):
    work = Work(tmp_path / "out", fails=True)
    with pytest.raises(UserError):
        RunState(tmp_path).stage("s", "in1", (work.output,), work)
    work.fails = False
    assert not RunState(tmp_path).stage("s", "in1", (work.output,), work)["resumed"]


def test_a_stage_that_leaves_no_output_is_an_error(tmp_path):
    with pytest.raises(UserError, match="stage 's' ended without writing"):
        RunState(tmp_path).stage("s", "in", (tmp_path / "never",), lambda: None)
    assert not RunState(tmp_path).stages


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stages": ', "null"])
def test_a_torn_state_file_says_how_to_go_on(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match="--fresh"):
        RunState(tmp_path)


def test_state_file_is_whole_or_absent(tmp_path):
    RunState(tmp_path).stage("s", "in", (), lambda: None)
    assert json.loads((tmp_path / "state.json").read_text())["stages"]["s"]["inputs"] == "in"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_fingerprint_sees_content_names_and_values(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "__pycache__").mkdir()
    before = fingerprint(tmp_path, {"x": 1, "y": 2})
    assert before == fingerprint(tmp_path, {"y": 2, "x": 1})
    (tmp_path / "__pycache__" / "z.pyc").write_text("noise")
    assert before == fingerprint(tmp_path, {"x": 1, "y": 2})
    assert before != fingerprint(tmp_path, {"x": 1, "y": 3})
    (tmp_path / "a").write_text("2")
    assert before != fingerprint(tmp_path, {"x": 1, "y": 2})
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "gone")
