"""The whole team against real servers: the rule-based teacher, the sidecar, and a teacher that means ill."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import Asked, HostileTeacher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.teacher_rules import RuleTeacher
from protocol_cache import validate_protocol
from protocol_cache.gate import grounding_problem
from protocol_cache.prompts import Prompts
from protocol_cache.synthesis.llm import Account, Teacher, TeacherConfig
from protocol_cache.synthesis.pipeline import Outcome, Team
from protocol_cache.synthesis.questions import read_questions
from protocol_cache.synthesis.repair import RepairAgent
from protocol_cache.synthesis.state import Gold, Limits, Question
from retrieval_server.client import RetrievalClient

pytestmark = pytest.mark.e2e


def solve(
    questions: list[tuple[Question, Gold]], teacher_url: str, retriever_url: str, limits: Limits | None = None
) -> list[tuple[Outcome, Account]]:
    async def run() -> list[tuple[Outcome, Account]]:
        config = TeacherConfig(model="openai/geonames-rules", api_base=teacher_url, retries=1, backoff=0.01)
        teacher = Teacher(config, Prompts())
        async with RetrievalClient(retriever_url) as retriever:
            team = Team(teacher, retriever, limits or Limits())
            accounts = [Account() for _ in questions]
            outcomes = await asyncio.gather(
                *(team.solve(q, g, a) for (q, g), a in zip(questions, accounts, strict=True))
            )
        await teacher.close()
        return list(zip(outcomes, accounts, strict=True))

    return asyncio.run(run())


def replies_of(rules: RuleTeacher) -> Callable[[Asked], str]:
    return lambda asked: rules.reply(asked.messages).content


def test_protocols_are_right_against_the_real_teacher_and_sidecar(
    world: Path, teacher_url: str, retriever_url: str
) -> None:
    questions = read_questions(world / "train.parquet")
    contents = {}
    for line in (world / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        contents[row["id"]] = row["contents"]
    solved = solve(questions, teacher_url, retriever_url)
    succeeded = 0
    for (question, gold), (outcome, account) in zip(questions, solved, strict=True):
        assert outcome.status in ("passed", "rejected", "failed")
        assert account.calls >= 3
        if outcome.protocol is None:
            assert outcome.reason
            continue
        validate_protocol(outcome.protocol)
        assert grounding_problem(outcome.protocol, contents) is None
        if outcome.protocol["variant"] != "succeeded":
            continue
        succeeded += 1
        parsed = text.parse_question(question.text)
        assert parsed
        assert gold.matches(outcome.protocol["answer"])
        assert outcome.protocol["reasoning_plan"] == text.plan(parsed.relation, parsed.city, parsed.other)
        facts = [fact["text"] for fact in outcome.protocol["grounding_facts"]]
        assert len(facts) == (1 if parsed.relation in text.CITY_RELATIONS else 2)
        if parsed.other is None:
            assert text.value(facts[-1]) == outcome.protocol["answer"]
    assert succeeded >= 0.8 * len(questions)
    refused = [c.failed_check for o, _ in solved for c in o.candidates if not c.passed]
    assert refused, "a teacher that errs one time in ten must give the gate work"
    events = [e["event"] for o, _ in solved for e in o.exploration.events]
    assert "repair" in events


def sealed(gold: str) -> tuple[Question, Gold]:
    asked = "What is the currency of the country where Tokyo lies?"
    return Question("q", asked, "geonames", "train"), Gold([gold])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="abcdefghijkl \"'{}\\é北\n", min_size=0, max_size=12), st.integers(0, 2))
def test_the_gold_answer_reaches_the_repair_agent_alone(retriever_url: str, tail: str, style: int) -> None:
    """The repair agent shouts it in every field it has, and the others repeat whatever they were told."""
    gold = f"Xyzzyquux{tail}"
    rules = RuleTeacher(error_rate=0.0, broken_json_rate=0.0)

    def respond(asked: Asked) -> str:
        if asked.role != "repair":
            return rules.reply(asked.messages).content
        known = [finding["id"] for finding in asked.inputs["findings"]]
        answer = asked.inputs["reference_answers"][0]
        if style == 0:
            return json.dumps({"kind": "search", "suspect_subtasks": [*known, answer], "advice": answer})
        if style == 1:
            return json.dumps({"kind": "expression", "suspect_subtasks": [answer], "answer": answer})
        return json.dumps({"kind": answer})

    with HostileTeacher(respond) as server:
        [(outcome, _)] = solve([sealed(gold)], server.url, retriever_url)
    seen = [asked for asked in server.asked if "xyzzyquux" in json.dumps(asked.messages).lower()]
    assert seen, "the repair agent must have seen it, or this test tests nothing"
    assert {asked.role for asked in seen} == {"repair"}
    kept = json.dumps([outcome.exploration.to_json(), outcome.reason, [c.__dict__ for c in outcome.candidates]])
    assert "xyzzyquux" not in kept.lower()
    assert outcome.protocol is not None and outcome.protocol["variant"] == "evidence"
    assert "xyzzyquux" not in json.dumps(outcome.protocol).lower()


def test_gold_cannot_be_had_by_others() -> None:
    gold = Gold(["Xyzzy"])
    assert "Xyzzy" not in repr(gold) and "Xyzzy" not in str(gold) and "Xyzzy" not in f"{gold!s:>30}"
    with pytest.raises(TypeError):
        pickle.dumps(gold)
    with pytest.raises(PermissionError):
        gold.reveal_to(object())  # type: ignore[arg-type]

    class Impostor(RepairAgent):  # type: ignore[misc]
        pass

    with pytest.raises(PermissionError):
        gold.reveal_to(Impostor(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        Gold([])
    with pytest.raises(ValueError):
        Gold(["a", " "])


def with_role(role: str, wrong: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    rules = replies_of(RuleTeacher(error_rate=0.0, broken_json_rate=0.0))
    return lambda asked: wrong(asked) if asked.role == role else rules(asked)


ROLES = ["orchestrator/decompose", "orchestrator/synthesize", "searcher", "protocolizer"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("reply", ["", "I'm sorry, I can't help.", "[]"])
def test_a_role_that_gives_nothing_fails_the_question_by_name(retriever_url: str, role: str, reply: str) -> None:
    with HostileTeacher(with_role(role, lambda asked: reply)) as server:
        [(outcome, account)] = solve([sealed("Yen")], server.url, retriever_url)
    assert outcome.status == "failed" and outcome.protocol is None
    assert role.replace("/", "_") in (outcome.reason or "")
    assert account.calls == len(server.asked) and server.roles().count(role) == 3


@pytest.mark.parametrize("reply", ["", '{"kind": 7}', "Sorry."])
def test_a_repair_agent_that_gives_nothing_leaves_an_evidence_protocol(retriever_url: str, reply: str) -> None:
    with HostileTeacher(with_role("repair", lambda asked: reply)) as server:
        [(outcome, _)] = solve([sealed("Dollar")], server.url, retriever_url)
    assert outcome.protocol is not None and outcome.protocol["variant"] == "evidence"
    assert "answer" not in outcome.protocol


@pytest.mark.parametrize(
    ("subtasks", "said"),
    [
        ([("a", ["b"]), ("b", ["a"])], "circle"),
        ([("a", ["z"])], "does not exist"),
        ([("a", []), ("a", [])], "twice"),
        ([(f"s{i}", []) for i in range(9)], "at most 4"),
    ],
)
def test_a_graph_that_cannot_run_is_asked_again_then_failed(
    retriever_url: str, subtasks: list[tuple[str, list[str]]], said: str
) -> None:
    reply = json.dumps(
        {"task_type": "others", "subtasks": [{"id": i, "goal": "Find.", "depends_on": d} for i, d in subtasks]}
    )
    with HostileTeacher(with_role("orchestrator/decompose", lambda asked: reply)) as server:
        [(outcome, _)] = solve([sealed("Yen")], server.url, retriever_url)
    assert outcome.status == "failed" and said in (outcome.reason or "")
    assert said in server.asked[1].messages[3]["content"]


def draft(asked: Asked, **changes: Any) -> str:
    good = json.loads(RuleTeacher(error_rate=0.0, broken_json_rate=0.0).reply(asked.messages[:2]).content)
    return json.dumps({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"reasoning_plan": ["Look up the Yen."]}, "leak"),
        ({"reasoning_plan": "Find it."}, "schema"),
        ({"variant": "succeeded"}, "schema"),
        ({"answer": "Yen, I think"}, "exact_match"),
        ({"grounding_facts": [{"passage_id": "country-JP", "text": "Its currency is the Yen."}]}, "grounding"),
        ({"grounding_facts": [{"passage_id": "country-XX", "text": "Its currency is Yen."}]}, "grounding"),
    ],
)
def test_what_the_gate_is_for_is_tried_twice_told_why_and_kept(
    retriever_url: str, changes: dict[str, Any], check: str
) -> None:
    with HostileTeacher(with_role("protocolizer", lambda asked: draft(asked, **changes))) as server:
        [(outcome, _)] = solve([sealed("Yen")], server.url, retriever_url)
    assert outcome.status == "rejected" and outcome.protocol is None
    assert [c.failed_check for c in outcome.candidates] == [check, check]
    asked = [a for a in server.asked if a.role == "protocolizer"]
    assert asked[0].inputs["previous"] is None and check in asked[1].inputs["previous"]["reason"]


def test_an_evidence_plan_that_leaks_is_not_told_so(retriever_url: str) -> None:
    """To say so would tell the protocolizer that its guess is the gold answer."""

    def respond(asked: Asked) -> str:
        if asked.role == "orchestrator/synthesize" and not asked.inputs["open_goals"]:
            return '{"status": "answer", "answer": "Dollar"}'
        if asked.role == "protocolizer":
            return draft(asked, reasoning_plan=["Is it perhaps the Yen?"])
        return replies_of(RuleTeacher(error_rate=0.0, broken_json_rate=0.0))(asked)

    with HostileTeacher(respond) as server:
        [(outcome, _)] = solve([sealed("Yen")], server.url, retriever_url)
    assert outcome.status == "rejected"
    assert [c.failed_check for c in outcome.candidates] == ["leak"]


def test_a_mended_draft_passes(retriever_url: str) -> None:
    def respond(asked: Asked) -> str:
        return draft(asked, **({} if asked.inputs["previous"] else {"reasoning_plan": []}))

    with HostileTeacher(with_role("protocolizer", respond)) as server:
        [(outcome, _)] = solve([sealed("Yen")], server.url, retriever_url)
    assert outcome.status == "passed" and [c.passed for c in outcome.candidates] == [False, True]


def test_limits_bound_what_a_greedy_team_can_spend(retriever_url: str) -> None:
    """Everyone always wants more: more queries, more rounds, more repairs."""
    count = iter(range(10_000))

    def respond(asked: Asked) -> str:
        n = next(count)
        if asked.role == "orchestrator/decompose":
            return json.dumps({"task_type": "others", "subtasks": [{"id": f"x{n}", "goal": "Find."}]})
        if asked.role == "searcher" and asked.inputs["queries_left"]:
            return json.dumps({"action": "search", "queries": [f"query {n} {i}" for i in range(9)]})
        if asked.role == "searcher":
            return json.dumps({"action": "report", "finding": "Nothing.", "supported": False, "passage_ids": []})
        if asked.role == "orchestrator/synthesize":
            return json.dumps({"status": "search_more" if asked.inputs["rounds_left"] else "no_answer"})
        if asked.role == "repair":
            return json.dumps({"kind": "search"})
        return json.dumps({})

    limits = Limits(rounds=2, queries=2, repairs=1, protocol_attempts=2)
    with HostileTeacher(respond) as server:
        [(outcome, _)] = solve([sealed("Yen")], server.url, retriever_url, limits)
    roles = server.roles()
    assert roles.count("orchestrator/decompose") == 4  # 2 rounds, twice
    assert roles.count("repair") == 1 and roles.count("protocolizer") == 2
    assert sum(e["event"] == "search" for e in outcome.exploration.events) == 8  # 2 queries of 4 searchers
    assert outcome.status == "rejected"


def test_a_retriever_that_is_gone_fails_the_question_and_is_no_evidence(teacher_url: str) -> None:
    [(outcome, _)] = solve([sealed("Yen")], teacher_url, "http://127.0.0.1:9")
    assert outcome.status == "failed" and "retriever" in (outcome.reason or "")
    assert not outcome.candidates
