"""``stats`` and ``show``: what a cache holds."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from mapd_verl.errors import UserError
from protocol_cache.calls import read_accounts
from protocol_cache.reviews import read_reviews
from protocol_cache.store import ProtocolStore


def add(commands: Any) -> None:
    """Their parsers."""
    stats = commands.add_parser("stats", help="what a cache holds, what it cost, what the gate refused")
    stats.add_argument("store")
    stats.add_argument("--json", action="store_true")
    stats.set_defaults(run=_stats)

    show = commands.add_parser("show", help="one question: protocol, rendered text, verdicts, log")
    show.add_argument("store")
    show.add_argument("question_id", help="an id or its beginning")
    show.add_argument("--template", default="default", help="a shipped template or a .j2 file")
    show.add_argument("--log", action="store_true", help="the exploration log too")
    show.set_defaults(run=_show)


def _stats(options: argparse.Namespace) -> int:
    with ProtocolStore(options.store, readonly=True) as store:
        stats = store.stats()
    stats["accounts"] = read_accounts(options.store)
    stats["reviews"] = dict(Counter(review.verdict for review in read_reviews(options.store).values()))
    if options.json:
        print(json.dumps(stats, indent=1, ensure_ascii=False))
        return 0
    records = stats["records"]
    cost = "unknown" if stats["cost_usd"] is None else f"${stats['cost_usd']:.2f}"
    if stats["cost_usd"] is not None and stats["records_without_cost"]:
        cost += f" (and {stats['records_without_cost']} records without a known price)"
    print(f"{records} questions: {_counts(stats['status'])}")
    print(f"variants: {_counts(stats['variant'])}")
    if stats["reviews"]:
        print(f"reviewed: {_counts(stats['reviews'])}")
    print(f"candidates: {stats['candidates']}, refused by {_counts(stats['failed_checks'])}")
    if records:
        tokens = (stats["prompt_tokens"] + stats["completion_tokens"]) / records
        print(f"calls: {stats['calls']} ({stats['calls'] / records:.1f} a question), {tokens:,.0f} tokens a question")
    print(f"cost: {cost}")
    for entry in stats["accounts"]:
        tokens = f"{entry['prompt_tokens']} + {entry['completion_tokens']} tokens"
        kind = "" if entry["kind"] == "settled" else ", perhaps charged"
        where = f"{entry['model']} as {entry['role']}"
        print(f"paid: {where}: {entry['calls']} calls, {tokens}, ${entry['cost_usd']:.4f}{kind}")
    for reason, count in list(stats["failures"].items())[:10]:
        print(f"failed: {count} x {reason}")
    for origin in stats["provenance"]:
        price = "price unknown" if origin["cost_usd"] is None else f"${origin['cost_usd']:.2f}"
        print(
            f"{origin['records']} made by {origin['teacher_model']}, prompts {origin['prompt_version']}, "
            f"schema {origin['schema_version']}, corpus {origin['corpus_hash'][:12]}: {origin['passed']} passed, "
            f"{origin['calls']} calls, {origin['prompt_tokens']} + {origin['completion_tokens']} tokens, {price}"
        )
    return 0


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _show(options: argparse.Namespace) -> int:
    from protocol_cache.render import render

    with ProtocolStore(options.store, readonly=True) as store:
        matches = [qid for qid in store.statuses() if qid.startswith(options.question_id)]
        if len(matches) != 1:
            raise UserError(f"{options.store}: {len(matches)} questions with an id that begins {options.question_id!r}")
        record = store.get(matches[0])
        assert record is not None
        candidates, log = store.candidates(record.question_id), store.log(record.question_id)
    review = read_reviews(options.store).get(record.question_id)
    print(f"{record.question_id}  {record.source}/{record.split}  {record.status}\n{record.question}\n")
    if record.protocol:
        try:
            print(render(record.protocol, options.template))
        except ValueError as error:
            raise UserError(str(error)) from error
        print(f"\n{json.dumps(record.protocol, indent=1, ensure_ascii=False)}")
    else:
        print(f"no protocol: {record.reason}")
    for number, candidate in enumerate(candidates, start=1):
        print(f"candidate {number}: {'passed' if candidate.passed else candidate.reason}")
    if review:
        print(f"reviewed: {review.verdict}{': ' + review.note if review.note else ''}")
    usage = record.usage
    print(f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens, {usage.seconds:.1f} s")
    if options.log:
        print(json.dumps(log, indent=1, ensure_ascii=False))
    return 0
