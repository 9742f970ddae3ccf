"""What differs between two caches."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from protocol_cache.exchange.entry import Entry, read_entry, to_object
from protocol_cache.reviews import read_reviews
from protocol_cache.store import ProtocolStore


@dataclass
class Difference:
    """Questions by where they stand; ``changed`` maps an id to the names of its fields that differ.

    ``status`` counts ``passed -> rejected`` and the like, among the questions that both hold.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    changed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    equal: int = 0
    status: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)

    @property
    def same(self) -> bool:
        """Whether there is no difference at all."""
        return not (self.only_first or self.only_second or self.changed)


def diff(first: str | Path, second: str | Path) -> Difference:
    """Compare two caches entry by entry: records field by field, candidates, logs and reviews."""
    found = Difference()
    reviews = read_reviews(first), read_reviews(second)
    with ExitStack() as stack:
        stores = [stack.enter_context(ProtocolStore(path, readonly=True)) for path in (first, second)]
        ids = [set(store.statuses()) for store in stores]
        found.only_first, found.only_second = sorted(ids[0] - ids[1]), sorted(ids[1] - ids[0])
        for qid in sorted(ids[0] & ids[1]):
            pair = []
            for store, marks in zip(stores, reviews, strict=True):
                record = store.get(qid)
                if record is not None:
                    pair.append(read_entry(store, record, marks.get(qid)))
            if len(pair) < 2:  # taken out by a writer meanwhile
                continue
            _compare(qid, pair[0], pair[1], found)
    return found


def _compare(qid: str, one: Entry, other: Entry, found: Difference) -> None:
    mine, theirs = to_object(one), to_object(other)
    names = tuple(name for name in mine if mine[name] != theirs[name])
    if not names:
        found.equal += 1
        return
    found.changed[qid] = names
    found.fields.update(names)
    if one.record.status != other.record.status:
        found.status[f"{one.record.status} -> {other.record.status}"] += 1
