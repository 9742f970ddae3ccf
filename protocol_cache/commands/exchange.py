"""``export``, ``import``, ``merge``, ``card``, ``diff``, ``verify``: caches as files to hand on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from protocol_cache.exchange.transfer import CONFLICTS
from protocol_cache.reviews import REVIEW_VERDICTS

SHOWN = 10


def add(commands: Any) -> None:
    """Their parsers."""
    out = commands.add_parser("export", help="write a cache as .jsonl or .parquet, with its card")
    out.add_argument("store")
    out.add_argument("out", help="the file; its name says the format")
    out.add_argument("--no-logs", action="store_true", help="leave out the exploration logs (most of the bytes)")
    out.add_argument(
        "--without",
        action="append",
        default=[],
        choices=REVIEW_VERDICTS,
        help="leave out the protocols that a person reviewed so (repeat for several)",
    )
    _overwrite(out)
    out.set_defaults(run=_export)

    into = commands.add_parser("import", help="make a cache of an exported file")
    into.add_argument("file")
    into.add_argument("out", help="the cache")
    _overwrite(into)
    into.set_defaults(run=_import)

    merge = commands.add_parser("merge", help="make one cache of several caches or exported files")
    merge.add_argument("inputs", nargs="+")
    merge.add_argument("--out", required=True, help="the cache")
    merge.add_argument(
        "--conflict",
        choices=CONFLICTS,
        default="error",
        help="which of two different records of a question stays (default: error)",
    )
    _overwrite(merge)
    merge.set_defaults(run=_merge)

    card = commands.add_parser("card", help="what an exported file (or a cache) holds: schema, teacher, gate, cost")
    card.add_argument("file")
    card.add_argument("--json", action="store_true")
    card.set_defaults(run=_card)

    diff = commands.add_parser("diff", help="what differs between two caches; exit code 1 if anything does")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.add_argument("--json", action="store_true")
    diff.set_defaults(run=_diff)

    verify = commands.add_parser("verify", help="the file and the gate's checks on what is stored; exit code 1 if bad")
    verify.add_argument("store")
    verify.add_argument("--corpus", help="check facts against this corpus (default: the passages in the cache)")
    verify.add_argument("--questions", help="their gold answers, for exact match and leaks")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify)


def _overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _export(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.card import card_text
    from protocol_cache.exchange.transfer import export_cache

    card = export_cache(options.store, options.out, not options.no_logs, options.overwrite, options.without)
    print(f"{options.out}: {card['records']} records\n{card_text(card)}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.transfer import import_file

    card = import_file(options.file, options.out, options.overwrite)
    print(f"{options.out}: {card['records']} records of {options.file}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.transfer import merge

    counts = merge(options.inputs, options.out, options.conflict, options.overwrite)
    named = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "questions")
    print(f"{options.out}: {counts['questions']} questions ({named})")
    return 0


def _card(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.card import card_text
    from protocol_cache.exchange.transfer import read_card

    card = read_card(options.file)
    print(json.dumps(card, indent=1, ensure_ascii=False) if options.json else card_text(card))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.compare import diff

    found = diff(options.first, options.second)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
        return 0 if found.same else 1
    print(f"{found.equal} equal, {len(found.changed)} changed", end="")
    print(f", {len(found.only_first)} only in {options.first}, {len(found.only_second)} only in {options.second}")
    if found.changed:
        print("changed: " + ", ".join(f"{name} ({count})" for name, count in found.fields.most_common()))
    if found.status:
        print("status: " + ", ".join(f"{name} ({count})" for name, count in found.status.most_common()))
    _first("changed", (f"{qid}: {', '.join(names)}" for qid, names in found.changed.items()))
    _first(f"only in {options.first}", found.only_first)
    _first(f"only in {options.second}", found.only_second)
    return 0 if found.same else 1


def _verify(options: argparse.Namespace) -> int:
    from protocol_cache.exchange.verify import verify

    found = verify(options.store, options.corpus, options.questions)
    if options.json:
        print(json.dumps(asdict(found), indent=1, ensure_ascii=False))
        return 1 if found.problems else 0
    checked = ", ".join(f"{name} of {count}" for name, count in found.checked.items())
    print(f"{options.store}: {found.records} records, {found.protocols} protocols; checked {checked or 'nothing'}")
    if not found.problems:
        print("no problem found")
        return 0
    print(f"{len(found.problems)} problems: " + ", ".join(f"{n} {check}" for check, n in found.by_check().items()))
    _first("problem", (f"{qid or 'the file'}: {check}: {reason}" for qid, check, reason in found.problems))
    return 1


def _first(what: str, lines: Iterable[str]) -> None:
    for number, line in enumerate(lines):
        if number == SHOWN:
            print("  ... (--json has all)")
            return
        print(f"  {what}: {line}")
