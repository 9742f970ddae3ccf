"""What one question's page shows: its facts in their passages, its exploration as steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Segment:
    """A piece of a passage and the numbers (from 1) of the facts that cover it."""

    text: str
    facts: tuple[int, ...]


@dataclass(frozen=True)
class Shown:
    """A passage. ``number`` counts the passages of the page from 1; ``facts`` are those that were cut from it."""

    number: int
    id: str
    segments: tuple[Segment, ...]
    facts: tuple[int, ...]


@dataclass(frozen=True)
class Fact:
    """A grounding fact. ``passage`` is the number of its passage on the page, None where it is not kept.

    ``problem`` says how the stored span misses the text; None where it fits, or cannot be compared.
    """

    number: int
    text: str
    passage_id: str
    start: int
    end: int
    passage: int | None
    problem: str | None


def segments(contents: str, spans: Mapping[int, tuple[int, int]]) -> tuple[Segment, ...]:
    """``contents`` cut wherever a fact begins or ends; their texts joined are ``contents``.

    Args:
        spans: fact number -> (start, end), in characters; what lies beyond the text is cut off.
    """
    size = len(contents)
    kept = {n: (max(0, start), min(size, end)) for n, (start, end) in spans.items()}
    edges = sorted({0, size, *(edge for start, end in kept.values() if start < end for edge in (start, end))})
    return tuple(
        Segment(contents[a:b], tuple(n for n, (start, end) in sorted(kept.items()) if start <= a and b <= end))
        for a, b in pairwise(edges)
    )


def grounded(protocol: Mapping[str, Any] | None, log: Any) -> tuple[list[Fact], list[Shown]]:
    """A protocol's facts, and the passages of its log with those facts marked, those with facts first."""
    kept = log.get("passages") if isinstance(log, dict) else None
    contents = {str(p["id"]): str(p["contents"]) for p in kept or [] if isinstance(p, dict) and "id" in p}
    raw = list((protocol or {}).get("grounding_facts", []))
    spans: dict[str, dict[int, tuple[int, int]]] = {}
    for number, fact in enumerate(raw, start=1):
        spans.setdefault(fact["passage_id"], {})[number] = (fact["start"], fact["end"])
    order = sorted(contents, key=lambda pid: min(spans.get(pid, {len(raw) + 1: 0})))
    numbers = {pid: i for i, pid in enumerate(order, start=1)}
    shown = [
        Shown(numbers[pid], pid, segments(contents[pid], spans.get(pid, {})), tuple(spans.get(pid, ())))
        for pid in order
    ]
    facts = []
    for number, fact in enumerate(raw, start=1):
        pid, start, end = fact["passage_id"], fact["start"], fact["end"]
        problem = None
        if pid in contents and contents[pid][start:end] != fact["text"]:
            problem = f"the passage reads otherwise at {start}:{end}"
        elif contents and pid not in contents:
            problem = "this passage was not retrieved"
        facts.append(Fact(number, fact["text"], pid, start, end, numbers.get(pid), problem))
    return facts, shown


#: Events that the page has a form for; any other is shown as JSON.
KNOWN_EVENTS = ("decompose", "search", "finding", "synthesize", "check", "repair")


def steps(log: Any, passages: Sequence[Shown]) -> list[dict[str, Any]]:
    """The log's events as the page shows them: a search names its passages by their numbers here."""
    events = log.get("events") if isinstance(log, dict) else None
    numbers = {shown.id: shown.number for shown in passages}
    found = []
    for event in events or []:
        if not isinstance(event, dict):
            found.append({"kind": "other", "event": "?", "raw": event})
            continue
        kind = event.get("event")
        step = dict(event) | {"kind": kind if kind in KNOWN_EVENTS and _complete(event) else "other", "raw": event}
        if step["kind"] == "search":
            step["passages"] = [(pid, numbers.get(pid)) for pid in event["passage_ids"]]
        found.append(step)
    return found


_NEEDED = {
    "decompose": ("levels",),
    "search": ("subtask", "query", "passage_ids"),
    "finding": ("subtask", "finding", "supported"),
    "synthesize": ("status",),
    "check": ("answer", "matches"),
    "repair": ("kind",),
}


def _complete(event: Mapping[str, Any]) -> bool:
    """Whether it has what its form needs; a log of another version may not."""
    return all(name in event for name in _NEEDED[event["event"]])
