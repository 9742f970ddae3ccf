"""Offline evaluation: the command on a real model, generator and sidecar, and its figures on a policy that knows."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from mapd_verl.agent.config import AgentConfig
from mapd_verl.data.rows import read_questions
from mapd_verl.errors import UserError
from mapd_verl.evaluation.offline import evaluate, load_model, main, privileged_contexts
from mapd_verl.evaluation.records import read_records, summarise, write_records
from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance, Record

CONFIG = AgentConfig(max_searches=2, max_turn_tokens=60, max_response_tokens=400)


def command(model, world, url, *more):
    return main(
        [
            "--model",
            str(model),
            "--data",
            str(world / "test.jsonl"),
            "--retriever",
            url,
            "--max-turn-tokens",
            "24",
            *more,
        ]
    )


def test_command(model_folder, world, sidecar, tmp_path, capsys):
    out = tmp_path / "runs" / "before.jsonl"
    assert command(model_folder, world, sidecar, "--temperature", "1", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^all +3 +0\.0 \[0\.0, 56\.1\]", printed, re.M) and "single_hop" in printed
    records = read_records(out)
    assert [r.question_id for r in records] == ["q0", "q1", "q2"]
    for r in records:
        assert 0 < r.policy_tokens <= r.response_tokens and r.policy_tokens <= 24 * r.turns
        assert r.valid_turns <= r.turns <= 4 and r.em == 0.0
    # The same seed gives the same episodes.
    assert command(model_folder, world, sidecar, "--temperature", "1", "--out", str(tmp_path / "again.jsonl")) == 0
    assert [r.segments for r in read_records(tmp_path / "again.jsonl")] == [r.segments for r in records]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["--model", "nowhere"], "nowhere: not a model folder"),
        (["--retriever", "http://127.0.0.1:9"], "retrieval service"),
        (["--retriever", "ftp://x"], "retriever_urls"),
        (["--privilege", "protocol"], "needs --protocols"),
        (["--privilege", "protocol", "--protocols", "nowhere.sqlite"], "nowhere.sqlite: no such file"),
        (["--limit", "0"], "--limit"),
        (["--max-response-tokens", "8"], "answer_reserve_tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model_folder, world, sidecar, capsys, arguments, said):
    given = {"--model": str(model_folder), "--data": str(world / "test.jsonl"), "--retriever": sidecar}
    given.update(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    assert main([word for pair in given.items() for word in pair]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mapd eval: error: ") and said in error


class Knowing:
    """A policy that searches for the city it is asked about and answers with the country it read; it answers
    one question wrongly on purpose, so that the figures are not all alike."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def __call__(self, prompt_ids, max_tokens, stop_token_ids=(), **_):
        from mapd_verl.cpu.generation import Generated

        text = self.tokenizer.decode(prompt_ids)
        city = re.search(r"the city of (\w+) lie\?", text).group(1)
        read = re.search(rf"The city of {city} lies in (\w+)\.", text.split("<information>")[-1])
        told = re.search(r"Answer: (\w+)", text)
        if told:
            say = f"<think> I am told.</think><answer> {told.group(1)}</answer>"
        elif "<information>" not in text:
            say = f"<think> Look.</think><search> country of {city}</search>"
        else:
            say = f"<answer> {'Nowhere' if city == 'Rome' else read.group(1)}</answer>"
        ids = self.tokenizer.encode(say, add_special_tokens=False)
        return Generated(ids, [-0.5] * len(ids), "stop")


def run(model_folder, world, url, privilege="none", contexts=None):
    from mapd_verl.agent.search import make_client

    tokenizer, _ = load_model(model_folder)
    questions = read_questions(world / "test.jsonl")

    async def go():
        config = AgentConfig(**{**vars(CONFIG), "retriever_urls": (url,), "retriever_attempts": 1})
        async with make_client(config) as client:
            return await evaluate(
                questions, Knowing(tokenizer), client.search, tokenizer, config, {}, contexts, privilege
            )

    return asyncio.run(go())


def test_figures(model_folder, world, sidecar):
    records = run(model_folder, world, sidecar)
    overall, comparison, single = summarise(records)
    assert (overall.em.mean, overall.em.n, comparison.em.mean, single.em.mean) == (pytest.approx(2 / 3), 3, 0.0, 1.0)
    assert (overall.searches, overall.answered, overall.valid_turns, overall.excluded) == (1.0, 1.0, 1.0, 0)
    first = records[0]
    assert (first.prediction, first.em, first.f1, first.searches, first.turns) == ("France", 1.0, 1.0, 1, 2)
    assert 'Doc 1(Title: "Paris")' in first.segments[1]["text"] and first.segments[1]["role"] == "observation"
    assert first.response_tokens > first.policy_tokens > 0


def test_outage_is_excluded_not_wrong(model_folder, world):
    records = run(model_folder, world, "http://127.0.0.1:9")
    assert {r.status for r in records} == {"retrieval_failed"} and {r.em for r in records} == {None}
    overall = summarise(records)[0]
    assert (overall.em.n, overall.excluded) == (0, 3)


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "protocols.sqlite"
    with ProtocolStore(path) as store:
        for qid, answer in (("q0", "France"), ("q1", "Norway")):
            protocol = {
                "schema_version": SCHEMA_VERSION,
                "variant": "succeeded",
                "task_type": "single_hop",
                "reasoning_plan": ["Find the country."],
                "grounding_facts": [{"passage_id": "p", "text": "x", "start": 0, "end": 1}],
                "answer": answer,
                "answer_grounded": True,
            }
            store.put(
                Record(qid, "q?", "geonames", "test", "passed", Provenance("m", "1", "h", SCHEMA_VERSION), protocol)
            )
    return path


def test_privileges(model_folder, world, sidecar, cache):
    questions = read_questions(world / "test.jsonl")
    own = privileged_contexts(questions, "protocol", cache)
    assert own[0].endswith("Answer: France") and own[1].endswith("Answer: Norway") and own[2] == ""
    shuffled = privileged_contexts(questions, "shuffled", cache)
    assert all(a != b for a, b in zip(own[:2], shuffled[:2], strict=True)) and shuffled[2] in own[:2]
    assert privileged_contexts(questions, "answer_only", None) == ["Answer: France", "Answer: Norway", "Answer: Italy"]
    records = run(model_folder, world, sidecar, "protocol", own)
    assert [r.prediction for r in records] == ["France", "Norway", "Nowhere"]
    assert [r.privilege for r in records] == ["protocol", "protocol", "none"] and records[0].context == own[0]
    wrong = run(model_folder, world, sidecar, "shuffled", shuffled)
    assert sum(r.em for r in wrong) == 0


def test_records_come_back_as_they_were(model_folder, world, sidecar, tmp_path):
    records = run(model_folder, world, sidecar)
    write_records(tmp_path / "r.jsonl", records)
    assert read_records(tmp_path / "r.jsonl") == records
    (tmp_path / "r.jsonl").write_text(json.dumps({"question_id": "q"}) + "\n")
    with pytest.raises(UserError, match=r"r\.jsonl: line 1: not an evaluation record"):
        read_records(tmp_path / "r.jsonl")
    assert not list(tmp_path.glob(".*"))
