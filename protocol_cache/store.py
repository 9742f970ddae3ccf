"""The protocol cache: one SQLite file that several processes can share and no crash can tear.

A *record* is what synthesis ended with for one question; its *candidates* are all the protocols that
were put to the gate on the way, with their verdicts. A record and its candidates are written in one
transaction. No package beyond the standard library is needed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from mapd_verl.errors import UserError

STORE_FORMAT = 1
STATUSES = ("passed", "rejected", "failed")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    question_id TEXT PRIMARY KEY,
    status TEXT NOT NULL CHECK (status IN ('passed', 'rejected', 'failed')),
    variant TEXT,
    reason TEXT,
    protocol TEXT,
    question TEXT NOT NULL,
    source TEXT NOT NULL,
    split TEXT NOT NULL,
    calls INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost_usd REAL,
    seconds REAL NOT NULL,
    teacher_model TEXT NOT NULL,
    prompt_version TEXT NOT NULL,
    corpus_hash TEXT NOT NULL,
    schema_version TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS candidates (
    question_id TEXT NOT NULL REFERENCES records(question_id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    candidate TEXT NOT NULL,
    passed INTEGER NOT NULL,
    failed_check TEXT,
    reason TEXT,
    PRIMARY KEY (question_id, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS logs (
    question_id TEXT PRIMARY KEY REFERENCES records(question_id) ON DELETE CASCADE,
    log TEXT NOT NULL
) STRICT;
"""

_COLUMNS = (
    "question_id, status, variant, reason, protocol, question, source, split, calls, prompt_tokens, "
    "completion_tokens, cost_usd, seconds, teacher_model, prompt_version, corpus_hash, schema_version, created_at"
)

_ORIGIN = (
    *("teacher_model", "prompt_version", "corpus_hash", "schema_version"),
    *("records", "passed", "calls", "prompt_tokens", "completion_tokens", "cost_usd"),
)


class StoreError(UserError):
    """The cache cannot be opened, read or written; the message names the file and the cause."""


@dataclass(frozen=True)
class Usage:
    """What a question has cost. ``cost_usd`` is None where the model's price is not known."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Provenance:
    """Where a protocol comes from; a trainer compares ``corpus_hash`` and ``schema_version`` with its own."""

    teacher_model: str
    prompt_version: str
    corpus_hash: str
    schema_version: str


@dataclass(frozen=True)
class Candidate:
    """One protocol that was put to the gate: what the teacher wrote, and the verdict."""

    candidate: Any
    passed: bool
    failed_check: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Record:
    """The end of one question's synthesis.

    ``status`` is "passed" (``protocol`` holds it), "rejected" (the gate refused every candidate) or
    "failed" (no candidate came about: the teacher or the retriever did not do its part). ``reason``
    says why, for the last two. ``created_at`` is in seconds since 1970.
    """

    question_id: str
    question: str
    source: str
    split: str
    status: str
    provenance: Provenance
    protocol: dict[str, Any] | None = None
    reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {STATUSES}, got {self.status!r}")
        if (self.status == "passed") != (self.protocol is not None):
            raise ValueError(f"a record has a protocol exactly if it passed; {self.question_id} is {self.status}")

    @property
    def variant(self) -> str | None:
        """ "succeeded" or "evidence"; None without a protocol."""
        return self.protocol["variant"] if self.protocol else None


class ProtocolStore:
    """The cache in one file.

    Args:
        path: the SQLite file. It is made if it is missing, unless ``readonly``.
        readonly: for trainers and viewers: nothing is ever written, and a writer may be at work meanwhile.
        timeout: seconds to wait for another process's write to end.

    Raises:
        StoreError: the file is missing (``readonly``), is no protocol store, or cannot be opened.

    A store belongs to the thread that opened it. Use it in a ``with`` block, or call ``close``.
    """

    def __init__(self, path: str | Path, readonly: bool = False, timeout: float = 30.0) -> None:
        self.path = Path(path)
        self.readonly = readonly
        if readonly and not self.path.is_file():
            raise StoreError(f"protocol store {self.path}: no such file")
        if not readonly and not self.path.parent.is_dir():
            raise StoreError(f"protocol store {self.path}: the folder {self.path.parent} does not exist")
        with self._named_errors("open"):
            self._db = _open_readonly(self.path, timeout) if readonly else _open_writable(self.path, timeout)
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found != STORE_FORMAT:
            self._db.close()
            raise StoreError(
                f"protocol store {self.path}: store format {found}, this version reads format {STORE_FORMAT}"
                if found
                else f"protocol store {self.path}: an SQLite file, but not a protocol store"
            )

    def put(self, record: Record, candidates: Iterable[Candidate] = (), log: Any = None) -> None:
        """Write a record, its candidates (in order) and its exploration log (JSON-able) in one transaction.

        What was there for that question id is replaced. When this returns, the record survives a SIGKILL.

        Raises:
            StoreError: the disk is full, the file is locked for longer than ``timeout``, or read-only.
        """
        usage, origin = record.usage, record.provenance
        row = (
            *(record.question_id, record.status, record.variant, _text(record.reason)),
            _dump(record.protocol) if record.protocol is not None else None,
            *(_text(record.question), record.source, record.split),
            *(usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd, usage.seconds),
            *(origin.teacher_model, origin.prompt_version, origin.corpus_hash, origin.schema_version),
            record.created_at,
        )
        verdicts = [
            (record.question_id, i, _dump(c.candidate), int(c.passed), c.failed_check, _text(c.reason))
            for i, c in enumerate(candidates, start=1)
        ]
        with self._named_errors("write"), self._transaction():
            self._db.execute("DELETE FROM records WHERE question_id = ?", (record.question_id,))
            self._db.execute(f"INSERT INTO records ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)
            self._db.executemany("INSERT INTO candidates VALUES (?, ?, ?, ?, ?, ?)", verdicts)
            if log is not None:
                self._db.execute("INSERT INTO logs VALUES (?, ?)", (record.question_id, _dump(log)))

    def get(self, question_id: str) -> Record | None:
        """The record of a question, or None if there is none."""
        return self.get_many([question_id]).get(question_id)

    def get_many(self, question_ids: Iterable[str]) -> dict[str, Record]:
        """The records of those questions that have one, by question id, in one query."""
        wanted = json.dumps(list(question_ids))
        sql = f"SELECT {_COLUMNS} FROM records WHERE question_id IN (SELECT value FROM json_each(?))"
        with self._named_errors("read"):
            return {row[0]: _record(row) for row in self._db.execute(sql, (wanted,))}

    def statuses(self) -> dict[str, str]:
        """Every question id with its status."""
        with self._named_errors("read"):
            return dict(self._db.execute("SELECT question_id, status FROM records"))

    def origins(self) -> dict[str, tuple[str, str, str]]:
        """Every question id with its status, corpus hash and schema version: what a resumed run needs to know."""
        sql = "SELECT question_id, status, corpus_hash, schema_version FROM records"
        with self._named_errors("read"):
            return {qid: (status, corpus, schema) for qid, status, corpus, schema in self._db.execute(sql)}

    def candidates(self, question_id: str) -> list[Candidate]:
        """Every protocol that was put to the gate for this question, in order."""
        sql = "SELECT candidate, passed, failed_check, reason FROM candidates WHERE question_id = ? ORDER BY attempt"
        with self._named_errors("read"):
            rows = self._db.execute(sql, (question_id,)).fetchall()
        return [Candidate(json.loads(c), bool(p), check, reason) for c, p, check, reason in rows]

    def log(self, question_id: str) -> Any:
        """The exploration log of this question, or None."""
        with self._named_errors("read"):
            row = self._db.execute("SELECT log FROM logs WHERE question_id = ?", (question_id,)).fetchone()
        return json.loads(row[0]) if row else None

    def __iter__(self) -> Iterator[Record]:
        """All records, ordered by question id, read in slices so that a writer is never held up for long."""
        last = ""
        sql = f"SELECT {_COLUMNS} FROM records WHERE question_id > ? ORDER BY question_id LIMIT 1000"
        while True:
            with self._named_errors("read"):
                rows = self._db.execute(sql, (last,)).fetchall()
            if not rows:
                return
            yield from map(_record, rows)
            last = rows[-1][0]

    def __len__(self) -> int:
        with self._named_errors("read"):
            return self._db.execute("SELECT count(*) FROM records").fetchone()[0]

    def __contains__(self, question_id: object) -> bool:
        with self._named_errors("read"):
            row = self._db.execute("SELECT 1 FROM records WHERE question_id = ?", (question_id,)).fetchone()
        return row is not None

    def stats(self) -> dict[str, Any]:
        """Counts by status, variant, failed check and provenance, and the sums of calls, tokens, cost and seconds."""
        with self._named_errors("read"):
            ask = self._db.execute
            totals = ask(
                "SELECT count(*), coalesce(sum(calls), 0), coalesce(sum(prompt_tokens), 0), "
                "coalesce(sum(completion_tokens), 0), sum(cost_usd), coalesce(sum(cost_usd IS NULL), 0), "
                "coalesce(sum(seconds), 0) FROM records"
            ).fetchone()
            names = ("records", "calls", "prompt_tokens", "completion_tokens", "cost_usd", "records_without_cost")
            provenance = ask(
                "SELECT teacher_model, prompt_version, corpus_hash, schema_version, count(*), sum(status = 'passed'), "
                "sum(calls), sum(prompt_tokens), sum(completion_tokens), sum(cost_usd) FROM records "
                "GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC"
            ).fetchall()
            return {
                **dict(zip((*names, "seconds"), totals, strict=True)),
                "status": dict(ask("SELECT status, count(*) FROM records GROUP BY 1")),
                "variant": dict(ask("SELECT variant, count(*) FROM records WHERE variant IS NOT NULL GROUP BY 1")),
                "candidates": ask("SELECT count(*) FROM candidates").fetchone()[0],
                "failed_checks": dict(
                    ask("SELECT failed_check, count(*) FROM candidates WHERE NOT passed GROUP BY 1 ORDER BY 2 DESC")
                ),
                "failures": dict(
                    ask("SELECT reason, count(*) FROM records WHERE status = 'failed' GROUP BY 1 ORDER BY 2 DESC")
                ),
                "provenance": [dict(zip(_ORIGIN, row, strict=True)) for row in provenance],
            }

    def close(self) -> None:
        """Close the file. A writer's last close folds the write-ahead log into it."""
        self._db.close()

    def __enter__(self) -> ProtocolStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back on a full disk
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", "") or ""
            cause = str(error)
            if code.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC")):
                cause = f"no space left on the disk ({error}); every finished question is safe, free some and run again"
            elif code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                cause = f"another process holds it ({error})"
            elif code == "SQLITE_NOTADB":
                cause = "not an SQLite file"
            raise StoreError(f"protocol store {self.path}: cannot {doing}: {cause}") from error


def _open_writable(path: Path, timeout: float) -> sqlite3.Connection:
    if not path.exists():
        _make_whole(path)
    fresh = path.stat().st_size == 0
    db = sqlite3.connect(path, timeout=timeout, isolation_level=None)
    try:
        # user_version is read before the first write, so that a foreign database stays as it is.
        if not fresh and db.execute("PRAGMA user_version").fetchone()[0] != STORE_FORMAT and _tables(db):
            return db
        db.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on the disk when it returns. The calls behind it were paid for.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        if db.execute("PRAGMA user_version").fetchone()[0] != STORE_FORMAT:
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {STORE_FORMAT}; COMMIT;")
        return db
    except BaseException:
        db.close()
        raise


def _make_whole(path: Path) -> None:
    """A new store appears with its tables: a reader that looks at this moment finds none or a whole one."""
    made = path.with_name(f".{path.name}.{os.getpid()}.new")
    db = sqlite3.connect(made, isolation_level=None)
    try:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {STORE_FORMAT}; COMMIT;")
        db.close()
        with suppress(FileExistsError):  # another writer was first
            os.link(made, path)
    finally:
        db.close()
        made.unlink(missing_ok=True)


def _open_readonly(path: Path, timeout: float) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    db = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return db
    except sqlite3.OperationalError:
        db.close()
        # In a folder where WAL's side files cannot be made (a shared, read-only disk) a store without
        # pending log can still be read, as a file that nobody changes.
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        return sqlite3.connect(uri + "&immutable=1", uri=True, timeout=timeout, isolation_level=None)
    except BaseException:
        db.close()
        raise


def _tables(db: sqlite3.Connection) -> int:
    return db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Half a surrogate pair is JSON, as an escape, but not UTF-8.
    return text if _encodable(text) else json.dumps(value, separators=(",", ":"))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(text: str | None) -> str | None:
    """Text for a column of its own: what UTF-8 cannot hold is shown as an escape."""
    return text if text is None else text.encode(errors="backslashreplace").decode()


def _record(row: tuple[Any, ...]) -> Record:
    qid, status, _variant, reason, protocol, question, source, split, *numbers = row[:13]
    *origin, created_at = row[13:]
    return Record(
        question_id=qid,
        question=question,
        source=source,
        split=split,
        status=status,
        provenance=Provenance(*origin),
        protocol=json.loads(protocol) if protocol is not None else None,
        reason=reason,
        usage=Usage(*numbers),
        created_at=created_at,
    )
