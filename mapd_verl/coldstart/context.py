"""Privileged contexts for the cold start: protocols as the synthesis writes them, whole and in part."""

from __future__ import annotations

import random

from mapd_verl.coldstart.behaviour import Turn
from mapd_verl.coldstart.worlds import passage_of
from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.questions import Question
from protocol_cache.render import render


def protocol_of(question: Question) -> dict:
    """The protocol that a faultless synthesis would store for ``question`` (offsets left at zero)."""
    q = question
    hops: list[tuple[str, str]]
    if q.other is not None:
        hops = [("population", passage_of(q.city)), ("population", passage_of(q.other))]
    elif q.relation in text.CITY_RELATIONS:
        hops = [(q.relation, passage_of(q.city))]
    else:
        hops = [("country", passage_of(q.city)), (q.relation, passage_of(q.city.country))]
    facts = [text.fact(relation, contents) for relation, contents in hops]
    return {
        "schema_version": "1",
        "variant": "succeeded",
        "task_type": q.kind,
        "reasoning_plan": text.plan(q.relation, q.city.display, q.other.display if q.other else None),
        "grounding_facts": [{"passage_id": "-", "text": f, "start": 0, "end": len(f)} for f in facts if f],
        "answer": q.answers[0],
        "answer_grounded": True,
    }


def full_protocol(question: Question) -> str:
    """The protocol as the student's prompt shows it."""
    return render(protocol_of(question), "compact")


def partial_protocol(question: Question, rng: random.Random) -> str:
    """Some lines of the protocol only, so that following the plan needs reading as well as copying."""
    lines = full_protocol(question).split("\n")
    keep = rng.choice(((0, 1), (0, 1, 2), (1,), (0, 1), (0, 1, 3)))
    return "\n".join(lines[i] for i in keep if i < len(lines))


def rollout_context(turns: list[Turn]) -> str:
    """A successful rollout of the same question as context: the policy's own words, without passages."""
    return "\n".join(turn.text for turn in turns)
