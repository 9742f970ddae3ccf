"""Finished model calls and what they cost, in the cache's own file.

A call that was answered is kept at once, under a hash of all that decides its answer, so that a run which was killed,
resumed or repeated never pays for it again. Money is *reserved* before a call, at an upper bound, and *settled* after
it at what it cost; what is settled and reserved together never exceeds the budget, however many calls and processes
there are. A call whose end nobody saw (a timeout, a killed process) may have been charged: it stays counted at its
bound.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    key TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    model TEXT NOT NULL,
    content TEXT,
    finish_reason TEXT,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost_usd REAL,
    created_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS accounts (
    model TEXT NOT NULL,
    role TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('settled', 'uncertain')),
    calls INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost_usd REAL NOT NULL,
    PRIMARY KEY (model, role, kind)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reservations (
    id INTEGER PRIMARY KEY,
    process TEXT NOT NULL,
    model TEXT NOT NULL,
    role TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost_usd REAL NOT NULL
) STRICT;
"""


class BudgetReached(UserError):
    """The next call could exceed the budget; everything finished is kept.

    ``waiting``: it would fit if the calls under way turned out to cost nothing, so that it is worth asking again.
    """

    def __init__(self, message: str, waiting: bool = False) -> None:
        super().__init__(message)
        self.waiting = waiting


@dataclass(frozen=True)
class Budget:
    """Upper limits of all that the cache has ever spent; None: no limit."""

    usd: float | None = None
    tokens: int | None = None
    calls: int | None = None


@dataclass(frozen=True)
class Reply:
    """An answered call."""

    content: str | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None


@dataclass(frozen=True)
class Bound:
    """The most that a call can use."""

    prompt_tokens: int
    completion_tokens: int
    cost_usd: float


def call_key(role: str, prompt_version: str, model: str, parameters: dict[str, Any], messages: Sequence[Any]) -> str:
    """SHA-256 of what decides a call's answer; the server's address and key are not among it."""
    facts = json.dumps([role, prompt_version, model, parameters, list(messages)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(facts.encode("ascii")).hexdigest()


class CallLog:
    """The calls and accounts of one cache file; belongs to the thread that made it.

    Args:
        path: the cache, which :class:`protocol_cache.store.ProtocolStore` has made.
        budget: what :meth:`reserve` respects.

    Raises:
        StoreError: the file can't be read or written.
    """

    def __init__(self, path: str | Path, budget: Budget | None = None) -> None:
        self.path = Path(path)
        self.budget = budget or Budget()
        self._process = f"{os.uname().nodename}:{os.getpid()}:{time.monotonic_ns()}"
        with self._named_errors("open"):
            self._db = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            # FULL, as the store's own connection: what was paid for is on the disk when settle() returns.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._write_off_the_dead()

    def find(self, key: str) -> Reply | None:
        """The answer of a call that was made before."""
        sql = "SELECT content, finish_reason, prompt_tokens, completion_tokens, cost_usd FROM calls WHERE key = ?"
        with self._named_errors("read"):
            row = self._db.execute(sql, (key,)).fetchone()
        return Reply(*row) if row else None

    def reserve(self, role: str, model: str, bound: Bound) -> int:
        """Set a call's bound aside; returns the reservation.

        Raises:
            BudgetReached: what is spent and reserved already leaves less than the bound.
        """
        with self._named_errors("write"), self._transaction():
            spent = self._sums("accounts", "calls")
            held = self._sums("reservations", "1")
            for name, limit, unit, mine in (
                ("--budget-usd", self.budget.usd, 2, bound.cost_usd),
                ("--budget-tokens", self.budget.tokens, 1, bound.prompt_tokens + bound.completion_tokens),
                ("--budget-calls", self.budget.calls, 0, 1),
            ):
                if limit is not None and spent[unit] + held[unit] + mine > limit + 1e-12:
                    raise BudgetReached(
                        f"{name} {limit:g}: {spent[unit]:.6g} spent and {held[unit]:.6g} under way; "
                        f"the next call could take {mine:.6g}",
                        waiting=held[0] > 0 and spent[unit] + mine <= limit,
                    )
            row = (self._process, model, role, bound.prompt_tokens, bound.completion_tokens, bound.cost_usd)
            sql = (
                "INSERT INTO reservations (process, model, role, prompt_tokens, completion_tokens, cost_usd) "
                "VALUES (?, ?, ?, ?, ?, ?)"
            )
            found = self._db.execute(sql, row).lastrowid
        assert found is not None
        return found

    def settle(self, reservation: int, key: str, role: str, model: str, reply: Reply) -> None:
        """Keep an answer and enter its cost, in one transaction; when this returns a SIGKILL loses neither."""
        cost = 0.0 if reply.cost_usd is None else reply.cost_usd
        row = (key, role, model, _text(reply.content), reply.finish_reason)
        numbers = (reply.prompt_tokens, reply.completion_tokens, reply.cost_usd, time.time())
        with self._named_errors("write"), self._transaction():
            self._db.execute("DELETE FROM reservations WHERE id = ?", (reservation,))
            self._db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, *numbers))
            self._enter(model, role, "settled", reply.prompt_tokens, reply.completion_tokens, cost)

    def release(self, reservation: int) -> None:
        """The server refused the call: nothing was charged."""
        with self._named_errors("write"), self._transaction():
            self._db.execute("DELETE FROM reservations WHERE id = ?", (reservation,))

    def write_off(self, reservation: int) -> None:
        """Nobody knows how the call ended: it stays counted, at its bound."""
        with self._named_errors("write"), self._transaction():
            self._write_off("id = ?", reservation)

    def spent(self) -> tuple[int, int, float]:
        """Calls, tokens and dollars settled, and of uncertain calls the bounds."""
        with self._named_errors("read"):
            return self._sums("accounts", "calls")

    def accounts(self) -> list[dict[str, Any]]:
        """One entry for each model, role and kind (``settled``, ``uncertain``)."""
        names = ("model", "role", "kind", "calls", "prompt_tokens", "completion_tokens", "cost_usd")
        with self._named_errors("read"):
            rows = self._db.execute(f"SELECT {', '.join(names)} FROM accounts ORDER BY 1, 2, 3").fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def close(self) -> None:
        """Close this connection."""
        self._db.close()

    def _sums(self, table: str, calls: str) -> tuple[int, int, float]:
        sql = (
            f"SELECT coalesce(sum({calls}), 0), coalesce(sum(prompt_tokens + completion_tokens), 0), "
            f"coalesce(sum(cost_usd), 0) FROM {table}"
        )
        return self._db.execute(sql).fetchone()

    def _enter(self, model: str, role: str, kind: str, prompt: int, completion: int, cost: float) -> None:
        self._db.execute(
            "INSERT INTO accounts VALUES (?, ?, ?, 1, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + 1, "
            "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "completion_tokens = completion_tokens + excluded.completion_tokens, "
            "cost_usd = cost_usd + excluded.cost_usd",
            (model, role, kind, prompt, completion, cost),
        )

    def _write_off(self, where: str, value: Any) -> None:
        sql = f"SELECT model, role, prompt_tokens, completion_tokens, cost_usd FROM reservations WHERE {where}"
        for model, role, prompt, completion, cost in self._db.execute(sql, (value,)).fetchall():
            self._enter(model, role, "uncertain", prompt, completion, cost)
        self._db.execute(f"DELETE FROM reservations WHERE {where}", (value,))

    def _write_off_the_dead(self) -> None:
        """Reservations of processes of this machine that are gone: killed in the middle of a call."""
        node = os.uname().nodename
        with self._transaction():
            for (process,) in self._db.execute("SELECT DISTINCT process FROM reservations").fetchall():
                host, pid, _ = process.rsplit(":", 2)
                if host == node and not _alive(int(pid)):
                    self._write_off("process = ?", process)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        from protocol_cache.store import StoreError

        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"protocol store {self.path}: cannot {doing} its calls: {error}") from error


def read_accounts(path: str | Path) -> list[dict[str, Any]]:
    """:meth:`CallLog.accounts` of a cache that is only read; empty where no calls were ever kept."""
    from urllib.parse import quote

    db = sqlite3.connect(f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True)
    try:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'accounts'").fetchone():
            return []
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM accounts ORDER BY model, role, kind")]
    finally:
        db.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _text(value: str | None) -> str | None:
    """Half a surrogate pair can't be stored."""
    return None if value is None else value.encode("utf-8", "replace").decode("utf-8")
