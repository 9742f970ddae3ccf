"""Control caches made of a finished one, without a call to a teacher, so that only the protocol differs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from protocol_cache.normalize import normalize_answer
from protocol_cache.schema import SCHEMA_VERSION, validate_protocol

if TYPE_CHECKING:
    from protocol_cache.store import ProtocolStore, Record

KINDS = ("raw", "shuffled", "answer_only")
_LINE, _LINES = 2000, 200  # the schema's bounds


def ablate(store: ProtocolStore, kind: str, seed: int = 0) -> Iterator[Record]:
    """The records of ``store``, those that passed with another protocol in its place; the others as they are.

    - ``raw``: the exploration as it went, in place of what the protocolizer made of it (the paper's "w/o structured
      protocol"). Checks and diagnoses are left out: they are the gold answer's.
    - ``shuffled``: the protocol of another question, whose answer differs.
    - ``answer_only``: the answer and nothing else. An evidence protocol has none, so its question is left without.

    ``prompt_version`` gains ``+kind``.

    Raises:
        ValueError: an unknown kind, or nothing to shuffle.
    """
    if kind not in KINDS:
        raise ValueError(f"ablation {kind!r}: choose from {', '.join(KINDS)}")
    passed = sorted(qid for qid, status in store.statuses().items() if status == "passed")
    donors = _donors(store, passed, seed) if kind == "shuffled" else {}
    for record in store:
        if record.protocol is None:
            yield record
            continue
        origin = record.provenance
        origin = dataclasses.replace(origin, prompt_version=f"{origin.prompt_version}+{kind}")
        protocol = _protocol(store, record, kind, donors)
        if protocol is not None:
            validate_protocol(protocol)
            yield dataclasses.replace(record, protocol=protocol, provenance=origin)
        else:
            reason = f"ablation {kind}: its protocol has no answer"
            yield dataclasses.replace(record, status="rejected", protocol=None, reason=reason, provenance=origin)


def _protocol(store: ProtocolStore, record: Record, kind: str, donors: Mapping[str, str]) -> dict[str, Any] | None:
    assert record.protocol is not None
    if kind == "shuffled":
        donor = store.get(donors[record.question_id])
        assert donor is not None
        return donor.protocol
    made = {"schema_version": SCHEMA_VERSION, "variant": kind, "task_type": record.protocol["task_type"]}
    if "answer" in record.protocol:
        made["answer"] = record.protocol["answer"]
    elif kind == "answer_only":
        return None
    if kind == "raw":
        made["trajectory"] = trajectory(store.log(record.question_id) or {})
    return made


def _donors(store: ProtocolStore, passed: list[str], seed: int) -> dict[str, str]:
    """Whose protocol each question gets: the next in a shuffled ring whose answer is another."""
    answers: dict[str, str | None] = {}
    for record in store:
        if record.protocol is not None:
            answer = record.protocol.get("answer")
            answers[record.question_id] = normalize_answer(answer) if answer else None
    ring = list(passed)
    random.Random(seed).shuffle(ring)
    donors = {}
    for place, qid in enumerate(ring):
        others = (ring[(place + step) % len(ring)] for step in range(1, len(ring)))
        donor = next((o for o in others if answers[o] is None or answers[o] != answers[qid]), None)
        if donor is None:
            raise ValueError(f"ablation shuffled: no other question with another answer than that of {qid}")
        donors[qid] = donor
    return donors


def trajectory(log: Mapping[str, Any]) -> list[str]:
    """An exploration log as lines of text: sub-tasks, searches with the titles read, findings, candidate answers."""
    titles = {p["id"]: p["contents"].partition("\n")[0].strip().strip('"') for p in log.get("passages", ())}
    lines: list[str] = []
    for event in log.get("events", ()):
        kind = event["event"]
        if kind == "decompose":
            lines += [f"Sub-task {task['id']}: {task['goal']}" for level in event["levels"] for task in level]
        elif kind == "search":
            read = "; ".join(titles.get(i, i) for i in event["passage_ids"]) or "nothing"
            lines.append(f"Search for {event['subtask']}: {event['query']} (read: {read})")
        elif kind == "finding":
            lines.append(f"Finding of {event['subtask']}: {event['finding']}")
        elif kind == "synthesize" and event["answer"]:
            lines.append(f"Candidate answer: {event['answer']}")
    chunks = [line[i : i + _LINE] for line in lines or ["Nothing was searched."] for i in range(0, len(line), _LINE)]
    return [chunk for chunk in chunks if chunk.strip()][:_LINES]
