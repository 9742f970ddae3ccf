"""What is kept of each evaluated question, one JSON object a line, and its means by kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mapd_verl.errors import UserError
from mapd_verl.evaluation.statistics import Interval, wilson

if TYPE_CHECKING:
    from mapd_verl.agent.episode import Episode
    from mapd_verl.data.rows import QuestionRow

ALL = "all"


@dataclass(frozen=True)
class Record:
    """One question's outcome. ``em`` is None for an excluded episode (its retrieval failed): no score is not 0."""

    question_id: str
    kind: str
    question: str
    targets: tuple[str, ...]
    prediction: str | None
    em: float | None
    f1: float | None
    status: str
    searches: int
    response_tokens: int
    policy_tokens: int
    turns: int
    valid_turns: int
    flags: tuple[str, ...] = ()
    segments: tuple[dict[str, str], ...] = ()
    """The trajectory as text: ``{"role": "policy" | "observation", "kind", "text"}`` in order."""
    privilege: str = "none"
    context: str = ""
    """The privileged text that stood in the prompt, if any."""

    @classmethod
    def from_episode(
        cls, row: QuestionRow, episode: Episode, reward_mode: str, privilege: str = "none", context: str = ""
    ) -> Record:
        """The record of a finished episode on one question."""
        from mapd_verl.agent.reward import f1, score

        segments = []
        for turn in episode.turns:
            segments.append({"role": "policy", "kind": turn.action, "text": turn.text})
            if turn.observation:
                segments.append({"role": "observation", "kind": turn.observation_kind, "text": turn.observation})
        return cls(
            question_id=row.question_id,
            kind=row.kind,
            question=row.question,
            targets=row.targets,
            prediction=episode.answer,
            em=None if episode.excluded else score(episode, row.targets, reward_mode),
            f1=None if episode.excluded else f1(episode.answer or "", row.targets, reward_mode),
            status=episode.status,
            searches=episode.searches,
            response_tokens=len(episode.response_ids),
            policy_tokens=sum(episode.response_mask),
            turns=len(episode.turns),
            valid_turns=episode.valid_turns,
            flags=tuple(sorted({failure.kind for failure in episode.failures})),
            segments=tuple(segments),
            privilege=privilege,
            context=context,
        )


@dataclass(frozen=True)
class Summary:
    """Means over the scored questions of one kind; ``excluded`` had no score."""

    kind: str
    em: Interval
    f1: float
    searches: float
    response_tokens: float
    policy_tokens: float
    answered: float
    """Share that gave an answer at all."""
    valid_turns: float
    """Share of turns with a complete action and nothing malformed."""
    excluded: int = 0
    flags: dict[str, int] = field(default_factory=dict)


def summarise(records: Sequence[Record]) -> list[Summary]:
    """A summary for all questions, then one for each kind in alphabetical order."""
    kinds = sorted({record.kind for record in records})
    groups = [(ALL, list(records)), *((k, [r for r in records if r.kind == k]) for k in kinds)]
    return [_summary(kind, group) for kind, group in groups]


def _summary(kind: str, records: Sequence[Record]) -> Summary:
    scored = [r for r in records if r.em is not None]
    turns = sum(r.turns for r in scored)
    flags: dict[str, int] = {}
    for record in records:
        for flag in record.flags:
            flags[flag] = flags.get(flag, 0) + 1
    return Summary(
        kind=kind,
        em=wilson(sum(r.em == 1.0 for r in scored), len(scored)),
        f1=_mean(r.f1 or 0.0 for r in scored),
        searches=_mean(r.searches for r in scored),
        response_tokens=_mean(r.response_tokens for r in scored),
        policy_tokens=_mean(r.policy_tokens for r in scored),
        answered=_mean(r.status == "answered" for r in scored),
        valid_turns=sum(r.valid_turns for r in scored) / turns if turns else float("nan"),
        excluded=len(records) - len(scored),
        flags=dict(sorted(flags.items(), key=lambda item: (-item[1], item[0]))),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def format_table(summaries: Sequence[Summary]) -> str:
    """The summaries as text for a terminal."""
    lines = [
        f"{'kind':<12}{'n':>6}  {'EM % [95%]':<20}{'F1 %':>6}{'searches':>10}{'tokens':>8}{'policy':>8}"
        f"{'answered':>10}{'valid tags':>12}{'excluded':>10}"
    ]
    for s in summaries:
        lines.append(
            f"{s.kind:<12}{s.em.n:>6}  {s.em!s:<20}{100 * s.f1:>6.1f}{s.searches:>10.2f}{s.response_tokens:>8.1f}"
            f"{s.policy_tokens:>8.1f}{100 * s.answered:>9.1f}%{100 * s.valid_turns:>11.1f}%{s.excluded:>10}"
        )
    return "\n".join(lines)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write JSON lines; the file appears whole or not at all."""
    import os

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            for record in records:
                out.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_records(path: Path) -> list[Record]:
    """Read what :func:`write_records` wrote.

    Raises:
        UserError: naming the file and line.
    """
    from mapd_verl.data.rows import read_table

    return [record_from_json(row, f"{path}: line {i}") for i, row in enumerate(read_table(path), 1)]


def record_from_json(row: dict[str, Any], where: str) -> Record:
    """One record; unknown keys are passed over, so that dumps may hold more.

    Raises:
        UserError: naming ``where`` and the missing field.
    """
    known = {name: row[name] for name in Record.__dataclass_fields__ if name in row}
    for name in ("targets", "flags", "segments"):
        if name in known:
            known[name] = tuple(known[name] or ())
    try:
        return Record(**known)
    except TypeError as error:
        raise UserError(f"{where}: not an evaluation record: {error}") from error
