"""The Parquet form: one row an entry in plain columns (text, 64-bit integers, doubles), the card in the metadata.

What is nested (protocol, candidates, log) is JSON text: every Parquet reader of the last ten years reads it, which
nested types and newer features would not grant.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from protocol_cache.exchange.card import CardMaker
from protocol_cache.exchange.entry import Entry, ExchangeError, from_object, to_line, to_object
from protocol_cache.exchange.jsonl import check_card, check_whole

CARD_KEY = b"mapd_protocols_card"
ROWS_A_GROUP = 1000
_JSON = ("protocol", "candidates", "log")
#: For people and queries; the import does not read them.
_SHOWN = ("variant", "task_type")
_NUMBERS = {
    **dict.fromkeys(("usage.calls", "usage.prompt_tokens", "usage.completion_tokens"), "int64"),
    **dict.fromkeys(("usage.cost_usd", "usage.seconds", "created_at", "review.reviewed_at"), "double"),
}
_NESTED = ("usage", "provenance", "review")


def write(path: Path, entries: Iterable[Entry]) -> dict[str, Any]:
    """Write ``path`` (a temporary file: see ``files.replacing``) and return the card. Needs pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(_flatten(_EXAMPLE))
    schema = pa.schema([(name, pa.type_for_alias(_NUMBERS.get(name, "string"))) for name in names])
    maker = CardMaker()
    left = iter(entries)
    # Format 1.0, no embedded Arrow schema: the oldest readers there are.
    with pq.ParquetWriter(
        path, schema, version="1.0", data_page_version="1.0", compression="snappy", store_schema=False
    ) as writer:
        while slice_ := list(islice(left, ROWS_A_GROUP)):
            for entry in slice_:
                maker.add(entry, to_line(entry))
            rows = [_flatten(to_object(entry)) for entry in slice_]
            columns = {name: [row[name] for row in rows] for name in names}
            writer.write_table(pa.table(columns, schema=schema))
        writer.add_key_value_metadata({CARD_KEY: json.dumps(maker.card())})
    return maker.card()


def read_card(path: Path) -> dict[str, Any]:
    """The card in the file's metadata."""
    with _open(path) as file:
        text = (file.metadata.metadata or {}).get(CARD_KEY)
    return check_card(json.loads(text) if text else None, str(path))


def read(path: Path) -> Iterator[Entry]:
    """The entries; at the end the file is checked against its card.

    Raises:
        ExchangeError: naming file and row, counted from 1.
    """
    card = read_card(path)
    maker = CardMaker()
    number = 0
    with _open(path) as file:
        for group in range(file.num_row_groups):
            try:
                rows = file.read_row_group(group).to_pylist()
            except (OSError, ValueError) as error:
                raise ExchangeError(f"{path}: after row {number}: {error}") from error
            for row in rows:
                number += 1
                entry = from_object(_unflatten(row, f"{path}: row {number}"), f"{path}: row {number}")
                maker.add(entry, to_line(entry))
                yield entry
    check_whole(card, maker.card(), f"{path}: row {number}")


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ExchangeError(f"{path}: not a readable parquet file: {error}") from error


def _flatten(value: dict[str, Any]) -> dict[str, Any]:
    """One level of plain values by dotted name, what is deeper as JSON text."""
    flat: dict[str, Any] = {}
    for name, held in value.items():
        if name in _JSON:
            flat[name] = None if held is None else json.dumps(held, ensure_ascii=True, separators=(",", ":"))
        elif name in _NESTED:
            keys = _EXAMPLE[name] if held is None else held
            flat |= {f"{name}.{key}": None if held is None else held[key] for key in keys}
        else:
            flat[name] = held
    protocol = value["protocol"] or {}
    return flat | {name: protocol.get(name) for name in _SHOWN}


def _unflatten(row: dict[str, Any], where: str) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, held in row.items():
        outer, _, inner = name.partition(".")
        if name in _SHOWN:
            continue
        if name in _JSON and held is not None:
            try:
                value[name] = json.loads(held)
            except (json.JSONDecodeError, TypeError) as error:
                raise ExchangeError(f"{where}: {name}: not JSON: {error}") from error
        elif inner:
            value.setdefault(outer, {})[inner] = held
        else:
            value[name] = held
    if value.get("review", {}).get("verdict") is None:
        value["review"] = None
    return value


def _example() -> dict[str, Any]:
    """An entry with a review, for the names of all columns."""
    from protocol_cache.reviews import Review
    from protocol_cache.store import Provenance, Record

    record = Record("q", "q", "s", "s", "failed", Provenance("m", "p", "c", "s"))
    return to_object(Entry(record, review=Review("q", "d", "good")))


_EXAMPLE = _example()
