"""Control caches: what they hold, and that a trainer joins them like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from protocol_samples import EVIDENCE, SUCCEEDED, record

from mapd_verl.data.join import join_protocols
from protocol_cache import ProtocolStore, validate_protocol
from protocol_cache.ablations import KINDS, ablate, trajectory
from protocol_cache.cli import main
from protocol_cache.synthesis.state import Exploration, Passage

ANSWERS = {"q1": "A", "q2": "B", "q3": "the a", "q4": "D"}


def exploration(answer: str) -> dict[str, Any]:
    log = Exploration(passages={"p1": Passage("p1", f'"Title of {answer}"\nText.')})
    log.note("decompose", task_type="others", levels=[[{"id": "s1", "goal": "Find it.", "depends_on": []}]])
    log.note("search", subtask="s1", query="it", passage_ids=["p1"])
    log.note("finding", subtask="s1", finding="It is so. " * 300, supported=True)
    log.note("synthesize", status="answer", answer=answer)
    log.note("check", answer=answer, matches=False)
    log.note("repair", kind="search", suspect_subtasks=["s1"])
    return log.to_json()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "protocols.sqlite"
    with ProtocolStore(path) as store:
        for qid, answer in ANSWERS.items():
            store.put(record(qid, {**SUCCEEDED, "answer": answer}), (), exploration(answer))
        store.put(record("ev", EVIDENCE), (), exploration("guess"))
        store.put(record("no"))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_cache_is_joined_like_any_other(
    cache: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "control.sqlite"
    assert main(["ablate", str(cache), "--kind", kind, "--out", str(out)]) == 0
    join = join_protocols(out, [*ANSWERS, "ev", "no"])
    assert join.counts["joined"] == (4 if kind == "answer_only" else 5)
    assert join.look_up("no").text == ""
    with ProtocolStore(out, readonly=True) as store, ProtocolStore(cache, readonly=True) as source:
        for qid, answer in ANSWERS.items():
            made, was = store.get(qid), source.get(qid)
            assert made and made.protocol and was and was.protocol and made.usage == was.usage
            validate_protocol(made.protocol)
            assert made.provenance.prompt_version.endswith(f"+{kind}")
            text = join.look_up(qid).text
            if kind == "answer_only":
                assert text == f"Task: multi_hop\nAnswer: {answer}"
            elif kind == "raw":
                assert made.protocol["variant"] == "raw" and made.protocol["answer"] == answer
                assert f"Title of {answer}" in text and "Plan" not in text and text.endswith(f"Answer: {answer}")
            else:
                theirs = made.protocol.get("answer")
                assert theirs is None or {theirs, answer} not in ({"A"}, {"B"}, {"D"}, {"A", "the a"}, {"the a"})
    assert main(["ablate", str(cache), "--kind", kind, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_shuffling_repeats_itself_and_needs_two(cache: Path, tmp_path: Path) -> None:
    with ProtocolStore(cache, readonly=True) as store:
        one, again = (list(ablate(store, "shuffled", 3)) for _ in range(2))
        assert one == again
        assert any(list(ablate(store, "shuffled", seed)) != one for seed in range(5))
    with ProtocolStore(tmp_path / "one.sqlite") as store:
        store.put(record("q", SUCCEEDED))
        with pytest.raises(ValueError, match="no other question"):
            list(ablate(store, "shuffled"))


def test_a_trajectory_tells_what_was_done_and_not_what_the_gold_answer_said_of_it() -> None:
    lines = trajectory(exploration("X"))
    assert lines[:2] == ["Sub-task s1: Find it.", "Search for s1: it (read: Title of X)"]
    assert lines[-1] == "Candidate answer: X" and all(len(line) <= 2000 for line in lines)
    assert not any("matches" in line or "repair" in line.lower() for line in lines)
