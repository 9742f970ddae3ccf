"""The command: bad input in one line, resuming after Ctrl-C and SIGKILL, and what is shown."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile import HostileTeacher
from protocol_samples import record

from protocol_cache import ProtocolStore, Record
from protocol_cache.cli import main
from protocol_cache.store import Candidate

ROW: dict[str, Any] = {
    "question": "What is the time zone of Tokyo?",
    "data_source": "geonames",
    "extra_info": {"split": "train"},
    "reward_model": {"ground_truth": {"target": ["Asia/Tokyo"]}},
}


def rows_file(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def synthesize(folder: Path, questions: Any, *more: str, retriever: str = "http://127.0.0.1:9") -> int:
    base = ["synthesize", "--questions", str(questions), "--out", str(folder / "out.sqlite"), "--model", "openai/m"]
    return main([*base, "--retriever", retriever, "--api-base", "http://127.0.0.1:9/v1", *more])


def one_line(capsys: pytest.CaptureFixture[str], code: int, *said: str) -> None:
    assert code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(error) == 1, error
    for text in said:
        assert text in error[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": " "}, "question: want text"),
        ({"question": 5}, "question: want text"),
        ({"data_source": None}, "data_source"),
        ({"extra_info": {}}, "extra_info.split"),
        ({"extra_info": None}, "extra_info.split"),
        ({"reward_model": None}, "no gold answers"),
        ({"reward_model": {"ground_truth": {"target": []}}}, "no gold answer"),
        ({"reward_model": {"ground_truth": {"target": [None]}}}, "None"),
        ({"reward_model": {"ground_truth": {"target": ["..."]}}}, "no letter or digit"),
        ({"question": "???"}, "blank"),
        ({"question_id": 7}, "question_id"),
    ],
)
def test_a_malformed_row_is_named_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    path = rows_file(tmp_path, [ROW, {**ROW, **change}])
    one_line(capsys, synthesize(tmp_path, path), "rows.jsonl: row 2", said)
    assert not (tmp_path / "out.sqlite").exists()


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no such file"), ("", "no rows"), ("{broken\n", "line 1"), ("[1]\n", "line 1")]
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    one_line(capsys, synthesize(tmp_path, path), "rows.jsonl", said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "many"], "--concurrency"),
        (["--timeout", "-1"], "--timeout"),
        (["--prompts", "v99"], "prompts v99"),
        (["--corpus", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--colour"], "--colour"),
        (["--retriever", "not a url"], "--retriever"),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    one_line(capsys, synthesize(tmp_path, rows_file(tmp_path, [ROW]), *more), said)


def test_a_retriever_that_is_down_is_named_before_any_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_line(capsys, synthesize(tmp_path, rows_file(tmp_path, [ROW])), "retriever", "127.0.0.1:9")


def test_a_teacher_that_is_down_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], retriever_url: str
) -> None:
    code = synthesize(tmp_path, rows_file(tmp_path, [ROW]), retriever=retriever_url)
    one_line(capsys, code, "teacher http://127.0.0.1:9/v1")


def test_a_store_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.sqlite").write_text("something else, and long enough to be looked at" * 40)
    one_line(capsys, synthesize(tmp_path, rows_file(tmp_path, [ROW])), "out.sqlite", "not an SQLite file")


def test_stats_and_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], succeeded: dict[str, Any], evidence: dict[str, Any]
) -> None:
    path = str(tmp_path / "p.sqlite")
    with ProtocolStore(path) as store:
        refused = Candidate({}, False, "leak", "leak: plan step 1 names the answer")
        store.put(record("aa1", succeeded), [refused, Candidate(succeeded, True)], {"events": ["x"]})
        store.put(record("ab2", evidence), [Candidate(evidence, True)])
        store.put(record("ac3"), [refused])
    assert main(["stats", path]) == 0
    shown = capsys.readouterr().out
    for text in ("2 passed", "1 rejected", "1 succeeded", "1 evidence", "2 leak", "$0.75", "openai/m", "v1-abc"):
        assert text in shown
    assert main(["stats", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 3
    assert main(["show", path, "aa", "--template", "compact", "--log"]) == 0
    shown = capsys.readouterr().out
    for text in ("Plan: 1. Find the country of X.", "candidate 1: leak", "candidate 2: passed", '"events"'):
        assert text in shown
    assert main(["show", path, "ac3"]) == 0
    assert "no protocol: leak" in capsys.readouterr().out
    one_line(capsys, main(["show", path, "a"]), "3 questions")
    one_line(capsys, main(["show", path, "zz"]), "0 questions")
    one_line(capsys, main(["show", path, "aa", "--template", "nope"]), "nope")
    one_line(capsys, main(["stats", str(tmp_path / "none.sqlite")]), "none.sqlite", "no such file")


def command(world: Path, out: Path, teacher: str, retriever: str, *more: str) -> list[str]:
    base = [sys.executable, "-m", "protocol_cache", "synthesize", "--questions", str(world / "train.parquet")]
    base += ["--out", str(out), "--retriever", retriever, "--model", "openai/geonames-rules", "--api-base", teacher]
    return [*base, "--corpus", str(world / "corpus.jsonl"), "--concurrency", "4", *more]


def wait_for_records(process: subprocess.Popen[str], out: Path, count: int) -> None:
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if out.exists() and out.stat().st_size:
            with ProtocolStore(out, readonly=True) as store:
                if len(store) >= count:
                    return
        time.sleep(0.05)
    raise AssertionError(f"no {count} records: {process.communicate()}")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_goes_on_where_it_stopped(
    world: Path, teacher_url: str, retriever_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "p.sqlite"
    run = command(world, out, teacher_url, retriever_url)
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_records(process, out, 5)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert "are kept" in said and "Traceback" not in said, said
    with ProtocolStore(out, readonly=True) as store:
        before = {r.question_id: r for r in store}
    assert 5 <= len(before) < 60
    again = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    with ProtocolStore(out, readonly=True) as store:
        after = {r.question_id: r for r in store}
    assert len(after) == 60
    kept = {qid: r for qid, r in before.items() if r.status != "failed"}
    assert {qid: after[qid] for qid in kept} == kept, "a finished question is never done again"
    assert f"{len(kept)} were finished already" in again.stdout
    third = subprocess.run(run, capture_output=True, text=True, timeout=300)
    if not any(r.status == "failed" for r in after.values()):
        assert third.returncode == 0 and "nothing to do" in third.stdout


@pytest.mark.e2e
def test_records_of_another_corpus_are_made_anew(
    world: Path, teacher_url: str, retriever_url: str, tmp_path: Path
) -> None:
    out = tmp_path / "p.sqlite"
    run = command(world, out, teacher_url, retriever_url, "--limit", "3")
    assert subprocess.run(run, timeout=300).returncode == 0
    other = tmp_path / "other.jsonl"
    other.write_text((world / "corpus.jsonl").read_text(encoding="utf-8") + "\n", encoding="utf-8")
    run[run.index("--corpus") + 1] = str(other)
    again = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "3 records are of another corpus" in again.stderr
    with ProtocolStore(out, readonly=True) as store:
        assert len({r.provenance.corpus_hash for r in store}) == len(list(store.stats()["provenance"])) == 1
        records: list[Record] = list(store)
    assert all(re.fullmatch(r"[0-9a-f]{64}", r.provenance.corpus_hash) for r in records)
    assert all(r.usage.calls >= 3 and r.usage.cost_usd is None for r in records)


@pytest.mark.e2e
def test_a_teacher_of_garbage_stops_a_long_run_and_names_the_reason(
    world: Path, retriever_url: str, tmp_path: Path
) -> None:
    with HostileTeacher(lambda asked: "I'd rather not.") as server:
        run = command(world, tmp_path / "p.sqlite", server.url, retriever_url)
        done = subprocess.run(run, capture_output=True, text=True, timeout=300)
        asked = len(server.asked)
    assert done.returncode == 2
    assert "20 questions in a row failed" in done.stderr and "no JSON object" in done.stderr
    assert "Traceback" not in done.stderr
    assert asked < 3 * 30, "the other questions were not paid for"


@pytest.mark.e2e
def test_a_wrong_key_stops_the_run_at_the_first_question(world: Path, retriever_url: str, tmp_path: Path) -> None:
    with HostileTeacher(lambda asked: (401, b'{"error": {"message": "bad key"}}')) as server:
        run = command(world, tmp_path / "p.sqlite", server.url, retriever_url)
        done = subprocess.run(run, capture_output=True, text=True, timeout=300)
        assert len(server.asked) <= 4
    assert done.returncode == 2 and "bad key" in done.stderr and "Traceback" not in done.stderr
