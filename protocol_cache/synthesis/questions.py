"""Reading the questions to synthesise for: the one place where a file's gold answers are sealed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mapd_verl.agent.reward import coerce_targets
from mapd_verl.data.rows import read_table
from mapd_verl.errors import UserError
from protocol_cache.question_id import question_id
from protocol_cache.synthesis.state import Gold, Question


def read_questions(path: str | Path, limit: int | None = None) -> list[tuple[Question, Gold]]:
    """The questions of a Search-R1 ``.parquet`` or ``.jsonl`` file, those of equal id once.

    Read are ``question`` (or ``extra_info.question``), ``data_source``, ``extra_info.split``,
    ``reward_model.ground_truth.target`` (or ``golden_answers``), and ``question_id`` if there is one.

    Args:
        limit: only the first so many rows.

    Raises:
        UserError: naming the file, the row (counted from 1) and the field.
    """
    rows = read_table(path)
    if not rows:
        raise UserError(f"{path}: no rows")
    found: dict[str, tuple[Question, Gold]] = {}
    for number, row in enumerate(rows[:limit], start=1):
        question, gold = _read(row, f"{path}: row {number}")
        found.setdefault(question.question_id, (question, gold))
    return list(found.values())


def _read(row: Mapping[str, Any], where: str) -> tuple[Question, Gold]:
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    text = row.get("question") or extra.get("question")
    source, split = row.get("data_source"), extra.get("split")
    for name, value in (("question", text), ("data_source", source), ("extra_info.split", split)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {name}: want text, got {value!r}")
    assert isinstance(text, str) and isinstance(source, str) and isinstance(split, str)
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    truth = truth.get("target") if isinstance(truth, Mapping) else truth
    name = "reward_model.ground_truth.target"
    if truth is None:
        truth, name = row.get("golden_answers"), "golden_answers"
    if truth is None:
        raise UserError(f"{where}: no gold answers: neither reward_model.ground_truth.target nor golden_answers")
    try:
        gold = Gold(coerce_targets(truth, f"{where}: {name}"))
        qid = row.get("question_id") or question_id(text, source, split)
    except ValueError as error:
        raise UserError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    if not isinstance(qid, str):
        raise UserError(f"{where}: question_id: want text, got {qid!r}")
    return Question(qid, text.strip(), source, split), gold
