"""One HTML page about one run or several: ``python -m mapd_verl.evaluation.report --runs DIR... --out report.html``.

The page needs nothing but itself: pictures are inline, there is no script and no outside resource.
"""

from __future__ import annotations

import argparse
import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError, exit_with, one_line_errors
from mapd_verl.evaluation.curves import Curve, draw_curves
from mapd_verl.evaluation.records import ALL, Record, Summary, summarise
from mapd_verl.evaluation.runs import Run, find_runs, load_run
from mapd_verl.evaluation.statistics import Interval, mcnemar, mean_over_seeds, paired_difference
from mapd_verl.evaluation.trajectories import show_trajectories


@dataclass(frozen=True)
class Change:
    """One kind of question before and after training, over the questions that both scored."""

    kind: str
    before: Summary
    after: Summary
    gain: Interval
    p: float


@dataclass(frozen=True)
class RunTable:
    """A run's outcome; ``what`` says on which questions."""

    run: Run
    what: str
    changes: tuple[Change, ...]


def before_and_after(run: Run) -> RunTable | None:
    """Held-out questions before and after if both were evaluated, else the first and last validation; None
    where there are not two evaluations."""
    if run.before and run.after:
        return RunTable(run, f"{len(run.after)} held-out questions", _changes(run.before, run.after))
    steps = list(run.validation)
    if len(steps) >= 2 and run.validation[steps[0]] and run.validation[steps[-1]]:
        first, last = run.validation[steps[0]], run.validation[steps[-1]]
        return RunTable(
            run, f"{len(last)} validation questions, step {steps[0]} and step {steps[-1]}", _changes(first, last)
        )
    return None


def _changes(before: Sequence[Record], after: Sequence[Record]) -> tuple[Change, ...]:
    first, second = ({s.kind: s for s in summarise(records)} for records in (before, after))
    changes = []
    for kind in [k for k in first if k in second]:
        old = {r.question_id: r.em for r in before if kind in (ALL, r.kind) and r.em is not None}
        new = {r.question_id: r.em for r in after if kind in (ALL, r.kind) and r.em is not None}
        both = [qid for qid in old if qid in new]
        a, b = [old[q] for q in both], [new[q] for q in both]
        gain = paired_difference(a, b)
        changes.append(Change(kind, first[kind], second[kind], gain, mcnemar([x == 1 for x in a], [x == 1 for x in b])))
    return tuple(changes)


@dataclass(frozen=True)
class ArmRow:
    """One arm: EM (%) of each seed after training, its mean over seeds and the mean gain, by the same questions."""

    arm: str
    after: tuple[float, ...]
    mean: Interval
    gain: Interval


def compare_arms(tables: Sequence[RunTable]) -> list[ArmRow]:
    """Arms over their seeds, in the order of their first run."""
    rows = []
    for arm in dict.fromkeys(table.run.arm for table in tables):
        totals = [t.changes[0] for t in tables if t.run.arm == arm and t.changes]
        after = tuple(change.after.em.mean for change in totals)
        gains = [change.gain.mean for change in totals]
        rows.append(ArmRow(arm, after, mean_over_seeds(after, 0.0, 1.0), mean_over_seeds(gains)))
    return rows


def write_report(
    folders: Sequence[Path], out: Path, trajectories: int = 10, template: str = "compact", title: str | None = None
) -> list[Path]:
    """Write the page to ``out`` and its pictures to ``curves/`` beside it; returns all files written.

    Raises:
        UserError: naming the folder or file that is missing or cannot be read.
    """
    runs = [load_run(folder) for folder in find_runs(list(folders))]
    curves = draw_curves(runs)
    tables = [table for run in runs if (table := before_and_after(run))]
    if not curves and not tables:
        raise UserError(f"{', '.join(map(str, folders))}: no metrics and no evaluations to report")
    shown = _run_to_show(runs)
    facts = [_facts(run) for run in runs]
    page = render_page(
        title=title or f"Search agent: {', '.join(run.name for run in runs)}",
        runs=facts,
        fact_names=list(dict.fromkeys(name for run in facts for name in run["facts"])),
        tables=tables,
        arms=compare_arms(tables) if len(tables) > 1 else [],
        curves=[_inline(curve) for curve in curves],
        shown_run=shown.name,
        shown=show_trajectories(shown, trajectories, template) if trajectories else [],
    )
    files = {out: page.encode()}
    for curve in curves:
        files[out.parent / "curves" / f"{curve.name}.png"] = curve.png["light"]
    for path, data in files.items():
        _write(path, data)
    return list(files)


def _run_to_show(runs: Sequence[Run]) -> Run:
    """The first run whose rollouts had a privileged teacher, else the first with rollouts, else the first."""
    dumped = [run for run in runs if run.rollout_steps()]
    taught = [run for run in dumped if any(name.startswith("mapd/source/") for v in run.metrics.values() for name in v)]
    return [*taught, *dumped, *runs][0]


def _facts(run: Run) -> dict[str, Any]:
    """The few settings that tell runs apart, and where the run got to."""
    mapd = run.config.get("mapd") or {}
    objective, privilege = mapd.get("objective") or {}, mapd.get("privilege") or {}
    steps, seconds = run.series("perf/time_per_step", "timing_s/step")
    rollout = (run.config.get("actor_rollout_ref") or {}).get("rollout") or {}
    data = run.config.get("data") or {}
    facts: list[tuple[str, Any]] = [
        ("objective", objective.get("name")),
        ("lambda", objective.get("weight")),
        ("privileged context", privilege.get("context")),
        ("fallback", privilege.get("fallback")),
        ("questions × rollouts a step", f"{data.get('train_batch_size')} × {rollout.get('n')}" if data else None),
        ("steps", max(run.metrics) if run.metrics else None),
        ("seconds a step", f"{sum(seconds) / len(seconds):.1f}" if steps else None),
        ("protocol cache", run.protocols.name if run.protocols else None),
    ]
    return {"name": run.name, "facts": {name: value for name, value in facts if value is not None}}


def _inline(curve: Curve) -> dict[str, str]:
    uris = {theme: "data:image/png;base64," + base64.b64encode(png).decode() for theme, png in curve.png.items()}
    return {"name": curve.name, "title": curve.title, "caption": curve.caption, **uris}


def render_page(**values: Any) -> str:
    """The page's HTML; every value is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mapd_verl.evaluation"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = lambda value: "–" if value != value else f"{100 * value:.1f}"
    environment.filters["number"] = lambda value: "–" if value != value else f"{value:.2f}"
    environment.filters["p_value"] = lambda value: "< 0.001" if value < 0.001 else f"{value:.3f}"
    return environment.get_template("report.html.j2").render(ALL=ALL, **values)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@one_line_errors("mapd report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and say where it is."""
    parser = argparse.ArgumentParser(prog="mapd report", description="One HTML page about one run or several.")
    parser.add_argument(
        "--runs", type=Path, nargs="+", required=True, metavar="DIR", help="run folders, or their parent"
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--trajectories", type=int, default=10, help="how many to show (default: 10)")
    parser.add_argument("--protocol-template", default="compact", help="how protocols read (default: compact)")
    parser.add_argument("--title")
    options = parser.parse_args(arguments)
    if options.trajectories < 0:
        raise UserError(f"--trajectories: want 0 or more, got {options.trajectories}")
    files = write_report(options.runs, options.out, options.trajectories, options.protocol_template, options.title)
    print(f"report: {files[0]} ({files[0].stat().st_size / 1e6:.1f} MB), {len(files) - 1} pictures in curves/")
    return 0


if __name__ == "__main__":
    exit_with(main)
