"""A teacher made of rules: it plays every role of the synthesis team on questions of this world.

It reads the role prompts like any model, through their text, and knows no fact: what it says about a
place it has read in a passage of its prompt. At given rates it errs as models do (misreads a passage,
picks the wrong hop, answers in a sentence, paraphrases a quote, gives the outcome away in the plan,
breaks its JSON), so that repair and gate have work.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mapd_verl.data.geonames import text
from protocol_cache.normalize import normalize_answer

#: The name it goes by at its server.
MODEL = "geonames-rules"

_ROLE = re.compile(r"^Role: (\S+)$", re.MULTILINE)
_INPUT = re.compile(r"^```json\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
_RELATIONS = {name: relation for relation, name in text.RELATION_NAMES.items()}
_NAMES = "|".join(map(re.escape, _RELATIONS))
_GOAL = re.compile(rf"^Find the (?P<name>{_NAMES}) of (?P<entity>.+?)(?: once more)?\.$")
_FINDING = re.compile(rf"^The (?P<name>{_NAMES}) of (?P<entity>.+) is (?P<value>.+)\.$")
_THAT_COUNTRY = "that country"


class UnreadablePrompt(ValueError):
    """The messages hold no role, or no input block, that this teacher knows."""


@dataclass(frozen=True)
class Reply:
    """What the "model" writes; ``finish_reason`` is OpenAI's: "stop", or "length" for a reply cut off."""

    content: str
    finish_reason: str = "stop"


@dataclass(frozen=True)
class _Fact:
    """A finding or a passage's sentence, read: ``relation`` of ``entity`` is ``value``."""

    relation: str
    entity: str
    value: str


def _sentence(fact: _Fact) -> str:
    return f"The {text.RELATION_NAMES[fact.relation]} of {fact.entity} is {fact.value}."


def _read_finding(sentence: str) -> _Fact | None:
    found = _FINDING.match(sentence)
    return _Fact(_RELATIONS[found["name"]], found["entity"], found["value"]) if found else None


def _title_and_body(contents: str) -> tuple[str, str]:
    title, _, body = contents.partition("\n")
    return title.strip('"'), body


def _read_passage(relation: str, entity: str, passages: Sequence[dict[str, str]]) -> tuple[dict[str, str], str] | None:
    """The passage about ``entity`` and its sentence on ``relation``; None if that was not retrieved."""
    for passage in passages:
        title, body = _title_and_body(passage["contents"])
        if title == entity:
            sentence = text.fact(relation, body)
            if sentence is not None:
                return passage, sentence
    return None


class RuleTeacher:
    """Deterministic: the same seed and messages give the same reply.

    Args:
        error_rate: chance of a reply that is well formed and wrong.
        broken_json_rate: chance of a reply that is not one clean JSON object.

    Raises:
        ValueError: a rate outside [0, 1].
    """

    def __init__(self, seed: int = 0, error_rate: float = 0.1, broken_json_rate: float = 0.1) -> None:
        for name, rate in (("error_rate", error_rate), ("broken_json_rate", broken_json_rate)):
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {rate}")
        self.seed = seed
        self.error_rate = error_rate
        self.broken_json_rate = broken_json_rate
        self._roles: dict[str, Callable[[dict[str, Any], random.Random, bool], dict[str, Any]]] = {
            "orchestrator/decompose": _decompose,
            "orchestrator/synthesize": _synthesize,
            "searcher": _search,
            "repair": _repair,
            "protocolizer": _protocolize,
        }

    def reply(self, messages: Sequence[dict[str, str]]) -> Reply:
        """The reply to a chat.

        Raises:
            UnreadablePrompt: the messages are no role prompt of the synthesis team.
        """
        role, inputs = self._read(messages)
        key = json.dumps([self.seed, *([m["role"], m["content"]] for m in messages)]).encode()
        rng = random.Random(hashlib.sha256(key).digest())
        wrong = rng.random() < self.error_rate
        broken = rng.random() < self.broken_json_rate
        try:
            answer = self._roles[role](inputs, rng, wrong)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadablePrompt(f"the inputs of role {role} lack something: {error!r}") from error
        content = json.dumps(answer, ensure_ascii=False)
        return _break(content, rng) if broken else Reply(content)

    def _read(self, messages: Sequence[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        by_role: dict[str, str] = {}
        for message in messages:
            by_role.setdefault(message["role"], message["content"])
        role = _ROLE.search(by_role.get("system", ""))
        if role is None or role[1] not in self._roles:
            raise UnreadablePrompt(f"the system message names no role of {sorted(self._roles)}")
        block = _INPUT.search(by_role.get("user", ""))
        try:
            inputs = json.loads(block[1]) if block else None
        except ValueError as error:
            raise UnreadablePrompt(f"the input block is not JSON: {error}") from error
        if not isinstance(inputs, dict):
            raise UnreadablePrompt("the first user message holds no ```json block with an object")
        return role[1], inputs


def _decompose(inputs: dict[str, Any], rng: random.Random, wrong: bool) -> dict[str, Any]:
    question = text.parse_question(inputs["question"])
    if question is None:
        return {"task_type": "others", "subtasks": [{"id": _new_id(inputs, 0), "goal": inputs["question"]}]}
    plan = text.plan(question.relation, question.city, question.other)
    goals = plan[:2] if question.other is not None else plan  # the comparison itself needs no search
    chained = question.relation in text.COUNTRY_RELATIONS
    suspects = set((inputs["failed"] or {}).get("suspect_subtasks", ()))
    trusted = [k for k in inputs["known"] if k["supported"] and k["id"] not in suspects]
    settled = {_plain(k["goal"]): k["id"] for k in trusted}
    if inputs["failed"] and not suspects:
        settled = {}
    again = bool(inputs["known"])
    tasks: list[dict[str, Any]] = []
    previous: str | None = None
    for goal in goals:
        known = settled.get(goal) if not (chained and tasks) else None  # a redone first hop redoes the second
        if known is None:
            known = _new_id(inputs, len(tasks))
            needs = [previous] if chained and previous else []
            tasks.append({"id": known, "goal": _once_more(goal) if again else goal, "depends_on": needs})
        previous = known
    if not tasks:  # all is known: settle the last goal anew
        needs = [settled[goals[0]]] if chained else []
        tasks = [{"id": _new_id(inputs, 0), "goal": _once_more(goals[-1]), "depends_on": needs}]
    if wrong and len(tasks) > 1:
        if rng.random() < 0.5:
            tasks = tasks[:1]  # stops after the first hop
        else:
            tasks[0]["depends_on"] = [tasks[1]["id"]]
            tasks[1]["depends_on"] = [tasks[0]["id"]]
    return {"task_type": text.TASK_TYPES[question.relation], "subtasks": tasks}


def _new_id(inputs: dict[str, Any], offset: int) -> str:
    return f"s{len(inputs['known']) + offset + 1}"


def _once_more(goal: str) -> str:
    return f"{goal[:-1]} once more."


def _plain(goal: str) -> str:
    return goal.replace(" once more.", ".")


def _search(inputs: dict[str, Any], rng: random.Random, wrong: bool) -> dict[str, Any]:
    goal = _GOAL.match(inputs["goal"])
    if goal is None:
        return _unsupported("The goal asks for something that the passages don't speak of.")
    relation, entity = _RELATIONS[goal["name"]], goal["entity"]
    if entity == _THAT_COUNTRY:
        countries = [f for f in map(_read_finding, (g["finding"] for g in inputs["given"])) if f]
        if not countries:
            return _unsupported("It is not known which country is meant.")
        entity = countries[-1].value
    read = _read_passage(relation, entity, inputs["passages"])
    if read is None:
        made = [s["query"] for s in inputs["searches"]]
        plain = text.query(relation, entity)
        kind = "country" if relation in text.COUNTRY_RELATIONS else "city"
        tries = [plain, f"the {kind} of {entity}", entity]
        if wrong and not made:
            tries.insert(0, inputs["question"])  # the whole question as a query
        new = [query for query in tries if query not in made]
        if new and inputs["queries_left"]:
            return {"action": "search", "queries": new[:1]}
        return _unsupported(f"No passage states the {goal['name']} of {entity}.")
    passage, sentence = read
    if wrong:
        passage, sentence = _misread(relation, passage, sentence, inputs["passages"], rng)
    return {
        "action": "report",
        "finding": _sentence(_Fact(relation, entity, text.value(sentence))),
        "supported": True,
        "passage_ids": [passage["id"]],
    }


def _unsupported(finding: str) -> dict[str, Any]:
    return {"action": "report", "finding": finding, "supported": False, "passage_ids": []}


def _misread(
    relation: str, passage: dict[str, str], sentence: str, passages: Sequence[dict[str, str]], rng: random.Random
) -> tuple[dict[str, str], str]:
    """The same relation in the passage beside; where there is none, the right passage's sentence."""
    others = []
    for other in passages:
        beside = text.fact(relation, _title_and_body(other["contents"])[1])
        if beside is not None and other["id"] != passage["id"]:
            others.append((other, beside))
    return rng.choice(others) if others else (passage, sentence)


def _synthesize(inputs: dict[str, Any], rng: random.Random, wrong: bool) -> dict[str, Any]:
    if inputs["open_goals"]:
        return {"status": "continue", "answer": None}
    question = text.parse_question(inputs["question"])
    facts = [f for f in (_read_finding(f["finding"]) for f in inputs["findings"] if f["supported"]) if f]
    answer = _conclude(question, facts) if question else None
    if answer is None or answer in inputs["rejected_answers"]:
        return {"status": "search_more" if inputs["rounds_left"] else "no_answer", "answer": None}
    if wrong and question is not None:
        answer = _misput(question, facts, answer, rng)
    return {"status": "answer", "answer": answer}


def _conclude(question: text.ParsedQuestion, facts: Sequence[_Fact]) -> str | None:
    """What the facts, the latest first, say about the question; None if they don't settle it."""
    latest = {(f.relation, f.entity): f.value for f in facts}
    if question.other is not None:
        people = [latest.get(("population", city)) for city in (question.city, question.other)]
        counts = [int(p.replace(",", "")) if p and p.replace(",", "").isdigit() else None for p in people]
        if counts[0] is None or counts[1] is None:
            return None
        return question.city if counts[0] >= counts[1] else question.other
    if question.relation in text.CITY_RELATIONS:
        return latest.get((question.relation, question.city))
    country = latest.get(("country", question.city))
    return latest.get((question.relation, country)) if country else None


def _misput(question: text.ParsedQuestion, facts: Sequence[_Fact], answer: str, rng: random.Random) -> str:
    if question.other is not None:
        return question.other if answer == question.city else question.city
    hops = [f.value for f in facts if f.value != answer]
    if hops and rng.random() < 0.5:
        return hops[0]
    return f"The answer is {answer}."


def _repair(inputs: dict[str, Any], rng: random.Random, wrong: bool) -> dict[str, Any]:
    """Expression if the reference follows from the findings as they stand, else search."""
    question = text.parse_question(inputs["question"])
    wanted = {normalize_answer(answer) for answer in inputs["reference_answers"]}
    facts = [f for f in (_read_finding(f["finding"]) for f in inputs["findings"] if f["supported"]) if f]
    concluded = _conclude(question, facts) if question else None
    expression = concluded is not None and normalize_answer(concluded) in wanted
    if wrong:
        expression = not expression
    if expression:
        return {"kind": "expression", "suspect_subtasks": []}
    doubtful = [f["id"] for f in inputs["findings"] if not f["supported"]]
    return {"kind": "search", "suspect_subtasks": doubtful or [f["id"] for f in inputs["findings"]]}


def _protocolize(inputs: dict[str, Any], rng: random.Random, wrong: bool) -> dict[str, Any]:
    question = text.parse_question(inputs["question"])
    if question is None:
        plan, facts, task_type = ["Find out what the question asks."], [], "others"
    else:
        plan = text.plan(question.relation, question.city, question.other)
        facts = _quotes(question, inputs["passages"])
        task_type = text.TASK_TYPES[question.relation]
    draft: dict[str, Any] = {"task_type": task_type, "reasoning_plan": plan, "grounding_facts": facts}
    if inputs["variant"] == "succeeded":
        draft |= {"answer": inputs["answer"], "answer_grounded": bool(facts)}
    else:
        draft["partial_findings"] = _partial_findings(inputs["findings"])
    return _spoil(draft, rng) if wrong else draft


def _quotes(question: text.ParsedQuestion, passages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The sentences that the plan needs, in its order, as far as they were retrieved."""
    hops: list[tuple[str, str]]
    if question.other is not None:
        hops = [("population", question.city), ("population", question.other)]
    elif question.relation in text.CITY_RELATIONS:
        hops = [(question.relation, question.city)]
    else:
        hops = [("country", question.city)]
        first = _read_passage("country", question.city, passages)
        if first is not None:
            hops.append((question.relation, text.value(first[1])))
    read = [_read_passage(relation, entity, passages) for relation, entity in hops]
    return [{"passage_id": r[0]["id"], "text": r[1]} for r in read if r is not None]


def _partial_findings(findings: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for finding in findings:
        if finding["supported"]:
            found.append(f"Read, not verified: {finding['finding']}")
        else:
            found.append(f"Reliable evidence is missing: {finding['finding']}")
    return list(dict.fromkeys(found))[:12] or ["Nothing reliable was found."]


def _spoil(draft: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One of the faults that the gate is there for."""
    facts, plan = draft["grounding_facts"], list(draft["reasoning_plan"])
    faults = ["shape"]
    if facts:
        faults += ["paraphrase", "typo"]
    if "answer" in draft:
        faults += ["leak", "answer"]
    fault = rng.choice(faults)
    if fault == "shape":
        return {**draft, "reasoning_plan": " ".join(plan)}
    if fault == "leak":
        return {**draft, "reasoning_plan": [*plan[:-1], f"{plan[-1][:-1]}, which is {draft['answer']}."]}
    if fault == "answer":
        return {**draft, "answer": f"It is {draft['answer']}."}
    last = facts[-1]["text"]
    if fault == "paraphrase":
        changed = f"According to the corpus, {last[0].lower()}{last[1:]}"
    else:
        at = rng.randrange(len(last) - 1)
        changed = last[:at] + last[at + 1] + last[at] + last[at + 2 :] if last[at] != last[at + 1] else last[:-1] + "!"
    return {**draft, "grounding_facts": [*facts[:-1], {**facts[-1], "text": changed}]}


def _break(content: str, rng: random.Random) -> Reply:
    """Not one clean JSON object: some ways can be mended, some need a new ask."""
    kind = rng.randrange(6)
    if kind == 0:
        return Reply(f"Here is the result:\n```json\n{content}\n```\nLet me know if you need more.")
    if kind == 1:
        return Reply(content[:-1] + ",}")
    if kind == 2:
        return Reply(content[:-1])
    if kind == 3:
        return Reply(content[: max(1, len(content) * 2 // 3)], "length")
    if kind == 4:
        return Reply("I'm sorry, but I can't help with that.")
    return Reply("")
