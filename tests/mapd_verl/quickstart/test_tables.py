"""Before and after, from records on disk."""

import json

import pytest

from mapd_verl.evaluation.records import Record, write_records
from mapd_verl.quickstart import tables
from mapd_verl.quickstart.stages import Arm


def record(i, em, kind):
    return Record(
        question_id=f"q{i}", kind=kind, question="?", targets=("x",), prediction=None, em=em, f1=em, status="answered",
        searches=1, response_tokens=10, policy_tokens=5, turns=1, valid_turns=1,
    )  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Four questions, two of each kind; one is excluded before, so pairs are three."""

    def write(name, values):
        kinds = ["single_hop", "single_hop", "multi_hop", "multi_hop"]
        path = tmp_path / f"{name}.jsonl"
        write_records(path, [record(i, em, kind) for i, (em, kind) in enumerate(zip(values, kinds, strict=True))])
        return path

    before = write("before", [1.0, 0.0, 0.0, None])
    after = {
        Arm("mapd", "laptop/mapd", 0): write("m0", [1.0, 1.0, 1.0, 1.0]),
        Arm("mapd", "laptop/mapd", 1): write("m1", [1.0, 1.0, 0.0, 0.0]),
        Arm("grpo", "laptop/grpo", 0): write("g0", [0.0, 0.0, 0.0, 0.0]),
    }
    return before, after


def test_outcome(files):
    data = tables.outcome(*files)
    assert data["before"]["all"]["em"]["mean"] == pytest.approx(1 / 3)
    assert data["before"]["multi_hop"]["em"]["n"] == 1
    mapd0, _, grpo = data["runs"]
    assert (mapd0["arm"], mapd0["seed"], grpo["arm"]) == ("mapd", 0, "grpo")
    assert mapd0["gain"]["n"] == 3 and mapd0["gain"]["mean"] == pytest.approx(2 / 3)
    assert grpo["gain"]["mean"] == pytest.approx(-1 / 3)
    assert data["arms"]["mapd"]["all"]["mean"] == pytest.approx((1.0 + 0.5) / 2)
    assert data["arms"]["mapd"]["all"]["n"] == 2
    json.dumps(data)


def test_text_and_markdown_hold_the_same_figures(files):
    data = tables.outcome(*files)
    text, markdown = tables.text(data), tables.markdown(data)
    for shown in (text, markdown):
        assert "33.3 [" in shown and "75.0" in shown
    rows = markdown.strip().splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["all", "multi_hop", "single_hop"]


def test_one_seed_has_no_interval_over_seeds(files):
    before, after = files
    grpo = {arm: path for arm, path in after.items() if arm.name == "grpo"}
    assert "| 0.0 |" in tables.markdown(tables.outcome(before, grpo))
