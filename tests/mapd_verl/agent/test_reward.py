"""Exact match on the hard inputs, and gold answers of every form."""

from __future__ import annotations

import numpy as np
import pytest

from mapd_verl.agent.episode import Episode
from mapd_verl.agent.reward import answer_flags, coerce_targets, exact_match, f1, last_answer, score, sub_exact_match


@pytest.mark.parametrize(
    ("prediction", "gold", "compat", "strict"),
    [
        ("", "The The", 0, 0),
        ("the", "The The", 0, 0),
        ("The The", "The The", 1, 1),
        ("the the", "The The", 1, 1),
        ("..", "Beijing", 0, 0),
        ("C", "C++", 1, 0),
        ("C++", "C++", 1, 1),
        ("C#", "C", 1, 0),
        ("35", "3.5", 1, 0),
        ("3.5", "3.5", 1, 1),
        ("5", "-5", 1, 0),
        ("−5", "-5", 0, 1),
        ("1,000", "1000", 1, 1),
        ("1,000,000 people", "1000000 people", 1, 1),
        ("O’Brien", "O'Brien", 0, 1),
        ("1914–1918", "1914-1918", 0, 1),
        ("cafe\u0301", "café", 0, 1),
        ("ＮＡＳＡ", "NASA", 0, 1),
        ("北京。", "北京", 0, 1),
        ("Yes.", "yes", 1, 1),
        ("Yes, it is", "yes", 0, 0),
        ("the Euro", "Euro", 1, 1),
        ("Washington, D.C.", "washington dc", 1, 1),
        ("A", "A", 1, 1),
        ("5%", "5", 1, 1),
    ],
)
def test_exact_match(prediction, gold, compat, strict):
    assert exact_match(prediction, [gold], "compat") is bool(compat)
    assert exact_match(prediction, [gold], "strict") is bool(strict)
    assert exact_match(gold, [prediction], "strict") is bool(strict) or not prediction.strip(". ")


def test_any_target_counts():
    assert exact_match("Paris", ["London", "paris"])


def test_f1_and_sub_em():
    assert f1("Yes, it is", ["yes"]) == pytest.approx(0.5)
    assert f1("", ["yes"]) == 0.0
    assert sub_exact_match("I do not know", ["no"], "compat")
    assert not sub_exact_match("I do not know", ["no"], "strict")
    assert sub_exact_match("no, never", ["no"], "strict")
    assert not sub_exact_match("anything", ["the"], "compat")


@pytest.mark.parametrize(
    "value", ["Paris", ["Paris"], ("Paris",), np.array(["Paris"]), np.array("Paris"), np.array(["Paris"], dtype=object)]
)
def test_gold_of_every_form_is_the_same(value):
    assert coerce_targets(value, "row 1") == ["Paris"]


@pytest.mark.parametrize("value", [1969, [1969], np.int64(1969), np.array([1969]), 1969.0])
def test_numbers_become_text(value):
    assert coerce_targets(value, "row 1") == ["1969"]


@pytest.mark.parametrize(
    "value", [None, [None], [], np.array([]), "", "!!!", ["ok", ""], float("nan"), True, {"a": 1}, [["nested"]]]
)
def test_bad_gold_names_its_row(value):
    with pytest.raises(ValueError, match=r"file\.parquet: row 7"):
        coerce_targets(value, "file.parquet: row 7")


def test_excluded_episodes_have_no_score():
    with pytest.raises(ValueError, match="retrieval_failed"):
        score(Episode(prompt_ids=[1], status="retrieval_failed"), ["x"])


def test_score_needs_an_answer():
    assert score(Episode(prompt_ids=[1], status="no_answer"), ["None"]) == 0.0
    assert score(Episode(prompt_ids=[1], status="answered", answer="france"), ["France"]) == 1.0


def test_text_helpers():
    assert last_answer("<answer>a</answer> <answer> b </answer>") == "b"
    assert last_answer("<answer>Paris") is None
    assert answer_flags("<answer>a</answer><answer>b</answer>") == ("several_answers",)
    assert answer_flags("<answer>Paris") == ("truncated_answer",)
    assert "tag_spam" in answer_flags("<answer>a</answer>" * 11)
