"""Export, import, merge and diff on real files."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_samples import EVIDENCE, SUCCEEDED, record

from mapd_verl.errors import UserError
from protocol_cache import ProtocolStore, Provenance, Record, Usage
from protocol_cache.cli import main
from protocol_cache.exchange.compare import diff
from protocol_cache.exchange.entry import entries
from protocol_cache.exchange.transfer import export_cache, import_file, merge, read_card
from protocol_cache.reviews import Review, protocol_digest, put_reviews, read_reviews
from protocol_cache.store import Candidate

FORMATS = (".jsonl", ".parquet")
LOG = {"passages": [{"id": "city-1", "contents": "<b>&\u2028\ud800"}], "events": []}


def make(path: Path, *records: Record, log: Any = LOG) -> Path:
    with ProtocolStore(path) as store:
        for r in records:
            verdicts = [Candidate({"x": "\ud800"}, False, "leak", "leak: plan step 1"), Candidate(r.protocol, True)]
            store.put(r, verdicts[: 1 + (r.protocol is not None)], log)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = make(tmp_path / "a.sqlite", record("q1", SUCCEEDED), record("q2", EVIDENCE), record("q3"))
    put_reviews(path, [Review("q1", protocol_digest(SUCCEEDED), "bad", "wrong\ncity\ud800", 5.25)])
    return path


text = st.text(st.characters(exclude_categories=()), max_size=12)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def caches(draw: st.DrawFn) -> list[tuple[Record, list[Candidate], Any, Review | None]]:
    plain = st.text(max_size=12)
    found = []
    for qid in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=4)):
        protocol = None
        status = draw(st.sampled_from(["passed", "rejected", "failed"]))
        if status == "passed":
            protocol = {**draw(st.sampled_from([SUCCEEDED, EVIDENCE]))}
            protocol["reasoning_plan"] = [draw(st.text(st.characters(exclude_categories=()), min_size=1)) + "plan"]
        usage = Usage(
            draw(st.integers(0, 2**62)),
            draw(st.integers(0, 2**62)),
            draw(st.integers(0, 2**62)),
            draw(st.none() | st.floats(0, 1e6)),
            draw(st.floats(0, 1e9)),
        )
        r = Record(
            qid,
            draw(text),
            draw(plain),
            draw(plain),
            status,
            Provenance(draw(plain), draw(plain), draw(plain), "1"),
            protocol,
            None if protocol else draw(text),
            usage,
            draw(st.floats(0, 1e12)),
        )
        verdict = st.builds(Candidate, json_value, st.just(False), st.none() | plain, st.none() | text)
        review = None
        if protocol and draw(st.booleans()):
            mark = draw(st.sampled_from(["good", "bad", "withdrawn"]))
            review = Review(qid, protocol_digest(protocol), mark, draw(text), draw(st.floats(0, 1e12)))
        found.append((r, draw(st.lists(verdict, max_size=2)), draw(json_value), review))
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(caches())
def test_a_cache_comes_back_exactly(drawn: list[tuple[Record, list[Candidate], Any, Review | None]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProtocolStore(folder / "a.sqlite") as store:
            store._db.execute("PRAGMA synchronous = OFF")
            for r, candidates, log, _ in drawn:
                store.put(r, candidates, log)
        put_reviews(folder / "a.sqlite", [review for *_, review in drawn if review])
        before = list(entries(folder / "a.sqlite"))
        assert len(before) == len(drawn)
        cards = []
        for i, ending in enumerate(FORMATS):
            out = folder / f"x{ending}"
            cards.append(export_cache(folder / "a.sqlite", out))
            assert read_card(out) == cards[-1]
            import_file(out, folder / f"{i}.sqlite")
            assert list(entries(folder / f"{i}.sqlite")) == before
            assert diff(folder / "a.sqlite", folder / f"{i}.sqlite").same
        assert cards[0] == cards[1]
        assert cards[0]["reviews"] == read_card(folder / "1.sqlite")["reviews"]


@pytest.mark.parametrize("ending", FORMATS)
def test_the_same_cache_gives_the_same_bytes(cache: Path, tmp_path: Path, ending: str) -> None:
    one, other = tmp_path / f"1{ending}", tmp_path / f"2{ending}"
    export_cache(cache, one)
    import_file(one, tmp_path / "b.sqlite")
    export_cache(tmp_path / "b.sqlite", other)
    assert one.read_bytes() == other.read_bytes()


def test_the_card_says_what_is_inside(cache: Path) -> None:
    card = read_card(cache)
    assert card["records"] == card["with_log"] == 3
    assert card["schema_versions"] == {"1": 3} and card["teachers"] == {"openai/m": 3}
    assert card["prompt_versions"] == {"v1-abc": 3} and card["corpus_hashes"] == {"hash": 3}
    assert card["status"] == {"passed": 2, "rejected": 1} and card["variants"] == {"evidence": 1, "succeeded": 1}
    assert card["gate"] == {"candidates": 5, "passed": 2, "failed_checks": {"leak": 3}}
    assert card["cost"]["usd"] == 0.75 and card["cost"]["calls"] == 9 and card["reviews"] == {"bad": 1}


def test_older_readers_can_read_the_parquet(cache: Path, tmp_path: Path) -> None:
    export_cache(cache, tmp_path / "x.parquet")
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert file.metadata.format_version == "1.0" and b"ARROW:schema" not in (file.metadata.metadata or {})
    assert {str(field.type) for field in file.schema_arrow} <= {"string", "int64", "double"}
    assert {file.schema.column(i).physical_type for i in range(len(file.schema))} <= {"BYTE_ARRAY", "INT64", "DOUBLE"}
    rows = file.read().to_pylist()
    assert [row["task_type"] for row in rows] == ["multi_hop", "multi_hop", None]
    assert json.loads(rows[0]["protocol"]) == SUCCEEDED
    # As the library that names no plain types reads and writes it again.
    import datasets

    again = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "hf"))
    assert again["question_id"][:] == ["q1", "q2", "q3"]


def test_without_logs_everything_else_is_kept(cache: Path, tmp_path: Path) -> None:
    export_cache(cache, tmp_path / "x.jsonl", logs=False)
    import_file(tmp_path / "x.jsonl", tmp_path / "b.sqlite")
    assert dict(diff(cache, tmp_path / "b.sqlite").fields) == {"log": 3}


LINE = 2  # the first below the card


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: [*rows[:3], rows[3][:-20]], r"line 4: torn, not JSON"),
        (lambda rows: rows[:-1], r"line 3: the file ends after 2 of 3 records"),
        (lambda rows: [rows[0], rows[2], rows[1], rows[3]], r"line 4: .*digest differs"),
        (lambda rows: [rows[0], rows[1].replace("city of X", "city of W", 1), *rows[2:]], r"line 4: .*digest differs"),
        (lambda rows: rows[1:], r"line 1: no card"),
        (lambda rows: [rows[0].replace('"format_version": 1', '"format_version": 9'), *rows[1:]], r"export format 9"),
        (lambda rows: [*rows[:2], "[]\n", rows[3]], r"line 3: want a JSON object, got list"),
        (lambda rows: [*rows[:2], rows[2].replace('"split"', '"spilt"', 1), rows[3]], r"line 3: spilt: unknown field"),
        (
            lambda rows: [*rows[:2], rows[2].replace('"calls":3', '"calls":"3"'), rows[3]],
            r"line 3: usage: calls: want int",
        ),
        (
            lambda rows: [*rows[:2], rows[2].replace("evidence", "succeeded"), rows[3]],
            r"line 3: protocol: answer: missing",
        ),
        (lambda rows: [*rows, rows[3]], r"question q3 stands there twice"),
        (lambda rows: [], r"line 1: torn, not JSON"),
    ],
)
def test_a_spoilt_file_is_named_by_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    good = tmp_path / "good.jsonl"
    export_cache(cache, good)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(spoil(good.read_text().splitlines(keepends=True))))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        import_file(bad, tmp_path / "out.sqlite")
    assert sorted(tmp_path.iterdir()) == before


def test_a_torn_parquet_is_named(cache: Path, tmp_path: Path) -> None:
    export_cache(cache, tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[:-30])
    with pytest.raises(UserError, match=r"x\.parquet: not a readable parquet file"):
        import_file(tmp_path / "x.parquet", tmp_path / "out.sqlite")


def test_an_existing_file_is_not_overwritten_unasked(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_cache(cache, out)
    assert out.read_text() == "mine"
    export_cache(cache, out, overwrite=True)
    assert read_card(out)["records"] == 3
    with pytest.raises(UserError, match="want a name that ends in"):
        export_cache(cache, tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("conflict", "kept"),
    [("first", "old"), ("last", "evidence"), ("newest", "new"), ("best", "new")],
)
def test_merge_settles_conflicts_by_policy(tmp_path: Path, conflict: str, kept: str) -> None:
    made = {
        "old": record("q", SUCCEEDED, created_at=1.0, source="old"),
        "new": record("q", SUCCEEDED, created_at=3.0, source="new"),
        "evidence": record("q", EVIDENCE, created_at=2.0, source="evidence"),
    }
    paths = [make(tmp_path / f"{name}.sqlite", r) for name, r in made.items()]
    counts = merge(paths, tmp_path / "out.sqlite", conflict)
    assert counts["questions"] == 1 and counts["conflicts"] == 2
    with ProtocolStore(tmp_path / "out.sqlite", readonly=True) as store:
        assert [r.source for r in store] == [kept]


def test_merge_joins_what_does_not_conflict(cache: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "b.sqlite", record("q3"), record("q4", EVIDENCE))
    export_cache(other, tmp_path / "b.parquet")
    counts = merge([cache, tmp_path / "b.parquet"], tmp_path / "out.sqlite")
    assert counts["questions"] == 4 and counts["equal"] == 1 and counts["conflicts"] == 0
    assert list(read_reviews(tmp_path / "out.sqlite")) == ["q1"]
    clash = make(tmp_path / "c.sqlite", record("q3", EVIDENCE))
    with pytest.raises(UserError, match=r"question q3: .*a\.sqlite and .*c\.sqlite hold different records"):
        merge([cache, clash], tmp_path / "never.sqlite")
    assert not (tmp_path / "never.sqlite").exists()


def test_diff_names_what_differs(cache: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "b.sqlite", record("q1", SUCCEEDED), record("q2"), record("q4"))
    found = diff(cache, other)
    assert found.only_first == ["q3"] and found.only_second == ["q4"] and found.equal == 0
    assert found.changed["q1"] == ("review",)
    assert set(found.changed["q2"]) == {"status", "protocol", "reason", "candidates"}
    assert dict(found.status) == {"passed -> rejected": 1}


def test_the_command_line(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = str(tmp_path / "x.jsonl"), str(tmp_path / "b.sqlite")
    assert main(["export", str(cache), out]) == 0
    assert "teachers: openai/m (3)" in capsys.readouterr().out
    assert main(["import", out, again]) == 0 and main(["import", out, again]) == 2
    assert main(["diff", str(cache), again]) == 0
    assert main(["merge", str(cache), out, "--out", str(tmp_path / "m.sqlite")]) == 0
    assert "3 questions" in capsys.readouterr().out
    make(tmp_path / "c.sqlite", record("q9"))
    assert main(["diff", str(cache), str(tmp_path / "c.sqlite")]) == 1
    assert main(["diff", str(cache), str(tmp_path / "c.sqlite"), "--json"]) == 1
    said = capsys.readouterr().out
    assert json.loads(said[said.index("{") :])["only_second"] == ["q9"]
    assert main(["card", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 3
    assert main(["export", str(tmp_path / "none.sqlite"), str(tmp_path / "y.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_show_and_stats_tell_the_review(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(cache), "q1"]) == 0
    assert "reviewed: bad: wrong\ncity" in capsys.readouterr().out
    assert main(["stats", str(cache)]) == 0
    assert "reviewed: 1 bad" in capsys.readouterr().out
    assert main(["stats", str(cache), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reviews"] == {"bad": 1}


def test_what_a_person_withdrew_can_stay_behind(cache: Path, tmp_path: Path) -> None:
    assert main(["export", str(cache), str(tmp_path / "x.jsonl"), "--without", "withdrawn"]) == 0
    assert read_card(tmp_path / "x.jsonl")["records"] == 3
    assert main(["export", str(cache), str(tmp_path / "y.jsonl"), "--without", "withdrawn", "--without", "bad"]) == 0
    import_file(tmp_path / "y.jsonl", tmp_path / "y.sqlite")
    assert diff(cache, tmp_path / "y.sqlite").only_first == ["q1"]


def test_the_log_of_a_replaced_cache_is_not_replayed(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.sqlite"
    with ProtocolStore(tmp_path / "live.sqlite") as store:
        for i in range(50):
            store.put(record(f"old{i}", SUCCEEDED))
        for end in ("", "-wal"):  # as a killed writer leaves them
            shutil.copy(tmp_path / f"live.sqlite{end}", tmp_path / f"out.sqlite{end}")
    assert (tmp_path / "out.sqlite-wal").stat().st_size
    export_cache(cache, tmp_path / "x.jsonl")
    import_file(tmp_path / "x.jsonl", out, overwrite=True)
    assert diff(cache, out).same


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["export", "import"])
def test_a_kill_at_any_time_leaves_the_whole_file_or_none(tmp_path: Path, command: str) -> None:
    cache = make(tmp_path / "a.sqlite", *(record(f"q{i:04}", SUCCEEDED) for i in range(1500)))
    export_cache(cache, tmp_path / "a.jsonl")
    source, out = ("a.sqlite", "out.jsonl") if command == "export" else ("a.jsonl", "out.sqlite")
    run = [sys.executable, "-m", "protocol_cache", command, source, out, "--overwrite"]
    begin = time.monotonic()
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True)
    took = time.monotonic() - begin
    (tmp_path / out).unlink()
    chooser = random.Random(0)
    whole = 0
    for _ in range(12):
        process = subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.DEVNULL)
        time.sleep(chooser.uniform(0.3, 1.05) * took)
        process.kill()
        process.wait()
        if (tmp_path / out).exists():
            whole += 1
            assert read_card(tmp_path / out)["records"] == 1500
            if command == "import":
                assert diff(cache, tmp_path / out).same
            (tmp_path / out).unlink()
    assert whole < 12, "none was killed in time"
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True)
    # SQLite's own side files may stand beside a cache that is read, or whose reader was killed.
    assert {p.name for p in tmp_path.iterdir() if ".sqlite-" not in p.name} == {"a.sqlite", "a.jsonl", out}
