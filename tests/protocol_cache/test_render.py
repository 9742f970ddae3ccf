from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_samples import EVIDENCE, SUCCEEDED

from protocol_cache import render, validate_protocol
from protocol_cache.render import TRUNCATION_ORDER, render_within, template_names


def test_compact_is_exactly_what_the_student_was_taught(succeeded: dict[str, Any]) -> None:
    assert render(succeeded, "compact") == (
        "Task: multi_hop\n"
        "Plan: 1. Find the country of X. 2. Find the currency of that country.\n"
        "Facts: The city of X lies in Y. Its currency is Z.\n"
        "Answer: Z"
    )


def test_compact_of_the_evidence_variant_ends_in_findings(evidence: dict[str, Any]) -> None:
    assert render(evidence, "compact") == (
        "Task: multi_hop\n"
        "Plan: 1. Find the country of X. 2. Find the currency of that country.\n"
        "Facts: The city of X lies in Y.\n"
        "Findings: X lies in Y. Reliable evidence for the currency is missing."
    )


def test_no_facts_no_line_for_them(evidence: dict[str, Any]) -> None:
    evidence["grounding_facts"] = []
    assert "Facts" not in render(evidence, "compact")
    assert "\n\n\n" not in render(evidence, "default")


@pytest.mark.parametrize("template", sorted({*template_names()} - {"plan"}))
def test_every_template_shows_everything_and_ends_without_newline(
    succeeded: dict[str, Any], evidence: dict[str, Any], template: str
) -> None:
    for protocol in (succeeded, evidence):
        text = render(protocol, template)
        assert text == text.strip()
        wanted = [*protocol["reasoning_plan"], *(f["text"] for f in protocol["grounding_facts"])]
        for part in [*wanted, *protocol.get("partial_findings", [])]:
            assert part in text
    assert render(succeeded, template).endswith("Z")


def test_line_breaks_in_a_fact_stay_on_its_line(succeeded: dict[str, Any]) -> None:
    succeeded["grounding_facts"][0]["text"] = '"X"\nThe city\r\n of X'
    assert render(succeeded, "compact").splitlines()[2].startswith('Facts: "X" The city of X Its')


def test_nothing_is_escaped(succeeded: dict[str, Any]) -> None:
    succeeded["answer"] = "<b> & {{ answer }} 'ü'"
    assert render(succeeded, "compact").endswith("Answer: <b> & {{ answer }} 'ü'")


def test_a_template_of_ones_own(succeeded: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("{{ answer }}|{{ partial_findings is none }}\n")
    assert render(succeeded, str(own)) == "Z|True"


@pytest.mark.parametrize(
    ("source", "said"), [("{{ nothing }}", "nothing"), ("{% if %}", "line 1"), ("{{ answer.x.y }}", "x")]
)
def test_a_broken_template_is_named(succeeded: dict[str, Any], tmp_path: Path, source: str, said: str) -> None:
    own = tmp_path / "broken.j2"
    own.write_text(source)
    with pytest.raises(ValueError, match=r"broken\.j2") as caught:
        render(succeeded, str(own))
    assert said in str(caught.value)


@pytest.mark.parametrize("template", ["unknown", "/nowhere/x.j2"])
def test_an_unknown_template_is_named(succeeded: dict[str, Any], template: str) -> None:
    with pytest.raises(ValueError, match=template):
        render(succeeded, template)


def test_reading_needs_neither_litellm_nor_torch_nor_jsonschema() -> None:
    code = (
        "import sys, protocol_cache\n"
        "from protocol_cache.render import render\n"
        "render({'variant': 'evidence', 'task_type': 'others', 'reasoning_plan': ['a'], 'grounding_facts': [],"
        " 'partial_findings': ['b']}, 'compact')\n"
        "print([m for m in ('litellm', 'torch', 'jsonschema', 'verl', 'numpy', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plan_alone_shows_neither_facts_nor_answer(succeeded: dict[str, Any]) -> None:
    text = render(succeeded, "plan")
    assert text.endswith("2. Find the currency of that country.") and "lies in" not in text and "Z" not in text


@pytest.mark.parametrize("template", sorted({*template_names()} - {"plan"}))
def test_controls_are_rendered_too(template: str) -> None:
    base = {"schema_version": "1", "task_type": "others"}
    raw = {**base, "variant": "raw", "trajectory": ["Search: X", "Read: Y"], "answer": "Z"}
    text = render(validate_protocol(raw), template)
    assert text.index("Search: X") < text.index("Read: Y") < text.index("Z")
    answer = validate_protocol({**base, "variant": "answer_only", "answer": "Z"})
    assert render(answer, template).endswith("Z") and "Plan" not in render(answer, template)


LINE = st.text(alphabet="abc déf", min_size=1, max_size=40).filter(str.strip)


@given(
    st.lists(LINE, min_size=1, max_size=6), st.lists(LINE, min_size=1, max_size=8), st.integers(1, 120), st.booleans()
)
def test_a_budget_drops_whole_items_from_the_end_facts_first(
    plan: list[str], facts: list[str], budget: int, ok: bool
) -> None:
    plan = [f"p{i} {step}" for i, step in enumerate(plan)]
    texts = [f"f{i} {text}" for i, text in enumerate(facts)]
    protocol = {
        **(SUCCEEDED if ok else EVIDENCE),
        "reasoning_plan": plan,
        "grounding_facts": [{"passage_id": "p", "text": t, "start": 0, "end": len(t)} for t in texts],
    }
    count = lambda text: len(text) // 4  # noqa: E731
    fitting = render_within(protocol, "compact", count, budget)
    whole = render(protocol, "compact")
    if fitting is None:
        core = {**protocol, "reasoning_plan": [], "grounding_facts": []}
        assert count(render({**core, **({} if ok else {"partial_findings": []})}, "compact")) > budget
        return
    assert fitting.tokens == count(fitting.text) <= budget
    assert (fitting.text == whole) == (not fitting.dropped)
    kept = {part: len(protocol.get(part) or ()) - fitting.dropped.get(part, 0) for part in TRUNCATION_ORDER}
    for i, text in enumerate(texts):
        assert (" ".join(text.split()) in fitting.text) == (i < kept["grounding_facts"])
    for i, text in enumerate(plan):
        assert (" ".join(text.split()) in fitting.text) == (i < kept["reasoning_plan"])
    assert kept["reasoning_plan"] == len(plan) or not kept["grounding_facts"]  # the plan goes after all facts
    if ok:
        assert fitting.text.endswith("Answer: Z")
    # No shorter cut would have fitted.
    gone = sum(fitting.dropped.values())
    if gone and kept["grounding_facts"] < len(texts) and "reasoning_plan" not in fitting.dropped:
        one_more = {**protocol, "grounding_facts": protocol["grounding_facts"][: kept["grounding_facts"] + 1]}
        assert count(render(one_more, "compact")) > budget


def test_a_budget_of_nothing_is_refused(succeeded: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        render_within(succeeded, "compact", len, 0)
