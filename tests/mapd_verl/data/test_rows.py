"""Rows are taken in every form that Search-R1 files have, and refused with file, row and field."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mapd_verl.data.rows import read_questions, read_row
from mapd_verl.errors import UserError
from protocol_cache import question_id


def row(**changes):
    base = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer the question: who wrote it?"}],
        "question": "who wrote it?",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann"]}},
        "extra_info": {"split": "train", "index": 3},
    }
    return {**base, **changes}


def test_search_r1_row():
    got = read_row(row(), "f: row 1")
    assert got.question_id == question_id("who wrote it?", "nq", "train")
    assert (got.kind, got.targets, got.messages[0]["role"]) == ("nq", ("Ann",), "user")


def test_own_id_and_kind_win():
    got = read_row(row(question_id="q", extra_info={"split": "train", "kind": "multi_hop"}), "f")
    assert (got.question_id, got.kind) == ("q", "multi_hop")


def test_arrays_as_pandas_and_datasets_give_them():
    got = read_row(
        row(
            prompt=np.array([{"role": "user", "content": "q?"}], dtype=object),
            reward_model={"ground_truth": {"target": np.array(["a", "b"], dtype=object)}},
        ),
        "f",
    )
    assert got.targets == ("a", "b")


def test_question_without_question_mark_and_fullwidth_one_are_kept_as_they_are():
    assert read_row(row(question="谁写的？"), "f").question == "谁写的？"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "who?"}, "prompt"),
        ({"prompt": [{"role": "user", "content": " "}]}, "content"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "role user"),
        ({"prompt": [{"content": "x"}]}, "role"),
        ({"question": " "}, "question"),
        ({"question": None}, "question"),
        ({"data_source": None}, "data_source"),
        ({"reward_model": None}, "reward_model"),
        ({"reward_model": {"ground_truth": None}}, "target"),
        ({"reward_model": {"ground_truth": {"target": []}}}, "no gold answer"),
        ({"reward_model": {"ground_truth": {"target": [None]}}}, "None"),
        ({"reward_model": {"ground_truth": {"target": ["!!!"]}}}, "no letter or digit"),
        ({"extra_info": {}}, "question_id"),
        ({"question_id": 7}, "question_id"),
    ],
)
def test_bad_rows_are_named(changes, field):
    with pytest.raises(UserError, match=field) as caught:
        read_row(row(**changes), "train.parquet: row 12")
    assert str(caught.value).startswith("train.parquet: row 12: ") and "\n" not in str(caught.value)


def test_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + json.dumps(row(question="")) + "\n")
    assert len(read_questions(path, limit=1)) == 1
    with pytest.raises(UserError, match="row 2: question"):
        read_questions(path)
    path.write_text(json.dumps(row()) + "\n{oops\n")
    with pytest.raises(UserError, match="line 2: not JSON"):
        read_questions(path)
    path.write_text("[1]\n")
    with pytest.raises(UserError, match="line 1: want a JSON object"):
        read_questions(path)
    path.write_text("")
    with pytest.raises(UserError, match="no rows"):
        read_questions(path)
    with pytest.raises(UserError, match="no such file"):
        read_questions(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="not a readable parquet"):
        read_questions(tmp_path / "c.parquet")
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(UserError, match=r"\.parquet or \.jsonl"):
        read_questions(tmp_path / "d.csv")
