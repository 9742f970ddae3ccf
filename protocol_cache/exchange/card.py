"""The card of an exported cache: what is in it, who made it, what the gate said, what it cost."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from protocol_cache.exchange.entry import Entry

FORMAT = "mapd-protocols"
FORMAT_VERSION = 1


class CardMaker:
    """Sums up entries one by one. The card is the same for the same entries, whatever the time and the machine."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}
        self._sums: dict[str, float] = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens"), 0)
        self._usd = 0.0
        self._priced = 0
        self._records = 0
        self._candidates = 0
        self._logs = 0

    def add(self, entry: Entry, line: str) -> None:
        """Count one entry; ``line`` is its ``entry.to_line``."""
        record = entry.record
        self._digest.update(line.encode() + b"\n")
        self._records += 1
        self._logs += entry.log is not None
        self._candidates += len(entry.candidates)
        for name in self._sums:
            self._sums[name] += getattr(record.usage, name)
        if record.usage.cost_usd is not None:
            self._usd += record.usage.cost_usd
            self._priced += 1
        origin = record.provenance
        values = {
            "schema_versions": origin.schema_version,
            "teachers": origin.teacher_model,
            "prompt_versions": origin.prompt_version,
            "corpus_hashes": origin.corpus_hash,
            "sources": f"{record.source}/{record.split}",
            "status": record.status,
            "variants": record.variant,
            "task_types": record.protocol.get("task_type") if record.protocol else None,
            "reviews": entry.review.verdict if entry.review else None,
        }
        for name, value in values.items():
            if value is not None:
                self._counts[name][value] += 1
        for candidate in entry.candidates:
            if not candidate.passed:
                self._counts["failed_checks"][candidate.failed_check or "unknown"] += 1

    def card(self) -> dict[str, Any]:
        """The card so far, JSON-able. ``digest`` is the SHA-256 of the entries' lines in their order."""
        counts = {name: dict(sorted(counter.items())) for name, counter in self._counts.items()}
        failed = counts.pop("failed_checks")
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "records": self._records,
            "with_log": self._logs,
            "digest": self._digest.hexdigest(),
            **counts,
            "gate": {
                "candidates": self._candidates,
                "passed": self._candidates - sum(failed.values()),
                "failed_checks": failed,
            },
            "cost": {**self._sums, "usd": self._usd if self._priced else None, "records_without_price": self._unpriced},
        }

    @property
    def _unpriced(self) -> int:
        return self._records - self._priced


_COUNTED = (
    "schema_versions",
    "teachers",
    "prompt_versions",
    "corpus_hashes",
    "sources",
    "status",
    "variants",
    "task_types",
    "reviews",
    "failed_checks",
)


def card_text(card: dict[str, Any]) -> str:
    """The card for a person: one line for each of its parts."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} ({count:,})" for name, count in counts.items()) or "none"

    cost, gate = card["cost"], card["gate"]
    usd = "price unknown" if cost["usd"] is None else f"${cost['usd']:,.2f}"
    if cost["usd"] is not None and cost["records_without_price"]:
        usd += f" and {cost['records_without_price']:,} records without a price"
    lines = [
        f"records: {card['records']:,}, {card['with_log']:,} with their exploration log",
        *(f"{name.replace('_', ' ')}: {listed(card[name])}" for name in _COUNTED if name in card),
        f"gate: {gate['passed']:,} of {gate['candidates']:,} candidates passed",
        f"refused by: {listed(gate['failed_checks'])}",
        f"cost: {usd}, {cost['calls']:,} calls, {cost['prompt_tokens']:,} + {cost['completion_tokens']:,} tokens",
        f"digest: {card['digest']}",
    ]
    return "\n".join(lines)
