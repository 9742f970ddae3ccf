"""Before and after, by kind and by arm, as data, as terminal text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mapd_verl.evaluation.records import ALL, Record, read_records, summarise
from mapd_verl.evaluation.statistics import Interval, mcnemar, mean_over_seeds, paired_difference
from mapd_verl.quickstart.stages import Arm


def outcome(before: Path, after: Mapping[Arm, Path]) -> dict[str, Any]:
    """Exact match on the held-out questions before and after, with 95% intervals.

    Returns JSON-ready data: ``before`` by kind; ``runs`` with ``arm``, ``seed``, ``after`` by kind,
    ``gain`` (paired bootstrap over questions) and McNemar's ``p``; ``arms`` with means over seeds.
    """
    base = read_records(before)
    runs: list[dict[str, Any]] = []
    for arm, path in after.items():
        records = read_records(path)
        first, second = _paired(base, records)
        runs.append(
            {
                "arm": arm.name,
                "seed": arm.seed,
                "after": _by_kind(records),
                "gain": asdict(paired_difference(first, second)),
                "p": mcnemar([v == 1 for v in first], [v == 1 for v in second]),
            }
        )
    arms = {}
    for name in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == name]
        arms[name] = {
            kind: asdict(mean_over_seeds([run["after"][kind]["em"]["mean"] for run in mine], 0.0, 1.0))
            for kind in mine[0]["after"]
        }
    return {"before": _by_kind(base), "runs": runs, "arms": arms}


def _by_kind(records: list[Record]) -> dict[str, dict[str, Any]]:
    return {summary.kind: asdict(summary) for summary in summarise(records)}


def _paired(before: list[Record], after: list[Record]) -> tuple[list[float], list[float]]:
    """EM of the questions that both scored, in one order."""
    second = {record.question_id: record.em for record in after}
    pairs = [(r.em, second.get(r.question_id)) for r in before]
    scored = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in scored], [b for _, b in scored]


def text(data: dict[str, Any]) -> str:
    """For a terminal: a line a kind, a column a run."""
    runs = data["runs"]
    heads = ["before", *(f"{run['arm']} seed {run['seed']}" for run in runs)]
    lines = [f"{'EM % [95%]':<12}{'n':>5}  " + "".join(f"{head:<20}" for head in heads)]
    for kind, entry in data["before"].items():
        cells = [_cell(entry["em"]), *(_cell(run["after"][kind]["em"]) for run in runs)]
        lines.append(f"{kind:<12}{entry['em']['n']:>5}  " + "".join(f"{cell:<20}" for cell in cells))
    for name, key in (("searches", "searches"), ("tokens", "response_tokens")):
        cells = [data["before"][ALL][key], *(run["after"][ALL][key] for run in runs)]
        lines.append(f"{name:<12}{'':>5}  " + "".join(f"{cell:<20.2f}" for cell in cells))
    for run in runs:
        lines.append(f"gain of {run['arm']} seed {run['seed']}: {_cell(run['gain'])} points, McNemar p {run['p']:.2g}")
    if len(data["arms"]) * len(runs) > 1:
        for name, kinds in data["arms"].items():
            lines.append(f"{name} over {kinds[ALL]['n']} seeds: {_cell(kinds[ALL])}")
    return "\n".join(lines)


def markdown(data: dict[str, Any]) -> str:
    """The README's table: kinds down, before and each arm's mean over its seeds across."""
    arms = data["arms"]
    seeds = {name: kinds[ALL]["n"] for name, kinds in arms.items()}
    heads = ["before", *(f"{name} ({n} seed{'s' if n > 1 else ''})" for name, n in seeds.items())]
    lines = ["| EM % | n | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for kind, entry in data["before"].items():
        cells = [_cell(entry["em"]), *(_cell(arms[name][kind]) for name in arms)]
        lines.append(f"| {kind} | {entry['em']['n']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(interval: dict[str, Any]) -> str:
    whole = Interval(**interval)
    return f"{100 * whole.mean:.1f}" if math.isnan(whole.low) else str(whole)
