"""Questions meet their protocols: the join by question id, without verl and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mapd_verl.errors import UserError

#: What happens to a training question without a usable protocol: the own-rollout baseline of the recipe
#: (``privilege.fallback``), out of the training set, or a refusal to start.
MISSING_POLICIES = ("fallback", "skip", "error")


@dataclass(frozen=True)
class Join:
    """``texts`` and ``task_types`` hold the rendered protocol of each question that has one and its task type, by id.

    ``passed``, ``rejected`` (the gate refused it), ``failed`` (synthesis gave nothing) and ``missing`` (not in
    the cache) count the distinct questions asked for.
    """

    texts: dict[str, str]
    task_types: dict[str, str]
    passed: int
    rejected: int
    failed: int
    missing: int

    def __str__(self) -> str:
        total = self.passed + self.rejected + self.failed + self.missing
        return (
            f"{self.passed} of {total} questions have a protocol "
            f"({self.rejected} rejected, {self.failed} failed, {self.missing} not in the cache)"
        )


def join_protocols(path: str | Path, question_ids: Sequence[str], template: str = "compact") -> Join:
    """Look the questions up in the cache and render what passed the gate.

    Raises:
        UserError: if the cache cannot be read, was written for another protocol schema, or the template is unknown.
    """
    from protocol_cache.render import render
    from protocol_cache.schema import SCHEMA_VERSION
    from protocol_cache.store import ProtocolStore

    ids = list(dict.fromkeys(question_ids))
    with ProtocolStore(path, readonly=True) as store:
        records = store.get_many(ids)
    texts: dict[str, str] = {}
    task_types: dict[str, str] = {}
    counts = {"passed": 0, "rejected": 0, "failed": 0}
    for qid, record in records.items():
        if record.provenance.schema_version != SCHEMA_VERSION:
            raise UserError(
                f"{path}: question {qid}: protocol schema {record.provenance.schema_version!r}, "
                f"this version reads {SCHEMA_VERSION!r}; synthesize again"
            )
        counts[record.status] += 1
        if record.protocol is not None:
            task_types[qid] = record.protocol["task_type"]
            try:
                texts[qid] = render(record.protocol, template)
            except ValueError as error:
                raise UserError(str(error)) from error
    return Join(texts, task_types, **counts, missing=len(ids) - len(records))
