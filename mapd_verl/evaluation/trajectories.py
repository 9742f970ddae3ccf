"""Which trajectories a report shows, and their text in parts that a reader can tell apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mapd_verl.evaluation.records import Record
from mapd_verl.evaluation.runs import Run, record_from_dump

_TAGGED = re.compile(r"<(think|search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A stretch of a trajectory. ``kind``: think, search, answer, text (policy) or observation."""

    kind: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A trajectory as the report shows it. ``protocol`` is rendered, "" where the question has none."""

    record: Record
    origin: str
    parts: tuple[Part, ...]
    protocol: str
    source: str


def split_parts(record: Record) -> tuple[Part, ...]:
    """The record's segments, the policy's ones cut at its tags. Joined, the texts are the trajectory's."""
    parts: list[Part] = []
    for segment in record.segments:
        if segment["role"] == "observation":
            parts.append(Part("observation", segment["text"]))
            continue
        text, at = segment["text"], 0
        for match in _TAGGED.finditer(text):
            if match.start() > at:
                parts.append(Part("text", text[at : match.start()]))
            parts.append(Part(match.group(1), match.group(0)))
            at = match.end()
        if at < len(text):
            parts.append(Part("text", text[at:]))
    return tuple(parts)


def choose(records: Sequence[Record], count: int) -> list[Record]:
    """Up to ``count`` records, one a question, spread evenly over kinds and over right and wrong answers."""
    groups: dict[tuple[str, bool], list[Record]] = {}
    seen: set[str] = set()
    for record in records:
        if record.question_id not in seen or not record.question_id:
            seen.add(record.question_id)
            groups.setdefault((record.kind, record.em == 1.0), []).append(record)
    queues = [groups[key] for key in sorted(groups)]
    chosen: list[Record] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return chosen


def show_trajectories(run: Run, count: int, template: str = "compact") -> list[Shown]:
    """Trajectories of the last step whose training rollouts were dumped (their questions have protocols), filled
    up with held-out ones after training."""
    steps = run.rollout_steps()
    rows = run.rollouts(steps[-1]) if steps else []
    trained = [record_from_dump(row, f"rollout {i}") for i, row in enumerate(rows, 1)]
    chosen = [(record, f"training, step {steps[-1]}") for record in choose(trained, count)]
    if len(chosen) < count:
        chosen += [(record, "held out, after training") for record in choose(run.after, count - len(chosen))]
    texts = _protocols(run, [record.question_id for record, _ in chosen], template)
    return [
        Shown(record, origin, split_parts(record), texts.get(record.question_id, ""), record.privilege)
        for record, origin in chosen
    ]


def _protocols(run: Run, question_ids: Sequence[str], template: str) -> Mapping[str, str]:
    if run.protocols is None:
        return {}
    from mapd_verl.data.join import join_protocols

    return join_protocols(run.protocols, question_ids, template).texts
