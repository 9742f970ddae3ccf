"""Facts in their passages."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st
from viewer_samples import CONTENTS, FACT_1, FACT_2, log, protocol

from protocol_cache.viewer.detail import grounded, segments, steps


@given(
    st.text(max_size=40),
    st.dictionaries(st.integers(1, 9), st.tuples(st.integers(-3, 50), st.integers(-3, 50)), max_size=5),
)
def test_segments_lose_and_add_nothing_and_mark_what_is_covered(text: str, spans: dict) -> None:
    cut = segments(text, spans)
    assert "".join(s.text for s in cut) == text and all(s.text for s in cut)
    place = 0
    for piece in cut:
        for character in range(place, place + len(piece.text)):
            assert piece.facts == tuple(n for n, (a, b) in sorted(spans.items()) if a <= character < b)
        place += len(piece.text)


def test_overlapping_facts_are_marked_where_they_overlap() -> None:
    facts, passages = grounded(protocol(), log())
    (city, other) = passages
    assert city.id == "city-1" and city.facts == (1, 2) and other.facts == ()
    assert "".join(s.text for s in city.segments if 1 in s.facts) == FACT_1
    assert "".join(s.text for s in city.segments if 2 in s.facts) == FACT_2
    assert "".join(s.text for s in city.segments if s.facts == (1, 2)) == "lies in Y."
    assert [f.passage for f in facts] == [1, 1, None]
    assert [f.problem for f in facts] == [None, None, "this passage was not retrieved"]


def test_a_span_that_misses_its_text_is_said_so() -> None:
    made = protocol()
    made["grounding_facts"][0] |= {"start": 0, "end": 5}
    facts, _ = grounded(made, log())
    assert facts[0].problem == "the passage reads otherwise at 0:5"
    assert all(f.problem is None and f.passage is None for f in grounded(made, None)[0]), "nothing to compare with"
    assert grounded(None, log())[0] == []


def test_events_of_other_versions_are_shown_as_they_are() -> None:
    _, passages = grounded(protocol(), log())
    shown = steps(log(), passages)
    kinds = ["decompose", "search", "finding", "synthesize", "check", "repair", "other", "other"]
    assert [s["kind"] for s in shown] == kinds
    assert shown[1]["passages"] == [("city-1", 1), ("other", 2), ("not kept", None)]
    assert steps(None, []) == [] and steps({"events": ["text"]}, [])[0]["kind"] == "other"
    assert set(CONTENTS) <= set(string.printable)
