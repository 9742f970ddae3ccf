"""The join by question id: states, policies, laziness."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.data.join import POLICIES, STATES, Budget, JoinPolicies, corpus_hash, join_protocols
from mapd_verl.errors import UserError
from mapd_verl.metrics import protocol_states
from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance, Record
from protocol_cache.reviews import Review, protocol_digest, put_reviews

CORPUS = "c" * 64
ALL = JoinPolicies("fallback", "fallback", "fallback", "fallback", CORPUS)
TEXT = "Task: single_hop\nPlan: 1. Find the country of {0}.\nFacts: {0} lies in France.\nAnswer: France"


def protocol(city: str) -> dict:
    fact = {"passage_id": "city-1", "text": f"{city} lies in France.", "start": 8, "end": 8 + len(city) + 16}
    return {
        "schema_version": SCHEMA_VERSION,
        "variant": "succeeded",
        "task_type": "single_hop",
        "reasoning_plan": [f"Find the country of {city}."],
        "grounding_facts": [fact],
        "answer": "France",
        "answer_grounded": True,
    }


def record(qid: str, status: str = "passed", version: str = SCHEMA_VERSION, corpus: str = CORPUS) -> Record:
    return Record(
        qid,
        f"In which country does {qid} lie?",
        "geonames",
        "train",
        status,
        Provenance("rules", "1", corpus, version),
        protocol=protocol(qid) if status == "passed" else None,
        reason=None if status == "passed" else "leak: step 1",
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """One question in every state; its id is the state's name."""
    path = tmp_path / "protocols.sqlite"
    with ProtocolStore(path) as store:
        for qid in ("joined", "withdrawn", "reviewed_bad", "praised"):
            store.put(record(qid))
        store.put(record("failed", "failed"))
        store.put(record("rejected", "rejected", corpus="other"))
        store.put(record("stale_schema", version="0"))
        store.put(record("stale_corpus", corpus="other"))
    marks = {"withdrawn": "withdrawn", "reviewed_bad": "bad", "praised": "good"}
    put_reviews(path, [Review(qid, protocol_digest(protocol(qid)), verdict) for qid, verdict in marks.items()])
    return path


def test_every_state_is_told_apart(cache: Path) -> None:
    join = join_protocols(cache, [*STATES, "joined"], policies=ALL)
    assert join.states == {state: state for state in STATES}
    assert join.counts == dict.fromkeys(STATES, 1)
    assert dict(join.texts) == {"joined": TEXT.format("joined")}
    assert str(join).startswith("1 of 8 questions have a protocol (1 missing, 1 failed, 1 rejected, 1 withdrawn, ")
    assert join.look_up("joined").task_type == "single_hop" and join.look_up("missing").state == "missing"
    assert join_protocols(cache, ["praised"], policies=ALL).counts["joined"] == 1


@pytest.mark.parametrize("state", [s for s, policy in STATES.items() if policy])
@pytest.mark.parametrize("action", POLICIES)
def test_each_policy_decides_on_its_states_only(cache: Path, state: str, action: str) -> None:
    key = STATES[state]
    assert key
    policies = JoinPolicies(**{**ALL.__dict__, key: action})
    mine = [s for s, policy in STATES.items() if policy == key]
    if action == "error":
        with pytest.raises(
            UserError, match=f"1 questions are {state}.*mapd.protocols.{key}=error; the first is {state}"
        ):
            join_protocols(cache, list(STATES), policies=policies)
        return
    join = join_protocols(cache, list(STATES), policies=policies)
    assert {s for s in STATES if join.action(s) == action} >= set(mine)
    assert join.action("joined") == "use"
    if action == "skip":
        assert join.actions() == {"use": 1, "fallback": 7 - len(mine), "skip": len(mine), "error": 0}


def test_keep_uses_what_was_marked_bad(cache: Path) -> None:
    keep = JoinPolicies("fallback", "fallback", "fallback", "keep", CORPUS)
    join = join_protocols(cache, list(STATES), policies=keep)
    assert set(join.texts) == {"joined", "reviewed_bad"} and join.states["reviewed_bad"] == "reviewed_bad"


def test_no_corpus_named_compares_none(cache: Path) -> None:
    join = join_protocols(cache, ["stale_corpus"], policies=JoinPolicies(stale="error"))
    assert join.counts["joined"] == 1


def test_the_default_stops_at_another_schema(cache: Path) -> None:
    with pytest.raises(UserError, match=r"stale_schema \(protocol schema '0', this version reads '1'\)"):
        join_protocols(cache, list(STATES))


def test_a_protocol_made_anew_is_no_longer_reviewed(cache: Path) -> None:
    changed = record("reviewed_bad")
    changed.protocol["reasoning_plan"] = ["Look it up."]  # type: ignore[index]
    with ProtocolStore(cache) as store:
        store.put(changed)
    assert join_protocols(cache, ["reviewed_bad"], policies=ALL).states == {"reviewed_bad": "joined"}


def test_what_cannot_be_read_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        join_protocols(tmp_path / "none.sqlite", ["q0"])
    with pytest.raises(UserError, match="unknown"):
        join_protocols(cache, ["joined"], "fancy")
    template = tmp_path / "mine.j2"
    template.write_text("{{ colour }}")
    with pytest.raises(UserError, match="colour"):
        join_protocols(cache, ["joined"], str(template))
    join = join_protocols(cache, ["joined"])
    with ProtocolStore(cache) as store:
        store.put(record("joined", "rejected"))
    with pytest.raises(UserError, match="joined had a protocol at the start and has none now"):
        join.look_up("joined")


def test_a_join_crosses_processes(cache: Path) -> None:
    join = join_protocols(cache, ["joined", "missing"])
    assert join.look_up("joined").text == TEXT.format("joined")  # this process's handle stays behind
    copy = pickle.loads(pickle.dumps(join))
    assert copy == join and copy.texts["joined"] == TEXT.format("joined")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(join.look_up, ("joined",)).text == TEXT.format("joined")


def test_where_a_corpus_hash_comes_from(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"passages")
    assert corpus_hash(None) is None
    assert corpus_hash(str(corpus)) == hashlib.sha256(b"passages").hexdigest()
    assert corpus_hash("sha256:" + "AB" * 32) == "ab" * 32
    for bad in ("sha256:12", "sha256:" + "x" * 64, str(tmp_path)):
        with pytest.raises(UserError, match="corpus"):
            corpus_hash(bad)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(STATES))), max_size=30))
def test_a_steps_states_count_questions_not_rollouts(drawn: list[tuple[int, str]]) -> None:
    state_of = dict(drawn)  # a question has one state
    groups = [str(g) for g, _ in drawn]
    shown = protocol_states(groups, [state_of[g] for g, _ in drawn], None)
    assert set(shown) == {f"mapd/protocols/{state}" for state in STATES}
    assert sum(shown.values()) == len(state_of)
    for state in STATES:
        assert shown[f"mapd/protocols/{state}"] == list(state_of.values()).count(state)


@pytest.mark.e2e
def test_170_000_questions_in_two_seconds_and_300_mb() -> None:
    """The benchmark as it is quoted, in a process of its own; the time has slack for a machine with other work."""
    script = Path(__file__).parents[3] / "benchmarks/protocols_join.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    figures = json.loads(done.stdout)
    assert figures["questions"] == 170_000 and figures["counts"]["joined"] == 169_830
    assert figures["peak_mb"] < 300 and figures["total_s"] < 4.0, done.stdout


def test_a_budget_drops_parts_and_never_cuts_one(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    join = join_protocols(cache, ["joined"], policies=ALL)
    whole = TEXT.format("joined")
    words = Budget(len(whole.split()), lambda text: len(text.split()))
    assert join.look_up("joined", words).text == whole
    shorter = join.look_up("joined", Budget(words.tokens - 1, words.count)).text
    assert shorter == "\n".join(line for line in whole.split("\n") if not line.startswith("Facts"))
    assert join.look_up("joined", Budget(1, words.count)).text == "" and "joined" in caplog.text
