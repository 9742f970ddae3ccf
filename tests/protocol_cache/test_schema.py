from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol_cache import ProtocolError, validate_protocol
from protocol_cache.schema import draft_error, protocol_schema
from protocol_cache.schema_doc import schema_page


def test_both_variants_are_valid(succeeded: dict[str, Any], evidence: dict[str, Any]) -> None:
    assert validate_protocol(succeeded) is succeeded
    assert validate_protocol(evidence) is evidence


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema_version": "2"}, "schema_version"),
        ({"variant": "other"}, "variant"),
        ({"task_type": "hop"}, "task_type"),
        ({"reasoning_plan": []}, "reasoning_plan"),
        ({"reasoning_plan": "Find it."}, "reasoning_plan"),
        ({"reasoning_plan": ["  "]}, "reasoning_plan[0]"),
        ({"grounding_facts": []}, "grounding_facts"),
        ({"grounding_facts": [{"passage_id": "p", "text": "t", "start": 0}]}, "grounding_facts[0]"),
        ({"grounding_facts": [{"passage_id": "p", "text": "t", "start": -1, "end": 1}]}, "grounding_facts[0].start"),
        ({"answer": 5}, "answer"),
        ({"answer": " "}, "answer"),
        ({"answer_grounded": "yes"}, "answer_grounded"),
        ({"partial_findings": ["x"]}, "partial_findings"),
        ({"note": "x"}, "note"),
    ],
)
def test_a_violation_is_refused_and_named(succeeded: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        validate_protocol({**succeeded, **change})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [*protocol_schema()["required"], "answer", "answer_grounded"])
def test_a_missing_field_is_refused_and_named(succeeded: dict[str, Any], field: str) -> None:
    del succeeded[field]
    with pytest.raises(ProtocolError, match=field):
        validate_protocol(succeeded)


@pytest.mark.parametrize("field", ["answer", "answer_grounded"])
def test_evidence_holds_no_answer(evidence: dict[str, Any], succeeded: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        validate_protocol({**evidence, field: succeeded[field]})


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_something_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        validate_protocol(value)


def draft_of(protocol: dict[str, Any]) -> dict[str, Any]:
    facts = [{"passage_id": f["passage_id"], "text": f["text"]} for f in protocol["grounding_facts"]]
    kept = {k: v for k, v in protocol.items() if k not in ("schema_version", "variant")}
    return {**kept, "grounding_facts": facts}


def test_a_draft_is_a_protocol_without_what_the_program_adds(
    succeeded: dict[str, Any], evidence: dict[str, Any]
) -> None:
    assert draft_error(draft_of(succeeded), "succeeded") is None
    assert draft_error(draft_of(evidence), "evidence") is None
    assert draft_error(succeeded, "succeeded") is not None
    assert draft_error(draft_of(succeeded), "evidence") is not None
    assert draft_error(draft_of(evidence), "succeeded") is not None


def test_the_drafts_dont_change_the_schema(succeeded: dict[str, Any]) -> None:
    draft_error(draft_of(succeeded), "succeeded")
    assert validate_protocol(succeeded)
    assert "schema_version" in protocol_schema()["properties"]


def test_the_page_of_the_schema_is_the_schemas() -> None:
    page = Path(__file__).parents[2] / "docs/protocol-schema.md"
    assert page.read_text(encoding="utf-8") == schema_page()
    assert all(f"`{name}`" in schema_page() for name in protocol_schema()["properties"])
