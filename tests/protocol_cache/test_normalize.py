from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_cache.normalize import exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("  An  apple\ta day ", "apple day"),
        ("U.S.A.", "usa"),
        ("1,000", "1000"),
        ("theatre", "theatre"),
        ("Zürich", "zürich"),
        ("O’Brien", "o’brien"),
        ("a-b", "ab"),
        ("", ""),
        ("The!", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "same"),
    [
        ("the Paris.", ["Paris"], True),
        ("Paris", ["London", "PARIS"], True),
        ("Yes, it is", ["yes"], False),
        ("", ["The The"], False),
        ("the the", ["The The"], True),
        ("..", ["!!!"], False),
        ("..", [""], False),
        ("", [""], False),
        ("!!!", ["!!!"], True),
        ("35", ["3.5"], True),  # as in Search-R1
        ("Paris", [], False),
    ],
)
def test_exact_match(prediction: str, golds: list[str], same: bool) -> None:
    assert exact_match(prediction, golds) is same


@given(st.text())
def test_normal_form_is_final(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once or "\u0130" in text  # lower() of that letter is not final


@given(st.text(min_size=1), st.text(alphabet="ab", min_size=1))
def test_every_answer_matches_itself_and_no_blank_matches_anything(text: str, other: str) -> None:
    if text.strip():
        assert exact_match(text, [other, text])
    assert not exact_match(" ", [text])
