"""Whether a cache still holds what it claims: the file's integrity, and the gate's checks on every stored protocol."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import quote

from protocol_cache.exchange.entry import Entry, ExchangeError, entries
from protocol_cache.gate import grounding_problem
from protocol_cache.question_id import question_id
from protocol_cache.schema import SCHEMA_VERSION, schema_error
from protocol_cache.synthesis.questions import read_questions
from protocol_cache.synthesis.state import Gold


@dataclass
class Verified:
    """What was checked, and ``problems`` as (question id, check, reason), the file's own with an empty id.

    ``checked`` counts the protocols that each check could judge: grounding needs passages, the stored ones or a corpus;
    exact match needs the questions' gold answers; a leak is looked for with those, else with the protocol's own answer.
    """

    records: int = 0
    protocols: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def by_check(self) -> dict[str, int]:
        """Problems by check."""
        return dict(Counter(check for _, check, _ in self.problems))


def verify(cache: str | Path, corpus: str | Path | None = None, questions: str | Path | None = None) -> Verified:
    """Check the file and every record.

    Args:
        corpus: a Search-R1 corpus; facts are then checked against it and not against the stored passages.
        questions: the questions' file, for their gold answers.

    Raises:
        UserError: a file that cannot be read.
    """
    found = Verified()
    _check_file(Path(cache), found)
    golds = {question.question_id: gold for question, gold in read_questions(questions)} if questions else {}
    passages = _corpus_passages(Path(corpus), _named_passages(cache)) if corpus else None
    for entry in entries(cache):
        found.records += 1
        for check, reason in _record_problems(entry, golds, passages, found):
            found.problems.append((entry.record.question_id, check, reason))
    return found


def _check_file(path: Path, found: Verified) -> None:
    try:
        db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise ExchangeError(f"{path}: cannot open: {error}") from error
    try:
        for (line,) in db.execute("PRAGMA integrity_check(20)"):
            if line != "ok":
                found.problems.append(("", "file", str(line)))
        for table, row, parent, _ in db.execute("PRAGMA foreign_key_check"):
            found.problems.append(("", "file", f"table {table}, row {row}: belongs to nothing in {parent}"))
    except sqlite3.Error as error:
        raise ExchangeError(f"{path}: cannot check: {error}") from error
    finally:
        db.close()


def _record_problems(
    entry: Entry, golds: Mapping[str, Gold], corpus: Mapping[str, str] | None, found: Verified
) -> list[tuple[str, str]]:
    record, problems = entry.record, []
    try:
        own_id = question_id(record.question, record.source, record.split)
    except ValueError as error:
        problems.append(("question_id", str(error)))
    else:
        # A data set may bring ids of its own: only what looks like ours is compared.
        if len(record.question_id) == len(own_id) and record.question_id != own_id:
            problems.append(("question_id", f"this question's id is {own_id}"))
    passed = [c for c in entry.candidates if c.passed]
    if record.protocol is None:
        if passed:
            problems.append(("status", f"{record.status}, but a candidate passed the gate"))
        return problems
    protocol = record.protocol
    found.protocols += 1
    if entry.candidates and not passed:
        problems.append(("status", "passed, but every candidate was refused"))
    if record.provenance.schema_version != SCHEMA_VERSION:
        problems.append(("schema", f"version {record.provenance.schema_version!r}, this one reads {SCHEMA_VERSION!r}"))
        return problems
    found.checked["schema"] += 1
    if problem := schema_error(protocol):
        return [*problems, ("schema", problem)]
    stored = _stored_passages(entry)
    passages = corpus if corpus is not None else stored
    if passages is not None and "grounding_facts" in protocol:
        found.checked["grounding"] += 1
        if problem := grounding_problem(protocol, passages):
            problems.append(("grounding", problem))
    gold = golds.get(record.question_id)
    succeeded = protocol["variant"] == "succeeded"
    plan = protocol.get("reasoning_plan", [])
    if gold is not None and succeeded:
        found.checked["exact_match"] += 1
        if not gold.matches(protocol["answer"]):
            problems.append(("exact_match", "the answer is not the verified one"))
    if gold is None and succeeded:
        gold = Gold([protocol["answer"]])
    if gold is not None and plan:
        found.checked["leak"] += 1
        for number, step in enumerate(plan, start=1):
            if gold.leaks_into(step, record.question):
                problems.append(("leak", f"plan step {number} names the answer"))
                break
    return problems


def _stored_passages(entry: Entry) -> dict[str, str] | None:
    kept = entry.log.get("passages") if isinstance(entry.log, dict) else None
    return {p["id"]: p["contents"] for p in kept} if kept else None


def _named_passages(cache: str | Path) -> set[str]:
    return {
        fact["passage_id"]
        for entry in entries(cache, logs=False)
        if entry.record.protocol
        for fact in entry.record.protocol.get("grounding_facts", [])
    }


def _corpus_passages(path: Path, wanted: set[str]) -> dict[str, str]:
    """Those passages of a corpus that facts name; one pass, whatever its size."""
    if not path.is_file():
        raise ExchangeError(f"{path}: no such file")
    kept = {}
    with _lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                qid, contents = str(row["id"]), row["contents"]
            except (ValueError, KeyError, TypeError) as error:
                raise ExchangeError(f"{path}: line {number}: want a JSON object with id and contents") from error
            if qid in wanted:
                kept[qid] = contents
    return kept


def _lines(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
