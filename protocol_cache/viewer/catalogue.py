"""What the list shows: every question's summary in memory, filtered, counted and paged there.

25,600 records take about a second to read and some tens of MB; a page then takes milliseconds. The catalogue is read
anew when another process has written to the cache.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from protocol_cache.reviews import Review, read_reviews
from protocol_cache.store import ProtocolStore

PAGE = 50
NONE = "none"
#: Filter name -> its title in the page; each is a field of Summary or of its review.
FACETS = {
    "status": "Verdict",
    "variant": "Variant",
    "task_type": "Task type",
    "reviewed": "Reviewed",
    "refused": "Refused by",
    "source": "Source",
}
SORTS = {"id": "question id", "newest": "newest first", "cost": "dearest first", "calls": "most calls first"}


@dataclass(frozen=True)
class Summary:
    """One line of the list. ``refused`` names the checks that refused a candidate; ``haystack`` is searched in."""

    question_id: str
    question: str
    status: str
    variant: str
    task_type: str
    source: str
    answer: str | None
    reason: str | None
    refused: tuple[str, ...]
    calls: int
    cost_usd: float | None
    created_at: float
    haystack: str


@dataclass(frozen=True)
class Filter:
    """What the list is narrowed to; an empty value narrows nothing."""

    search: str = ""
    status: str = ""
    variant: str = ""
    task_type: str = ""
    reviewed: str = ""
    refused: str = ""
    source: str = ""
    sort: str = "id"

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Filter:
        """Of a page's address; unknown keys and sorts are ignored."""
        held = {name: query.get(name, "").strip() for name in ("search", *FACETS)}
        sort = query.get("sort", "id")
        return cls(**held, sort=sort if sort in SORTS else "id")

    def query(self, **more: Any) -> str:
        """The address's query, without what is at its default."""
        mine = {name: getattr(self, name) for name in ("search", *FACETS)} | {
            "sort": self.sort if self.sort != "id" else ""
        }
        return urlencode({k: v for k, v in (mine | more).items() if v not in ("", None)})


@dataclass(frozen=True)
class Listing:
    """One page of a filtered list, with each facet's counts under all the other filters."""

    rows: list[Summary]
    total: int
    page: int
    pages: int
    facets: dict[str, dict[str, int]]


@dataclass
class _Read:
    rows: list[Summary] = field(default_factory=list)
    by_id: dict[str, Summary] = field(default_factory=dict)
    reviews: dict[str, Review] = field(default_factory=dict)
    columns: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    answers: dict[Filter, tuple[list[Summary], dict[str, dict[str, int]]]] = field(default_factory=dict)
    version: int = -1
    stamp: tuple[Any, ...] = ()


class Catalogue:
    """The summaries of one cache.

    Raises:
        StoreError: the file is no cache, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with ProtocolStore(self.path, readonly=True):  # names what is wrong with the file
            pass
        self._store = ProtocolStore(self.path, readonly=True)
        self._db: sqlite3.Connection = self._store._db
        self._held = _Read()
        self._looked = 0.0

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def refresh(self, least_s: float = 0.0) -> None:
        """Read what has changed since; nothing if the last look is less than ``least_s`` seconds old."""
        now = time.monotonic()
        if self._held.version >= 0 and now - self._looked < least_s:
            return
        self._looked = now
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._held.version:
            return
        stamp = self._db.execute("SELECT count(*), max(rowid), max(created_at) FROM records").fetchone()
        if stamp != self._held.stamp:
            count, last, _ = stamp
            seen = self._held.stamp[1] if self._held.stamp else None
            # A record that is written, or written again, has a row number beyond all before it.
            if not seen or last <= seen or self._add_since(seen) != count:
                self._held.by_id = {row.question_id: row for row in self._summaries()}
            self._held.rows = sorted(self._held.by_id.values(), key=lambda row: row.question_id)
            self._held.stamp = stamp
        self._held.reviews = read_reviews(self.path)
        self._held.columns = self._columns()
        self._held.answers.clear()
        self._held.version = version

    @property
    def reviews(self) -> dict[str, Review]:
        """The reviews that hold, by question id."""
        return self._held.reviews

    def __len__(self) -> int:
        return len(self._held.rows)

    def get(self, question_id: str) -> Summary | None:
        """One question's summary."""
        return self._held.by_id.get(question_id)

    def listing(self, wanted: Filter, page: int) -> Listing:
        """A page, counted from 1; one beyond the last is the last."""
        found, facets = self._filtered(wanted)
        pages = max(1, -(-len(found) // PAGE))
        page = min(max(page, 1), pages)
        return Listing(found[(page - 1) * PAGE : page * PAGE], len(found), page, pages, facets)

    def neighbours(self, wanted: Filter, question_id: str) -> tuple[Summary | None, Summary | None, int, int]:
        """The questions before and after this one in a filtered list, its place (from 1; 0: not in it), the length."""
        found, _ = self._filtered(wanted)
        place = next((i for i, row in enumerate(found) if row.question_id == question_id), None)
        if place is None:
            return None, found[0] if found else None, 0, len(found)
        before = found[place - 1] if place else None
        after = found[place + 1] if place + 1 < len(found) else None
        return before, after, place + 1, len(found)

    def _filtered(self, wanted: Filter) -> tuple[list[Summary], dict[str, dict[str, int]]]:
        """The rows of a filter in its order, and the facets' counts; the last few filters' are kept."""
        held = self._held
        if wanted not in held.answers:
            if len(held.answers) >= 8:
                held.answers.clear()
            held.answers[wanted] = self._filter(wanted)
        return held.answers[wanted]

    def _filter(self, wanted: Filter) -> tuple[list[Summary], dict[str, dict[str, int]]]:
        held = self._held
        needle = " ".join(wanted.search.casefold().split())
        base = [i for i, row in enumerate(held.rows) if not needle or needle in row.haystack]
        asked = {name: getattr(wanted, name) for name in FACETS if getattr(wanted, name)}

        def passing(but: str | None = None) -> list[int]:
            kept = base
            for name, value in asked.items():
                if name != but:
                    column = held.columns[name]
                    kept = [i for i in kept if value in column[i]]
            return kept

        found = passing()
        facets = {}
        for name, column in held.columns.items():
            # A facet counts what choosing another of its values would give.
            counted = passing(but=name) if name in asked else found
            counter = Counter(chain.from_iterable(column[i] for i in counted))
            facets[name] = dict(sorted(counter.items()))
        rows = [held.rows[i] for i in found]
        keys: dict[str, Callable[[Summary], float]] = {
            "newest": lambda row: -row.created_at,
            "cost": lambda row: -(row.cost_usd or 0.0),
            "calls": lambda row: -row.calls,
        }
        if wanted.sort in keys:
            rows.sort(key=keys[wanted.sort])
        return rows, facets

    def _columns(self) -> dict[str, list[tuple[str, ...]]]:
        """Each facet's values of each row."""
        rows, reviews = self._held.rows, self._held.reviews
        marks = {qid: (review.verdict,) for qid, review in reviews.items()}
        return {
            "status": [(row.status,) for row in rows],
            "variant": [(row.variant,) for row in rows],
            "task_type": [(row.task_type,) for row in rows],
            "reviewed": [marks.get(row.question_id, (NONE,)) for row in rows],
            "refused": [row.refused or (NONE,) for row in rows],
            "source": [(row.source,) for row in rows],
        }

    def _add_since(self, row: int) -> int:
        """Read the records beyond this row number; returns how many questions there are then."""
        ids = [qid for (qid,) in self._db.execute("SELECT question_id FROM records WHERE rowid > ?", (row,))]
        for qid, record in self._store.get_many(ids).items():
            checks = dict.fromkeys(c.failed_check or "unknown" for c in self._store.candidates(qid) if not c.passed)
            self._held.by_id[qid] = _summary(record, tuple(checks))
        return len(self._held.by_id)

    def _summaries(self) -> list[Summary]:
        refused: dict[str, dict[str, None]] = {}
        for qid, check in self._db.execute(
            "SELECT question_id, failed_check FROM candidates WHERE NOT passed ORDER BY question_id, attempt"
        ):
            refused.setdefault(qid, {})[check or "unknown"] = None
        return [_summary(record, tuple(refused.get(record.question_id, ()))) for record in self._store]


def _summary(record: Any, refused: tuple[str, ...]) -> Summary:
    protocol = record.protocol or {}
    texts = [record.question_id, record.question, record.reason or "", *_strings(protocol)]
    return Summary(
        record.question_id,
        record.question,
        record.status,
        str(protocol.get("variant", NONE)),
        str(protocol.get("task_type", NONE)),
        f"{record.source}/{record.split}",
        protocol.get("answer"),
        record.reason,
        refused,
        record.usage.calls,
        record.usage.cost_usd,
        record.created_at,
        " ".join(" ".join(texts).casefold().split()),
    )


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def pretty(value: Any) -> str:
    """JSON for a person to read."""
    return json.dumps(value, indent=1, ensure_ascii=False)
