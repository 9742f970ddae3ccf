"""How often the gate lets in what is unfit and refuses what is fit, and that docs/protocols.md says so."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gate_cases import F1, PASSAGES, PLAN, QUESTION, Case, cases
from hypothesis import given
from hypothesis import strategies as st

from protocol_cache.gate import cut_fact, judge
from protocol_cache.grounding import NORMALIZATIONS, find_span
from protocol_cache.synthesis.state import Gold

DOCS = Path(__file__).parents[2] / "docs/protocols.md"


def passes(case: Case) -> bool:
    return judge(case.draft(), "succeeded", case.question, case.passages, Gold(case.gold)).passed


def test_every_labelled_draft_is_judged_as_is_known() -> None:
    wrong = [(c.kind, c.changes, c.fit) for c in cases() if (passes(c) == c.fit) == c.missed]
    assert not wrong


def test_the_rates_are_those_of_the_docs() -> None:
    told = re.search(
        r"(\d+) labelled drafts: (\d+) of (\d+) unfit ones got in \(([\d.]+)%\), "
        r"(\d+) of (\d+) fit ones were refused \(([\d.]+)%\)",
        " ".join(DOCS.read_text(encoding="utf-8").split()),
    )
    assert told
    everything = cases()
    unfit, fit = [c for c in everything if not c.fit], [c for c in everything if c.fit]
    accepted, refused = sum(map(passes, unfit)), sum(not passes(c) for c in fit)
    measured = [len(everything), accepted, len(unfit), f"{100 * accepted / len(unfit):.1f}"]
    measured += [refused, len(fit), f"{100 * refused / len(fit):.1f}"]
    assert list(told.groups()) == [str(m) for m in measured]
    assert len(everything) > 150 and len(Counter(c.kind for c in everything)) > 15


@pytest.mark.parametrize("text", ["The café of Reading is old.", "The cafe\u0301 of\tReading  is old."])
def test_a_normalised_fact_is_kept_in_the_passages_own_characters(text: str) -> None:
    assert isinstance(cut_fact("p3", text, PASSAGES), str)
    cut = cut_fact("p3", text, PASSAGES, "whitespace+nfc")
    assert isinstance(cut, dict) and cut["text"] == "The café of  Reading is old."
    assert PASSAGES["p3"][cut["start"] : cut["end"]] == cut["text"]
    with pytest.raises(ValueError, match="nfkc"):
        cut_fact("p3", text, PASSAGES, "nfkc")


@given(st.text(alphabet="ab e\u0301\u0308\u00e9 \n\t\u1100\u1161\u11a8", min_size=1, max_size=20), st.data())
def test_what_is_found_is_the_same_under_its_normalisation(contents: str, data: st.DataObject) -> None:
    way = data.draw(st.sampled_from(NORMALIZATIONS))

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFC", text) if "nfc" in way else text
        return re.sub(r"\s+", " ", text).strip() if "whitespace" in way else text

    start = data.draw(st.integers(0, len(contents) - 1))
    piece = contents[start : data.draw(st.integers(start + 1, len(contents)))]
    span = find_span(unicodedata.normalize("NFD", piece) if "nfc" in way else piece, contents, way)
    if span is not None:
        got = contents[span.start : span.end]
        assert normal(got).strip() == normal(piece).strip()


def test_an_evidence_draft_is_held_to_the_same_plan() -> None:
    draft: dict[str, Any] = {
        "task_type": "multi_hop",
        "reasoning_plan": PLAN,
        "grounding_facts": [{"passage_id": F1[0], "text": F1[1]}],
        "partial_findings": ["Sam Mendes directed it; where he was born is not known."],
    }
    gold = Gold(["Xyzzy"])
    assert judge(draft, "evidence", QUESTION, PASSAGES, gold).passed
    early = judge({**draft, "reasoning_plan": ["Find where Mendes was born."]}, "evidence", QUESTION, PASSAGES, gold)
    assert early.failed_check == "leak" and "Mendes" in (early.reason or "")
