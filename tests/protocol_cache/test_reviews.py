"""A person's verdicts beside the records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from protocol_samples import EVIDENCE, SUCCEEDED, record

from mapd_verl.errors import UserError
from protocol_cache import ProtocolStore
from protocol_cache.reviews import NOTE_LIMIT, Review, drop_review, protocol_digest, put_reviews, read_reviews


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with ProtocolStore(tmp_path / "p.sqlite") as store:
        store.put(record("q1", SUCCEEDED))
        store.put(record("q2", EVIDENCE))
    return tmp_path / "p.sqlite"


def mark(qid: str, verdict: str = "bad", note: str = "", protocol: dict = SUCCEEDED) -> Review:
    return Review(qid, protocol_digest(protocol), verdict, note, 7.5)


def test_a_review_is_kept_replaced_and_dropped(cache: Path) -> None:
    assert read_reviews(cache) == {}
    drop_review(cache, "q1")  # nothing there yet, not even a table
    put_reviews(cache, [mark("q1", "good", "fine\n<b>")])
    assert read_reviews(cache) == {"q1": mark("q1", "good", "fine\n<b>")}
    put_reviews(cache, [mark("q1", "withdrawn")])
    assert read_reviews(cache)["q1"].verdict == "withdrawn"
    drop_review(cache, "q1")
    assert read_reviews(cache) == {}


def test_it_holds_for_the_protocol_that_was_judged_only(cache: Path) -> None:
    put_reviews(cache, [mark("q1"), mark("q2", protocol=EVIDENCE), mark("gone")])
    assert set(read_reviews(cache)) == {"q1", "q2"}
    with ProtocolStore(cache) as store:
        store.put(record("q1", {**SUCCEEDED, "answer": "Y"}))
        store.put(record("q2"))
    assert read_reviews(cache) == {}
    with ProtocolStore(cache) as store:
        store.put(record("q1", dict(reversed(SUCCEEDED.items()))))
    assert set(read_reviews(cache)) == {"q1"}, "the same protocol again, whatever the order of its keys"


def test_a_reader_and_a_writer_of_the_store_may_be_at_work(cache: Path) -> None:
    with ProtocolStore(cache) as writer, ProtocolStore(cache, readonly=True) as reader:
        put_reviews(cache, [mark("q1")])
        writer.put(record("q3", SUCCEEDED))
        assert len(reader) == 3 and set(read_reviews(cache)) == {"q1"}


def test_bad_reviews_and_files_are_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose from good, bad, withdrawn, got 'fine'"):
        mark("q1", "fine")
    with pytest.raises(UserError, match="at most 4000 characters"):
        mark("q1", note="x" * (NOTE_LIMIT + 1))
    with pytest.raises(UserError, match=r"none\.sqlite: no such file"):
        read_reviews(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at" * 30)
    with pytest.raises(UserError, match="text: cannot open"):
        read_reviews(tmp_path / "text")
    db = sqlite3.connect(cache)
    db.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match=r"cannot keep the review: database is locked"):
        put_reviews(cache, [mark("q1")], timeout=0.05)
    db.close()
    assert read_reviews(cache) == {}
