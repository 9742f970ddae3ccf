"""``verify`` finds what was altered after the gate had passed it."""

from __future__ import annotations

import copy
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance, Record, question_id
from protocol_cache.cli import main
from protocol_cache.exchange.verify import verify
from protocol_cache.gate import judge
from protocol_cache.store import Candidate
from protocol_cache.synthesis.state import Gold

PASSAGES = {
    "city-1": '"X"\nThe city of X lies in Y. Its time zone is T.',
    "country-Y": '"Y"\nThe country of Y lies in Europe. Its currency is Zed.',
}
QUESTION = "What is the currency of the country where X lies?"
DRAFT: dict[str, Any] = {
    "task_type": "multi_hop",
    "reasoning_plan": ["Find the country of X.", "Find the currency of that country."],
    "grounding_facts": [
        {"passage_id": "city-1", "text": "The city of X lies in Y."},
        {"passage_id": "country-Y", "text": "Its currency is Zed."},
    ],
    "answer": "Zed",
    "answer_grounded": True,
}
QID = question_id(QUESTION, "nq", "train")


def write(path: Path, change: Any = None, qid: str = QID, log: bool = True, **changes: Any) -> Path:
    protocol = judge(copy.deepcopy(DRAFT), "succeeded", QUESTION, PASSAGES, Gold(["Zed"])).protocol
    assert protocol
    if change:
        change(protocol)
    origin = Provenance("m", "v1", "hash", changes.pop("version", SCHEMA_VERSION))
    kept = {"passages": [{"id": i, "contents": text} for i, text in PASSAGES.items()]} if log else None
    with ProtocolStore(path) as store:
        verdict = Candidate(protocol, changes.pop("candidate_passed", True), "leak", "leak")
        store.put(Record(qid, QUESTION, "nq", "train", "passed", origin, protocol), [verdict], kept)
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    row = {
        "question": QUESTION,
        "data_source": "nq",
        "extra_info": {"split": "train"},
        "reward_model": {"ground_truth": {"target": ["Zed"]}},
    }
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_an_untouched_cache_has_no_problem(tmp_path: Path, questions: Path) -> None:
    found = verify(write(tmp_path / "p.sqlite"), questions=questions)
    assert found.problems == [] and found.records == found.protocols == 1
    assert found.checked == {"schema": 1, "grounding": 1, "exact_match": 1, "leak": 1}


def altered(protocol: dict[str, Any]) -> None:
    fact = protocol["grounding_facts"][1]
    fact["text"] = fact["text"].replace("Zed", "Zad")


@pytest.mark.parametrize(
    ("change", "check", "reason"),
    [
        (altered, "grounding", "fact 2"),
        (lambda p: p["grounding_facts"][0].update(start=2, end=26), "grounding", "fact 1"),
        (lambda p: p["grounding_facts"][0].update(passage_id="city-9"), "grounding", "city-9"),
        (lambda p: p["reasoning_plan"].append("Answer ZED!"), "leak", "plan step 3"),
        (lambda p: p.update(answer="Zad"), "exact_match", "not the verified one"),
        (lambda p: p.update(colour="red"), "schema", "colour"),
        (lambda p: p.pop("task_type"), "schema", "task_type"),
    ],
)
def test_what_was_altered_is_found(tmp_path: Path, questions: Path, change: Any, check: str, reason: str) -> None:
    (problem,) = verify(write(tmp_path / "p.sqlite", change), questions=questions).problems
    assert problem[:2] == (QID, check) and reason in problem[2]


def test_a_leak_of_the_protocols_own_answer_needs_no_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite", lambda p: p["reasoning_plan"].append("It is the Zed."))
    assert verify(path).by_check() == {"leak": 1}


def test_ids_verdicts_and_versions_are_compared(tmp_path: Path) -> None:
    assert verify(write(tmp_path / "1.sqlite", qid="0" * 32)).by_check() == {"question_id": 1}
    assert verify(write(tmp_path / "2.sqlite", qid="theirs-17")).problems == [], "an id of the data set's own"
    assert verify(write(tmp_path / "3.sqlite", candidate_passed=False)).by_check() == {"status": 1}
    assert verify(write(tmp_path / "4.sqlite", version="0")).by_check() == {"schema": 1}


def test_facts_are_checked_against_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = write(tmp_path / "p.sqlite", log=False)
    assert verify(cache).checked["grounding"] == 0
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in PASSAGES.items()))
    assert verify(cache, corpus).problems == [] and verify(cache, corpus).checked["grounding"] == 1
    assert main(["verify", str(cache), "--corpus", str(corpus)]) == 0
    corpus.write_text(corpus.read_text().replace("Zed", "Zad"))
    assert main(["verify", str(cache), "--corpus", str(corpus)]) == 1
    assert f"{QID}: grounding: fact 2" in capsys.readouterr().out
    corpus.write_text("[]\n")
    assert main(["verify", str(cache), "--corpus", str(corpus)]) == 2
    assert "line 1: want a JSON object with id and contents" in capsys.readouterr().err


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite")
    db = sqlite3.connect(path)
    with db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute("INSERT INTO candidates VALUES ('gone', 1, '{}', 0, 'leak', 'leak')")
    db.close()
    (problem,) = verify(path).problems
    assert problem[:2] == ("", "file") and "candidates" in problem[2]
