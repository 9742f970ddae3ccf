"""A valid protocol of each variant, and a record; light, since child processes import it too."""

from __future__ import annotations

from typing import Any

from protocol_cache import Provenance, Record, Usage

FACTS = [
    {"passage_id": "city-1", "text": "The city of X lies in Y.", "start": 4, "end": 28},
    {"passage_id": "country-Y", "text": "Its currency is Z.", "start": 34, "end": 52},
]
SUCCEEDED: dict[str, Any] = {
    "schema_version": "1",
    "variant": "succeeded",
    "task_type": "multi_hop",
    "reasoning_plan": ["Find the country of X.", "Find the currency of that country."],
    "grounding_facts": FACTS,
    "answer": "Z",
    "answer_grounded": True,
}
EVIDENCE: dict[str, Any] = {
    "schema_version": "1",
    "variant": "evidence",
    "task_type": "multi_hop",
    "reasoning_plan": ["Find the country of X.", "Find the currency of that country."],
    "grounding_facts": FACTS[:1],
    "partial_findings": ["X lies in Y.", "Reliable evidence for the currency is missing."],
}

ORIGIN = Provenance("openai/m", "v1-abc", "hash", "1")


def record(qid: str, protocol: dict[str, Any] | None = None, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "question_id": qid,
        "question": f"Question {qid}?",
        "source": "nq",
        "split": "train",
        "status": "passed" if protocol else "rejected",
        "provenance": ORIGIN,
        "protocol": protocol,
        "reason": None if protocol else "leak: plan step 1 names the answer",
        "usage": Usage(3, 100, 20, 0.25, 1.5),
        "created_at": 1000.0,
    }
    return Record(**{**values, **changes})
