from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_cache import question_id


def test_is_the_one_that_shipped_caches_were_made_with() -> None:
    assert question_id("Who wrote Faust?", "nq", "train") == "0d394d9e9fee5ae6fdae2d77e5ad13f9"


@pytest.mark.parametrize(
    "same",
    ["Who wrote Faust", " Who  wrote\tFaust ?", "Who wrote Faust??", "Who wrote Faust？"],
)
def test_spacing_and_question_marks_dont_matter(same: str) -> None:
    assert question_id(same, "nq", "train") == question_id("Who wrote Faust?", "nq", "train")


def test_composed_and_decomposed_letters_are_the_same() -> None:
    assert question_id("Where is Zu\u0308rich?", "nq", "train") == question_id("Where is Z\u00fcrich?", "nq", "train")


@pytest.mark.parametrize(
    "other",
    [
        ("who wrote Faust?", "nq", "train"),
        ("Who wrote Faust?", "hotpotqa", "train"),
        ("Who wrote Faust?", "nq", "test"),
    ],
)
def test_case_source_and_split_matter(other: tuple[str, str, str]) -> None:
    assert question_id(*other) != question_id("Who wrote Faust?", "nq", "train")


def test_fields_cannot_run_into_each_other() -> None:
    assert question_id("a", "b", "cd") != question_id("a", "bc", "d")
    assert question_id('a","b', "c", "d") != question_id("a", 'b","c', "d")


def test_no_two_of_200_000_questions_collide() -> None:
    assert len({question_id(f"Question number {i}?", "nq", "train") for i in range(200_000)}) == 200_000


@pytest.mark.parametrize("blank", ["", "  \n", "?", " ？? "])
def test_a_blank_question_is_refused(blank: str) -> None:
    with pytest.raises(ValueError, match="blank"):
        question_id(blank, "nq", "train")


@pytest.mark.parametrize(("source", "split"), [("", "train"), ("nq", "")])
def test_source_and_split_are_needed(source: str, split: str) -> None:
    with pytest.raises(ValueError, match="source and a split"):
        question_id("q", source, split)


@given(st.text(min_size=1).filter(lambda s: s.strip(" ?？\t\n\r") != "" and len(s.split()) > 0))
def test_normalising_twice_changes_nothing(text: str) -> None:
    from protocol_cache.question_id import normalize_question

    once = normalize_question(text)
    assert normalize_question(once) == once


@pytest.mark.e2e
def test_no_two_of_a_million_questions_collide() -> None:
    """Short and long, ASCII and not, over two sources and two splits; and every bit of the id is in play."""
    forms = ("Who was born in {}?", "where is ort {} größer", "{}", "Which of {0} and {0}1 is older?")
    ids = {
        question_id(form.format(i), source, split)
        for i in range(62_500)
        for form in forms
        for source in ("nq", "hotpotqa")
        for split in ("train", "test")
    }
    assert len(ids) == 1_000_000
    # A 64-bit half alone would collide here with a chance of 3e-8, 32 bits with certainty.
    assert len({qid[:16] for qid in ids}) == len({qid[16:] for qid in ids}) == 1_000_000
    ones = [0] * 128
    for number in (int(qid, 16) for qid, _ in zip(ids, range(20_000), strict=False)):
        for bit in range(128):
            ones[bit] += number >> bit & 1
    assert all(9_500 < count < 10_500 for count in ones), "7 standard deviations around a half"
