"""A person's verdicts on protocols, in a table of their own in the cache's file.

A review belongs to one protocol, not to its question: it carries the digest of what it judged, and a protocol that was
made anew counts as not reviewed. No package beyond the standard library is needed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mapd_verl.errors import UserError

#: ``good`` and ``bad`` are opinions that a trainer may weigh; ``withdrawn`` takes the protocol out of use.
REVIEW_VERDICTS = ("good", "bad", "withdrawn")
NOTE_LIMIT = 4000

_TABLE = """
CREATE TABLE IF NOT EXISTS reviews (
    question_id TEXT PRIMARY KEY,
    protocol_digest TEXT NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('good', 'bad', 'withdrawn')),
    note TEXT NOT NULL,
    reviewed_at REAL NOT NULL
) STRICT
"""


class ReviewError(UserError):
    """A review that cannot be kept or read; the message names the file or the field."""


@dataclass(frozen=True)
class Review:
    """``reviewed_at`` is in seconds since 1970; ``protocol_digest`` is :func:`protocol_digest` of what was judged."""

    question_id: str
    protocol_digest: str
    verdict: str
    note: str = ""
    reviewed_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.verdict not in REVIEW_VERDICTS:
            raise ReviewError(f"verdict: choose from {', '.join(REVIEW_VERDICTS)}, got {self.verdict!r}")
        if len(self.note) > NOTE_LIMIT:
            raise ReviewError(f"note: at most {NOTE_LIMIT} characters, got {len(self.note)}")


def protocol_digest(protocol: dict[str, Any]) -> str:
    """32 hex digits of the protocol's content, whatever the order of its keys."""
    text = json.dumps(protocol, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_reviews(path: str | Path) -> dict[str, Review]:
    """The reviews that still hold, by question id: those whose protocol is the one that was judged."""
    with _connect(path, "ro") as db:
        if not _has_table(db):
            return {}
        rows = _ask(
            path,
            db,
            "SELECT v.question_id, v.protocol_digest, v.verdict, v.note, v.reviewed_at, r.protocol "
            "FROM reviews v JOIN records r USING (question_id) WHERE r.protocol IS NOT NULL",
        )
    return {row[0]: Review(*row[:5]) for row in rows if protocol_digest(json.loads(row[5])) == row[1]}


def put_reviews(path: str | Path, reviews: list[Review], timeout: float = 5.0) -> None:
    """Keep these reviews, in one transaction; an earlier one of the same question is replaced.

    Raises:
        ReviewError: the file cannot be written, or another process holds it for longer than ``timeout`` seconds.
    """
    rows = [(r.question_id, r.protocol_digest, r.verdict, _utf8(r.note), r.reviewed_at) for r in reviews]
    with _connect(path, "rw", timeout) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TABLE)
            db.executemany("INSERT OR REPLACE INTO reviews VALUES (?, ?, ?, ?, ?)", rows)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            raise ReviewError(f"{path}: cannot keep the review: {error}") from error


def drop_review(path: str | Path, question_id: str) -> None:
    """Forget the review of this question, if there is one."""
    with _connect(path, "rw", 5.0) as db:
        if _has_table(db):
            _ask(path, db, "DELETE FROM reviews WHERE question_id = ?", (question_id,))


class _connect:
    """A connection that is closed, not only committed, at the end of its block."""

    def __init__(self, path: str | Path, mode: str, timeout: float = 30.0) -> None:
        self.path, self.mode, self.timeout = Path(path), mode, timeout

    def __enter__(self) -> sqlite3.Connection:
        if not self.path.is_file():
            raise ReviewError(f"{self.path}: no such file")
        uri = f"file:{quote(str(self.path.resolve()))}?mode={self.mode}"
        try:
            self.db = sqlite3.connect(uri, uri=True, timeout=self.timeout, isolation_level=None)
            self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            log = self.path.with_name(self.path.name + "-wal")
            if self.mode != "ro" or (log.exists() and log.stat().st_size):
                raise ReviewError(f"{self.path}: cannot open: {error}") from error
            # A read-only disk, where SQLite can't make its side files: see protocol_cache/store.py.
            self.db = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None)
        except sqlite3.Error as error:
            raise ReviewError(f"{self.path}: cannot open: {error}") from error
        return self.db

    def __exit__(self, *_: object) -> None:
        self.db.close()


def _has_table(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'reviews'").fetchone() is not None


def _ask(path: str | Path, db: sqlite3.Connection, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    try:
        return db.execute(sql, values).fetchall()
    except sqlite3.Error as error:
        raise ReviewError(f"{path}: cannot use the reviews: {error}") from error


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
