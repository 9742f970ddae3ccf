from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol_cache.gate import CHECKS, cut_fact, grounding_problem, judge
from protocol_cache.leaks import mentions
from protocol_cache.synthesis.state import Gold

PASSAGES = {
    "city-1": '"X"\nThe city of X lies in Y. Its time zone is T.',
    "country-Y": '"Y"\nThe country of Y lies in Europe. Its currency is Zed.',
}
QUESTION = "What is the currency of the country where X lies?"
DRAFT: dict[str, Any] = {
    "task_type": "multi_hop",
    "reasoning_plan": ["Find the country of X.", "Find the currency of that country."],
    "grounding_facts": [
        {"passage_id": "city-1", "text": "The city of X lies in Y."},
        {"passage_id": "country-Y", "text": "Its currency is Zed."},
    ],
    "answer": "Zed",
    "answer_grounded": True,
}


def verdict(variant: str = "succeeded", gold: tuple[str, ...] = ("Zed",), **changes: Any) -> Any:
    return judge({**copy.deepcopy(DRAFT), **changes}, variant, QUESTION, PASSAGES, Gold(gold))


def evidence(**changes: Any) -> Any:
    draft = {k: v for k, v in DRAFT.items() if not k.startswith("answer")} | {"partial_findings": ["Y is the country."]}
    return judge({**draft, **changes}, "evidence", QUESTION, PASSAGES, Gold(("Zed",)))


def test_a_good_draft_becomes_a_protocol_with_spans() -> None:
    good = verdict()
    assert good.passed and good.reason is None and good.failed_check is None
    for fact in good.protocol["grounding_facts"]:
        assert PASSAGES[fact["passage_id"]][fact["start"] : fact["end"]] == fact["text"]
    assert grounding_problem(good.protocol, PASSAGES) is None
    assert evidence().passed and "answer" not in evidence().protocol


def test_an_alias_is_as_good_as_the_first_gold_answer() -> None:
    assert verdict(gold=("Zeddish pound", "the zed")).passed


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"reasoning_plan": "Find it."}, "schema"),
        ({"task_type": "five_hops"}, "schema"),
        ({"extra": 1}, "schema"),
        ({"grounding_facts": []}, "schema"),
        ({"answer": "Zed dollar"}, "exact_match"),
        ({"grounding_facts": [{"passage_id": "city-1", "text": "The city of X lies in  Y."}]}, "grounding"),
        ({"grounding_facts": [{"passage_id": "city-1", "text": "the city of X lies in Y."}]}, "grounding"),
        ({"grounding_facts": [{"passage_id": "country-Y", "text": "The city of X lies in Y."}]}, "grounding"),
        ({"grounding_facts": [{"passage_id": "city-2", "text": "The city of X lies in Y."}]}, "grounding"),
        ({"reasoning_plan": ["Find the country of X.", "Check that it pays in Zed."]}, "leak"),
        ({"reasoning_plan": ["Find the ZEDs."]}, "leak"),
        ({"reasoning_plan": ["Look for the zed's name."]}, "leak"),
    ],
)
def test_each_check_refuses_what_it_is_there_for(changes: dict[str, Any], check: str) -> None:
    refused = verdict(**changes)
    assert not refused.passed and refused.protocol is None
    assert refused.failed_check == check
    assert refused.reason and "\n" not in refused.reason


def test_all_failed_checks_are_named_in_order() -> None:
    facts = [{"passage_id": "city-1", "text": "X is a city."}]
    refused = verdict(answer="Other", reasoning_plan=["Is it Zed?"], grounding_facts=facts)
    assert list(refused.problems) == [c for c in CHECKS if c != "schema"]
    assert refused.reason.index("exact_match") < refused.reason.index("grounding") < refused.reason.index("leak")


def test_no_reason_quotes_the_gold_answer() -> None:
    refused = verdict(gold=("Xyzzy",), reasoning_plan=["Ask about xyzzy."])
    assert set(refused.problems) == {"exact_match", "leak"}
    assert "xyzzy" not in refused.reason.lower()


def test_the_evidence_variant_leaks_too() -> None:
    assert evidence(reasoning_plan=["Find whether it is Zed."]).failed_check == "leak"
    assert evidence(answer="Zed").failed_check == "schema"


def test_what_the_question_holds_is_no_leak() -> None:
    question = "Which city has more people, X or Y?"
    draft = {**DRAFT, "reasoning_plan": ["Find the population of X."], "answer": "X"}
    assert judge(draft, "succeeded", question, PASSAGES, Gold(["X"])).passed


@given(st.sampled_from(sorted(PASSAGES)), st.data())
def test_every_real_span_of_whole_words_is_grounded(passage_id: str, data: st.DataObject) -> None:
    contents = PASSAGES[passage_id]
    words = [(m.start(), m.end()) for m in re.finditer(r"\S+", contents)]
    first = data.draw(st.integers(0, len(words) - 2))
    last = data.draw(st.integers(first + 1, len(words) - 1))
    text = contents[words[first][0] : words[last][1]]
    cut = cut_fact(passage_id, text, PASSAGES)
    assert isinstance(cut, dict)
    assert contents[cut["start"] : cut["end"]] == text


@given(st.sampled_from(sorted(PASSAGES)), st.data())
def test_one_changed_character_is_not_grounded(passage_id: str, data: st.DataObject) -> None:
    contents = PASSAGES[passage_id]
    start = data.draw(st.integers(0, len(contents) - 8))
    text = contents[start : start + 8]
    at = data.draw(st.integers(0, 7))
    changed = text[:at] + data.draw(st.characters(exclude_characters=text[at])) + text[at + 1 :]
    assume(changed not in contents)
    assert isinstance(cut_fact(passage_id, changed, PASSAGES), str)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Ask about PARIS.", "Paris"),
        ("Is it the U.S.A?", "USA"),
        ("the Euro’s value", "Euro"),
        ("zone Europe, Paris", "Europe/Paris"),
        ("about 1234567 people", "1,234,567"),
        ("in Zurich", "Zürich"),
        ("by an O'Brien", "O’Brien"),
        ("about The The, the band", "The The"),
        ("首都は北京です", "北京"),
        ("ＮＡＳＡ it is", "NASA"),
        ("Use C++ here", "C++"),
    ],
)
def test_mentions(text: str, answer: str) -> None:
    assert mentions(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Find the cities of Nigeria.", "Niger"),
        ("Find the country of Parisot.", "Paris"),
        ("Find the currency of that country.", "Euro"),
        ("", "Euro"),
        ("Find the phone code 441.", "44"),
        ("New towns in York", "New York"),
    ],
)
def test_does_not_mention(text: str, answer: str) -> None:
    assert not mentions(text, answer)


WORDS = st.text(alphabet="abcdefghijklmnop", min_size=2, max_size=8).filter(lambda w: w not in ("an",))


@given(
    st.lists(WORDS, min_size=1, max_size=3),
    st.sampled_from(["{}", "Find {} now.", "({})", "the {}!", "{}'s"]),
    st.sampled_from([str.upper, str.title, str]),
)
def test_a_leak_is_found_in_any_dress(words: list[str], dress: str, case: Any) -> None:
    answer = " ".join(words)
    assert mentions(dress.format(case(answer)), answer)


@given(st.lists(WORDS, min_size=1, max_size=6), WORDS)
def test_other_words_are_no_leak(words: list[str], answer: str) -> None:
    assume(answer not in words and answer + "s" not in words)
    assert not mentions(" ".join(words), answer)
