"""What a training run left behind, read leniently: every part may be missing, none may be silently wrong.

A run's folder is the trainer's ``default_local_dir``:

- ``metrics/*.jsonl`` (verl's file logger, one file an attempt) and ``tensorboard/`` (the same figures);
- ``validation/<step>.jsonl``, ``rollouts/<step>.jsonl``: verl's dumps with the agent loop's columns;
- ``before.jsonl`` (or the parent folder's), ``after.jsonl``: held-out questions, ``mapd eval --out``;
- ``hydra/.hydra/config.yaml`` or ``config.yaml``: the configuration;
- ``protocols.sqlite`` (or the parent folder's): the cache.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError
from mapd_verl.evaluation.records import Record, read_records

_PARTS = ("metrics", "tensorboard", "validation", "rollouts", "after.jsonl")


@dataclass
class Run:
    """One training run. ``metrics``: step -> name -> value; ``validation``: step -> records."""

    name: str
    folder: Path
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    validation: dict[int, list[Record]] = field(default_factory=dict)
    before: list[Record] = field(default_factory=list)
    after: list[Record] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    protocols: Path | None = None

    @property
    def arm(self) -> str:
        """The name without its seed: runs of one arm are means over seeds."""
        return re.sub(r"-seed\d+$", "", self.name)

    def series(self, *names: str) -> tuple[list[int], list[float]]:
        """Steps and values of the first of ``names`` that the run logged; empty if it logged none."""
        for name in names:
            found = [(step, values[name]) for step, values in sorted(self.metrics.items()) if name in values]
            if found:
                return [step for step, _ in found], [value for _, value in found]
        return [], []

    def rollout_steps(self) -> list[int]:
        """Steps whose training rollouts were dumped, in order."""
        return sorted(int(path.stem) for path in (self.folder / "rollouts").glob("*.jsonl") if path.stem.isdecimal())

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The raw dump of a step's training rollouts."""
        return _read_lines(self.folder / "rollouts" / f"{step}.jsonl")


def find_runs(folders: list[Path]) -> list[Path]:
    """The run folders among ``folders``: each itself, or else those right below it.

    Raises:
        UserError: naming a folder that is missing or holds no run.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        below = [folder] if _is_run(folder) else sorted(p for p in folder.iterdir() if p.is_dir() and _is_run(p))
        if not below:
            raise UserError(f"{folder}: no run here (looked for {', '.join(_PARTS)})")
        found += below
    return list(dict.fromkeys(found))


def _is_run(folder: Path) -> bool:
    return any((folder / part).exists() for part in _PARTS)


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        UserError: naming the file and line of anything that is there but cannot be read.
    """
    run = Run(name=folder.resolve().name, folder=folder)
    run.metrics = read_tensorboard(folder / "tensorboard")
    # The file logger has the same figures in double precision, so it wins.
    for path in sorted((folder / "metrics").glob("*.jsonl")):
        for row in _read_lines(path):
            values = {k: float(v) for k, v in row["data"].items() if _is_number(v)}
            run.metrics.setdefault(int(row["step"]), {}).update(values)
    for path in (folder / "validation").glob("*.jsonl"):
        if path.stem.isdecimal():
            rows = _read_lines(path)
            run.validation[int(path.stem)] = [record_from_dump(r, f"{path}: line {i}") for i, r in enumerate(rows, 1)]
    run.validation = dict(sorted(run.validation.items()))
    before, after = _first(folder, "before.jsonl"), folder / "after.jsonl"
    run.before = read_records(before) if before else []
    run.after = read_records(after) if after.is_file() else []
    run.config = _read_config(folder)
    run.protocols = _protocols(folder, run.config)
    return run


def read_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    """Scalars of all event files below ``folder``: step -> tag -> value; later files win. {} without files."""
    if not list(folder.rglob("events.out.tfevents.*")):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    steps: dict[int, dict[str, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path), size_guidance={SCALARS: 0})
        events.Reload()
        for tag in events.Tags()[SCALARS]:
            for event in events.Scalars(tag):
                steps.setdefault(event.step, {})[tag] = event.value
    return dict(sorted(steps.items()))


def record_from_dump(row: dict[str, Any], where: str) -> Record:
    """A line of verl's dump as a record; lines without the agent loop's columns keep text and score only.

    Raises:
        UserError: naming ``where``, for a line that is no dump.
    """
    if "score" not in row:
        raise UserError(f"{where}: not a line of verl's dump (no score)")
    truth = row.get("gts")
    truth = truth.get("target") if isinstance(truth, dict) else truth
    targets = _from_json(row.get("targets"), [truth] if isinstance(truth, str) else list(truth or []))
    segments = _from_json(row.get("segments"), [{"role": "policy", "kind": "none", "text": str(row.get("output", ""))}])
    return Record(
        question_id=str(row.get("question_id", row.get("uid", ""))),
        kind=str(row.get("kind", "unknown")),
        question=str(row.get("question", row.get("input", ""))),
        targets=tuple(map(str, targets)),
        prediction=row.get("prediction") or None,
        em=float(row.get("acc", row["score"])),
        f1=row.get("f1"),
        status=str(row.get("status", "unknown")),
        searches=int(row.get("searches") or 0),
        response_tokens=int(row.get("response_tokens") or 0),
        policy_tokens=int(row.get("policy_tokens") or 0),
        turns=int(row.get("turns") or 0),
        valid_turns=int(row.get("valid_turns") or 0),
        flags=tuple(_from_json(row.get("flags"), [])),
        segments=tuple(segments),
        privilege=str(row.get("privilege_source") or "none"),
        context=str(row.get("context") or ""),
    )


def _from_json(value: Any, default: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                continue  # the line that an interruption tore
            raise UserError(f"{path}: line {number}: not JSON: {error.msg}") from error
    return rows


def _first(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder.resolve().parent / name):
        if path.is_file():
            return path
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    import yaml

    for path in (folder / "hydra/.hydra/config.yaml", folder / "config.yaml"):
        if path.is_file():
            try:
                loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise UserError(f"{path}: not valid YAML") from error
            return loaded if isinstance(loaded, dict) else {}
    return {}


def _protocols(folder: Path, config: dict[str, Any]) -> Path | None:
    named = ((config.get("mapd") or {}).get("protocols") or {}).get("path")
    candidates = [Path(named)] if named else []
    beside = _first(folder, "protocols.sqlite")
    return next((path for path in [*candidates, beside] if path is not None and path.is_file()), None)
