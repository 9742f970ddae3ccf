from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from protocol_samples import record

from protocol_cache import ProtocolStore, StoreError, Usage
from protocol_cache.store import Candidate


def test_what_goes_in_comes_out(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    candidates = [Candidate({"ü": 1}, False, "schema", "schema: x"), Candidate(succeeded, True)]
    log = {"events": [{"event": "search", "query": "北京"}]}
    stored = record("q1", succeeded)
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        store.put(stored, candidates, log)
        assert store.get("q1") == stored
        assert stored.variant == "succeeded"
        assert store.candidates("q1") == candidates
        assert store.log("q1") == log
        assert store.get("q2") is None and store.log("q2") is None and store.candidates("q2") == []
        assert "q1" in store and "q2" not in store and len(store) == 1


def test_a_new_record_replaces_the_old_one_whole(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        store.put(
            record("q"), [Candidate({}, False, "leak", "leak: x"), Candidate({}, False, "leak", "leak: y")], {"a": 1}
        )
        store.put(record("q", succeeded), [Candidate(succeeded, True)])
        assert len(store) == 1 and store.get("q").status == "passed"  # type: ignore[union-attr]
        assert len(store.candidates("q")) == 1
        assert store.log("q") is None


def test_many_at_once_and_in_order(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        for i in range(1100):
            store.put(record(f"q{i:04}", succeeded))
        found = store.get_many([f"q{i:04}" for i in range(0, 2000, 2)])
        assert sorted(found) == [f"q{i:04}" for i in range(0, 1100, 2)]
        assert [r.question_id for r in store] == [f"q{i:04}" for i in range(1100)]
        assert store.get_many([]) == {}


def test_stats(tmp_path: Path, succeeded: dict[str, Any], evidence: dict[str, Any]) -> None:
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        assert store.stats()["records"] == 0 and store.stats()["cost_usd"] is None
        store.put(record("a", succeeded), [Candidate({}, False, "leak", "leak: x"), Candidate(succeeded, True)])
        store.put(record("b", evidence, usage=Usage(1, 2, 3, None, 4.0)))
        store.put(record("c"), [Candidate({}, False, "schema", "schema: x")])
        store.put(record("d", status="failed", reason="teacher as searcher: empty"))
        stats = store.stats()
    assert stats["records"] == 4 and stats["calls"] == 10 and stats["prompt_tokens"] == 302
    assert stats["cost_usd"] == pytest.approx(0.75) and stats["records_without_cost"] == 1
    assert stats["status"] == {"passed": 2, "rejected": 1, "failed": 1}
    assert stats["variant"] == {"succeeded": 1, "evidence": 1}
    assert stats["candidates"] == 3 and stats["failed_checks"] == {"leak": 1, "schema": 1}
    assert stats["failures"] == {"teacher as searcher: empty": 1}
    assert stats["provenance"][0]["records"] == 4 and stats["provenance"][0]["calls"] == stats["calls"]


@pytest.mark.parametrize("bad", [{"status": "good"}, {"status": "passed"}])
def test_a_record_that_contradicts_itself_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        record("q", **bad)


def test_readonly_reads_beside_a_writer_and_never_writes(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    path = tmp_path / "p.sqlite"
    with ProtocolStore(path) as writer:
        writer.put(record("a", succeeded))
        with ProtocolStore(path, readonly=True) as reader:
            assert len(reader) == 1
            writer.put(record("b", succeeded))
            assert len(reader) == 2
            with pytest.raises(StoreError, match="readonly"):
                reader.put(record("c", succeeded))


def test_a_finished_store_is_one_file_that_a_readonly_folder_can_hold(succeeded: dict[str, Any]) -> None:
    # Read by a user who may not write there; root, which may write anywhere, becomes nobody.
    code = (
        "import os, sys\n"
        "from protocol_cache import ProtocolStore\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "with ProtocolStore(sys.argv[1], readonly=True) as store: print(len(store))"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "p ?#%.sqlite"
        with ProtocolStore(path) as store:
            store.put(record("a", succeeded))
        assert [p.name for p in folder.iterdir()] == [path.name]
        path.chmod(0o444)
        folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        folder.chmod(0o755)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"not a database at all, only text" * 40, "not an SQLite file"), (None, "not a protocol store")],
)
@pytest.mark.parametrize("readonly", [True, False])
def test_a_foreign_file_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes | None, said: str, readonly: bool
) -> None:
    path = tmp_path / "other.sqlite"
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
        db.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=said) as caught:
        ProtocolStore(path, readonly=readonly)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        ProtocolStore(tmp_path / "p.sqlite", readonly=True)
    with pytest.raises(StoreError, match="folder"):
        ProtocolStore(tmp_path / "none" / "p.sqlite")
    with pytest.raises(StoreError, match="cannot open"):
        ProtocolStore(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProtocolStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="format 99"):
        ProtocolStore(path)


def test_a_locked_store_is_named_as_locked(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    path = tmp_path / "p.sqlite"
    with ProtocolStore(path) as store:
        store.put(record("a", succeeded))
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with ProtocolStore(path, timeout=0.05) as second, pytest.raises(StoreError, match="another process holds it"):
            second.put(record("b", succeeded))
        holder.execute("ROLLBACK")
        holder.close()
        store.put(record("b", succeeded))


def test_a_full_disk_loses_nothing_and_is_named(tmp_path: Path, succeeded: dict[str, Any]) -> None:
    path = tmp_path / "p.sqlite"
    with ProtocolStore(path) as store:
        store._db.execute("PRAGMA max_page_count = 40")  # SQLite's own "database or disk is full"
        kept = 0
        with pytest.raises(StoreError, match="no space left on the disk"):
            for kept in range(1000):
                store.put(record(f"q{kept}", succeeded), log={"x": "y" * 500})
        assert kept > 5
        assert len(store) == kept and store.log(f"q{kept}") is None
        store._db.execute("PRAGMA max_page_count = 100000")
        store.put(record(f"q{kept}", succeeded))
    with ProtocolStore(path, readonly=True) as store:
        assert len(store) == kept + 1


def test_a_file_that_may_not_grow_loses_nothing_and_is_named(tmp_path: Path) -> None:
    """The operating system refuses the write (as a quota does)."""
    path = tmp_path / "p.sqlite"
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from protocol_samples import SUCCEEDED, record
from protocol_cache import ProtocolStore, StoreError
with ProtocolStore({str(path)!r}) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    try:
        for kept in range(1000):
            store.put(record(f"q{{kept}}", SUCCEEDED), log={{"x": "y" * 500}})
    except StoreError as error:
        print(kept, len(store), error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kept, held, *message = done.stdout.split()
    assert int(kept) == int(held) > 5, done.stderr
    assert "no space left on the disk" in " ".join(message)
    with ProtocolStore(path) as store:
        assert len(store) == int(kept)


WRITER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from protocol_samples import SUCCEEDED, record
from protocol_cache import ProtocolStore
from protocol_cache.store import Candidate
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with ProtocolStore(path) as store:
    known = store.statuses()
    for i in range(count):
        qid = f"{{name}}{{i:05}}"
        if qid not in known:
            store.put(record(qid, SUCCEEDED), [Candidate(SUCCEEDED, True)], {{"id": qid, "x": "y" * 800}})
            print(qid, flush=True)
"""


def test_sigkill_at_any_time_loses_no_record_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    rng = random.Random(0)
    written: set[str] = set()
    for round_ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), "k", "100000"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        written.add(process.stdout.readline().strip())  # it is at work
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        written.update(line for line in rest.split("\n")[:-1] if line)  # an unfinished last line isn't a promise
        with ProtocolStore(path, readonly=True) as store:
            found = {r.question_id: r for r in store}
            assert written <= set(found), f"round {round_}"
            for qid in found:
                assert store.log(qid)["id"] == qid
                assert len(store.candidates(qid)) == 1
            assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(written) > 12


def test_two_processes_share_a_store_that_neither_had_made(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "150"], stdout=subprocess.DEVNULL)
        for name in ("a", "b", "c")
    ]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    with ProtocolStore(path, readonly=True) as store:
        assert sorted(r.question_id for r in store) == sorted(f"{n}{i:05}" for n in "abc" for i in range(150))


def test_text_that_unicode_cannot_encode_is_kept(tmp_path: Path, evidence: dict[str, Any]) -> None:
    evidence["partial_findings"] = ["half a pair: \ud83d"]
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        store.put(record("q", evidence), log={"\udc00": json.loads('"\\ud800"')})
        assert store.get("q").protocol == evidence  # type: ignore[union-attr]
