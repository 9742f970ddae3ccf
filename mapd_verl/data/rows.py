"""One dataset row, checked: what every reader of a Search-R1 parquet needs, or one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError
from protocol_cache.question_id import question_id


@dataclass(frozen=True)
class QuestionRow:
    """A question as the agent meets it. ``kind`` is ``extra_info.kind``, or the data source where there is none."""

    question_id: str
    question: str
    kind: str
    data_source: str
    messages: tuple[dict[str, str], ...]
    targets: tuple[str, ...]


def read_row(row: Mapping[str, Any], where: str) -> QuestionRow:
    """Check one row in the Search-R1 schema.

    ``question_id`` is taken from its column, else made from question, data source and split.

    Args:
        where: file and row number, for messages.

    Raises:
        UserError: naming ``where`` and the field.
    """
    from mapd_verl.agent.reward import coerce_targets

    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    messages = _messages(row.get("prompt"), where)
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise UserError(f"{where}: data_source: want text, got {source!r}")
    question = row.get("question") or extra.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where}: question: want text, got {row.get('question')!r}")
    try:
        targets = coerce_targets(_ground_truth(row, where), f"{where}: reward_model.ground_truth.target")
    except ValueError as error:
        raise UserError(str(error)) from error
    qid = _question_id(row, extra, question, source, where)
    return QuestionRow(qid, question, str(extra.get("kind") or source), source, messages, tuple(targets))


_ID_COLUMNS = ("question_id", "question", "data_source", "extra_info")


def id_columns(names: Iterable[str]) -> list[str]:
    """Those columns of a table that its question ids come from."""
    present = set(names)
    return ["question_id"] if "question_id" in present else [name for name in _ID_COLUMNS if name in present]


def question_ids(rows: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """The id of each row, as :func:`read_row` finds it, from the columns of :func:`id_columns` alone.

    Raises:
        UserError: naming ``where`` and the row, counted from 1.
    """
    found = []
    for number, row in enumerate(rows, 1):
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        question = row.get("question") or extra.get("question") or ""
        found.append(_question_id(row, extra, question, row.get("data_source") or "", f"{where}: row {number}"))
    return found


def _question_id(row: Mapping[str, Any], extra: Mapping[str, Any], question: str, source: str, where: str) -> str:
    qid = row.get("question_id") or extra.get("question_id")
    if qid is None:
        split = extra.get("split")
        if not split:
            raise UserError(f"{where}: question_id: missing, and there is no extra_info.split to make one from")
        try:
            qid = question_id(question, source, str(split))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
    if not isinstance(qid, str):
        raise UserError(f"{where}: question_id: want text, got {qid!r}")
    return qid


def _messages(prompt: Any, where: str) -> tuple[dict[str, str], ...]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple) or not prompt:
        raise UserError(f"{where}: prompt: want a list of chat messages, got {prompt!r}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: prompt: want messages with role and content, got {message!r}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise UserError(f"{where}: prompt: message content must be text, got {message.get('content')!r}")
    if not any(message["role"] == "user" for message in prompt):
        raise UserError(f"{where}: prompt: no message of role user")
    return tuple({"role": m["role"], "content": m["content"]} for m in prompt)


def _ground_truth(row: Mapping[str, Any], where: str) -> Any:
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if truth is None:
        raise UserError(f"{where}: reward_model.ground_truth.target: missing")
    return truth


def read_questions(path: str | Path, limit: int | None = None) -> list[QuestionRow]:
    """The rows of a parquet file (or JSON lines), each checked; only the first ``limit`` where one is given.

    Raises:
        UserError: naming the file, and the row (counted from 1) where one is bad.
    """
    return list(iter_questions(path, limit))


def iter_questions(path: str | Path, limit: int | None = None) -> Iterator[QuestionRow]:
    """:func:`read_questions` one by one: 170,000 rows of a Search-R1 file need not be in memory at once."""
    number = 0
    for number, row in enumerate(islice(iter_table(path), limit), 1):
        yield read_row(row, f"{path}: row {number}")
    if not number:
        raise UserError(f"{path}: no rows")


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """All rows of :func:`iter_table`."""
    return list(iter_table(path))


def iter_table(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a ``.parquet``, ``.jsonl`` or ``.json`` (one object a line) file as plain Python values.

    Raises:
        UserError: naming the file, and the line of a JSON error.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from _json_rows(path)
    else:
        raise UserError(f"{path}: want a .parquet or .jsonl file")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}: line {number}: not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}: line {number}: want a JSON object, got {type(row).__name__}")
            yield row
