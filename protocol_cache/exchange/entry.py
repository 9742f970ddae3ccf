"""One question's whole share of a cache as one JSON object, there and back without a loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError
from protocol_cache.reviews import Review, ReviewError, protocol_digest, read_reviews
from protocol_cache.schema import SCHEMA_VERSION, schema_error
from protocol_cache.store import Candidate, ProtocolStore, Provenance, Record, Usage


class ExchangeError(UserError):
    """A file that cannot be exchanged; the message names the file and the line or row."""


@dataclass(frozen=True)
class Entry:
    """A record with the candidates that were put to the gate, the exploration log and a person's review."""

    record: Record
    candidates: tuple[Candidate, ...] = ()
    log: Any = None
    review: Review | None = None


def entries(path: str | Path, logs: bool = True) -> Iterator[Entry]:
    """Every entry of a cache, ordered by question id; without the exploration logs unless ``logs``."""
    reviews = read_reviews(path)
    with ProtocolStore(path, readonly=True) as store:
        for record in store:
            yield read_entry(store, record, reviews.get(record.question_id), logs)


def read_entry(store: ProtocolStore, record: Record, review: Review | None, logs: bool = True) -> Entry:
    """The entry around a record."""
    log = store.log(record.question_id) if logs else None
    return Entry(record, tuple(store.candidates(record.question_id)), log, review)


def to_object(entry: Entry) -> dict[str, Any]:
    """The JSON object of an entry."""
    review = None
    if entry.review is not None:
        review = {k: v for k, v in asdict(entry.review).items() if k not in ("question_id", "protocol_digest")}
    return {
        **asdict(entry.record),
        "candidates": [asdict(candidate) for candidate in entry.candidates],
        "log": entry.log,
        "review": review,
    }


def to_line(entry: Entry) -> str:
    """:func:`to_object` on one line of ASCII: half a surrogate pair, which a teacher may write, is no UTF-8."""
    return json.dumps(to_object(entry), ensure_ascii=True, separators=(",", ":"))


def from_object(value: Any, where: str) -> Entry:
    """The entry of a JSON object.

    Raises:
        ExchangeError: naming ``where`` and the field that is missing, unknown, of a wrong type or contradictory.
    """
    if not isinstance(value, dict):
        raise ExchangeError(f"{where}: want a JSON object, got {type(value).__name__}")
    value = dict(value)
    candidates, log, review = value.pop("candidates", []), value.pop("log", None), value.pop("review", None)
    value["usage"] = _build(Usage, value.get("usage"), f"{where}: usage")
    value["provenance"] = _build(Provenance, value.get("provenance"), f"{where}: provenance")
    record = _build(Record, value, where)
    if not isinstance(candidates, list):
        raise ExchangeError(f"{where}: candidates: want a list, got {type(candidates).__name__}")
    judged = tuple(_build(Candidate, c, f"{where}: candidate {i}") for i, c in enumerate(candidates, 1))
    if record.protocol is not None and record.provenance.schema_version == SCHEMA_VERSION:
        problem = schema_error(record.protocol)
        if problem:
            raise ExchangeError(f"{where}: protocol: {problem}")
    if review is None:
        return Entry(record, judged, log)
    if not isinstance(review, dict) or record.protocol is None:
        raise ExchangeError(f"{where}: review: want an object, of a record that has a protocol")
    mark = {"question_id": record.question_id, "protocol_digest": protocol_digest(record.protocol), **review}
    return Entry(record, judged, log, _build(Review, mark, f"{where}: review"))


#: What each field may hold, where its annotation alone (text, by postponed evaluation) can't be asked.
_TYPES: dict[str, tuple[type, ...]] = {
    "protocol": (dict, type(None)),
    "reason": (str, type(None)),
    "failed_check": (str, type(None)),
    "cost_usd": (float, int, type(None)),
    "calls": (int,),
    "prompt_tokens": (int,),
    "completion_tokens": (int,),
    "seconds": (float, int),
    "created_at": (float, int),
    "reviewed_at": (float, int),
    "passed": (bool,),
    "usage": (Usage,),
    "provenance": (Provenance,),
}
_ANYTHING = ("candidate",)


def _build(kind: type, value: Any, where: str) -> Any:
    """An instance of a dataclass from a mapping with exactly its fields, those with a default optional."""
    if not isinstance(value, Mapping):
        raise ExchangeError(f"{where}: want an object, got {type(value).__name__}")
    known = {f.name: f for f in fields(kind)}
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ExchangeError(f"{where}: {unknown[0]}: unknown field")
    for name, f in known.items():
        if name not in value:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ExchangeError(f"{where}: {name}: missing")
            continue
        wanted = _TYPES.get(name, (str,))
        held = value[name]
        # True is an int to Python, not to us.
        if name not in _ANYTHING and (not isinstance(held, wanted) or (isinstance(held, bool) and bool not in wanted)):
            raise ExchangeError(f"{where}: {name}: want {wanted[0].__name__}, got {held!r:.80}")
    try:
        return kind(**value)
    except (ValueError, ReviewError) as error:
        raise ExchangeError(f"{where}: {error}") from error
