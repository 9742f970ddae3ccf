"""The JSON Lines form: the card on the first line, then one entry a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from protocol_cache.exchange.card import FORMAT, FORMAT_VERSION, CardMaker
from protocol_cache.exchange.entry import Entry, ExchangeError, from_object, to_line


def write(path: Path, entries: Iterable[Entry]) -> dict[str, Any]:
    """Write ``path`` (a temporary file: see ``files.replacing``) and return the card."""
    maker = CardMaker()
    body = path.with_name(path.name + ".body")
    try:
        # The card knows the digest of the lines below it, so that they are written first.
        with body.open("w", encoding="ascii") as file:
            for entry in entries:
                line = to_line(entry)
                maker.add(entry, line)
                file.write(line + "\n")
        with path.open("w", encoding="utf-8") as file, body.open(encoding="ascii") as lines:
            file.write(json.dumps({"card": maker.card()}, ensure_ascii=False) + "\n")
            for line in lines:
                file.write(line)
    finally:
        body.unlink(missing_ok=True)
    return maker.card()


def read_card(path: Path) -> dict[str, Any]:
    """The card on the first line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return check_card(_parse(first, path, 1).get("card"), f"{path}: line 1")


def read(path: Path) -> Iterator[Entry]:
    """The entries; at the end the file is checked against its card.

    Raises:
        ExchangeError: naming file and line, for a line that is torn or wrong, and for a file that ends too early.
    """
    card = read_card(path)
    maker = CardMaker()
    number = 1
    with path.open("rb") as lines:
        next(lines)
        for number, raw in enumerate(lines, 2):
            where = f"{path}: line {number}"
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ExchangeError(f"{where}: not UTF-8 at byte {error.start}") from error
            entry = from_object(_parse(line, path, number), where)
            maker.add(entry, to_line(entry))
            yield entry
    check_whole(card, maker.card(), f"{path}: line {number}")


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        torn = "" if line.endswith("\n") else "torn, "
        raise ExchangeError(f"{path}: line {number}: {torn}not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExchangeError(f"{path}: line {number}: want a JSON object, got {type(value).__name__}")
    return value


def check_card(card: Any, where: str) -> dict[str, Any]:
    """The card, if it is one that this version reads.

    Raises:
        ExchangeError: naming ``where``.
    """
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ExchangeError(f"{where}: no card of an exported protocol cache")
    if card.get("format_version") != FORMAT_VERSION:
        raise ExchangeError(
            f"{where}: export format {card.get('format_version')!r}, this version reads {FORMAT_VERSION}"
        )
    for key, kind in (("records", int), ("digest", str)):
        if not isinstance(card.get(key), kind):
            raise ExchangeError(f"{where}: the card has no {key}")
    return card


def check_whole(card: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Whether what was read is what the card promises.

    Raises:
        ExchangeError: naming ``where`` the reading ended.
    """
    if found["records"] != card["records"]:
        raise ExchangeError(f"{where}: the file ends after {found['records']} of {card['records']} records")
    if found["digest"] != card["digest"]:
        raise ExchangeError(f"{where}: the records are not those that the card was written for (digest differs)")
