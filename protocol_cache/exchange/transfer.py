"""Export, import and merge: files and caches, written whole or not at all."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol_cache.exchange import jsonl, parquet
from protocol_cache.exchange.card import CardMaker
from protocol_cache.exchange.entry import Entry, ExchangeError, entries, read_entry, to_line
from protocol_cache.exchange.files import FillingStore, replacing
from protocol_cache.reviews import put_reviews, read_reviews
from protocol_cache.store import ProtocolStore

_FORMATS: dict[str, ModuleType] = {".jsonl": jsonl, ".parquet": parquet}
#: What two different records of one question end in.
CONFLICTS = ("error", "first", "last", "newest", "best")


def export_cache(
    cache: str | Path, out: str | Path, logs: bool = True, overwrite: bool = False, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the cache as ``.jsonl`` or ``.parquet``, by ``out``'s name, and return the card. Same cache, same bytes.

    Args:
        without: leave out the protocols that a person gave one of these verdicts.
    """
    out = Path(out)
    form = _format(out)
    kept = (e for e in entries(cache, logs) if e.review is None or e.review.verdict not in without)
    with replacing(out, overwrite) as partial:
        return form.write(partial, kept)


def import_file(path: str | Path, out: str | Path, overwrite: bool = False) -> dict[str, Any]:
    """Make a cache of an exported file and return the file's card.

    Raises:
        ExchangeError: naming the file and the line or row; then there is no cache.
    """
    path, out = Path(path), Path(out)
    with replacing(out, overwrite) as partial:
        _fill(partial, _read(path))
    return read_card(path)


def read_card(path: str | Path) -> dict[str, Any]:
    """The card of an exported file, or that which a cache would be exported with."""
    path = Path(path)
    if not path.is_file():
        raise ExchangeError(f"{path}: no such file")
    if path.suffix in _FORMATS:
        return _FORMATS[path.suffix].read_card(path)
    maker = CardMaker()
    for entry in entries(path):
        maker.add(entry, to_line(entry))
    return maker.card()


def merge(inputs: Sequence[str | Path], out: str | Path, conflict: str = "error", overwrite: bool = False) -> Counter:
    """Make one cache of several (caches or exported files) and count what became of the questions.

    Two records of a question conflict unless they are equal. ``first`` and ``last`` go by the order of ``inputs``,
    ``newest`` by the records' time, ``best`` takes a succeeded protocol before an evidence one, that before a
    rejection, that before a failure, and the newest of equals. The loser's candidates, log, review and cost go with it.

    Raises:
        ExchangeError: a conflict, under ``error``.
    """
    if conflict not in CONFLICTS:
        raise ExchangeError(f"conflict: choose from {', '.join(CONFLICTS)}, got {conflict!r}")
    counts: Counter[str] = Counter()
    with _as_caches(inputs) as paths, replacing(Path(out), overwrite) as partial:
        names = dict(zip(paths, inputs, strict=True))
        _fill(partial, _merged(paths, names, conflict, counts))
    return counts


def _merged(paths: list[Path], names: dict[Path, Any], conflict: str, counts: Counter[str]) -> Iterator[Entry]:
    reviews = {path: read_reviews(path) for path in paths}
    with ExitStack() as stack:
        stores = {path: stack.enter_context(ProtocolStore(path, readonly=True)) for path in paths}
        for qid in sorted({qid for store in stores.values() for qid in store.statuses()}):
            rivals = []
            for path in paths:
                record = stores[path].get(qid)
                if record is not None:
                    rivals.append((path, read_entry(stores[path], record, reviews[path].get(qid))))
            chosen = rivals[0]
            for rival in rivals[1:]:
                if rival[1] == chosen[1]:
                    counts["equal"] += 1
                    continue
                if conflict == "error":
                    both = f"{names[chosen[0]]} and {names[rival[0]]}"
                    raise ExchangeError(f"question {qid}: {both} hold different records (see --conflict)")
                counts["conflicts"] += 1
                chosen = _better(conflict)(chosen, rival)
            counts["questions"] += 1
            counts[f"from {names[chosen[0]]}"] += 1
            yield chosen[1]


def _better(conflict: str) -> Callable[[Any, Any], Any]:
    def rank(rival: tuple[Path, Entry]) -> tuple[int, float]:
        record = rival[1].record
        order = {"passed": 1 + (record.variant == "succeeded"), "rejected": 0, "failed": -1}
        return (order[record.status] if conflict == "best" else 0, record.created_at)

    if conflict == "first":
        return lambda one, other: one
    if conflict == "last":
        return lambda one, other: other
    return lambda one, other: other if rank(other) > rank(one) else one


def _fill(path: Path, found: Iterable[Entry]) -> None:
    reviews = []
    seen: set[str] = set()
    with FillingStore(path) as store:
        for entry in found:
            qid = entry.record.question_id
            if qid in seen:
                raise ExchangeError(f"question {qid} stands there twice")
            seen.add(qid)
            store.put(entry.record, entry.candidates, entry.log)
            if entry.review is not None:
                reviews.append(entry.review)
    if reviews:
        put_reviews(path, reviews)


@contextmanager
def _as_caches(inputs: Sequence[str | Path]) -> Iterator[list[Path]]:
    """The inputs as caches: exported files are imported into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, name in enumerate(inputs):
            path = Path(name)
            if path.suffix in _FORMATS:
                made = Path(folder) / f"{i}.sqlite"
                _fill(made, _read(path))
                path = made
            paths.append(path)
        yield paths


def _read(path: Path) -> Iterator[Entry]:
    if not path.is_file():
        raise ExchangeError(f"{path}: no such file")
    return _format(path).read(path)


def _format(path: Path) -> ModuleType:
    if path.suffix not in _FORMATS:
        raise ExchangeError(f"{path}: want a name that ends in {' or '.join(_FORMATS)}")
    return _FORMATS[path.suffix]
