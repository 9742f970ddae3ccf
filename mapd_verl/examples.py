"""One record per rollout, for the JSONL files that verl writes at validation and after each step.

verl dumps input, output, score and the queue's key. This adds, by that key, what a reader of the files
asks next: which question, of which kind, what was predicted, how many searches, which context the teacher
read. The text keeps the agent's tags, which verl's own dump drops when they are special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mapd_verl.metrics import searches_of
from mapd_verl.privilege import Context
from mapd_verl.verl_seams import tq

ANSWER = 2
_FIELDS = [
    "question_id",
    "question",
    "extra_info",
    "responses",
    "response_mask",
    "turn_ids",
    "action_ids",
    "extra_fields",
]


class ExampleRecorder:
    """Collects records while batches are in the queue, hands them out when verl dumps."""

    def __init__(self) -> None:
        self.decode: Callable[[Sequence[int]], str] = lambda ids: ""
        self._records: dict[str, dict[str, Any]] = {}
        self._contexts: dict[str, tuple[str, str | None]] = {}

    def note_context(self, key: str, source: str, context: Context | None) -> None:
        """Remember the source that a rollout's context came from, and its text where there is one."""
        self._contexts[key] = (source, context.text if context is not None else None)

    def note_batch(self, batch: Any) -> None:
        """Read what the records need of a batch (verl's ``KVBatchMeta``) out of the queue."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS)
        responses = data["responses"].unbind()
        columns = {name: _rows(data, name, len(batch)) for name in _FIELDS if name != "responses"}
        for i, key in enumerate(batch.keys):
            row = {name: column[i] for name, column in columns.items()}
            self._records[key] = self._record(responses[i].tolist(), row) | self._context_of(key)

    @contextmanager
    def listening(self, replay_buffer: Any) -> Iterator[None]:
        """Within, every validation batch drawn from ``replay_buffer`` is noted before verl clears it."""
        stock = replay_buffer.sample

        def sample(*args: Any, **kwargs: Any) -> Any:
            batch, metrics = stock(*args, **kwargs)
            self.note_batch(batch)
            return batch, metrics

        replay_buffer.sample = sample
        try:
            yield
        finally:
            del replay_buffer.sample

    def columns(self, keys: Sequence[str], gts: Sequence[Any]) -> dict[str, list[Any]]:
        """The noted records of ``keys`` as columns of verl's dump, each as long as ``keys``; forgets them.

        Args:
            gts: ``ground_truth`` of each row, for the column ``targets``.
        """
        records = [self._records.pop(key, {}) for key in keys]
        names = list(dict.fromkeys(name for record in records for name in record))
        columns = {name: [record.get(name) for record in records] for name in names}
        columns["targets"] = [_targets(gt) for gt in gts]
        return columns

    def _context_of(self, key: str) -> dict[str, Any]:
        if key not in self._contexts:
            return {}
        source, text = self._contexts.pop(key)
        return {"privilege_source": source, "privilege_context": text}

    def _record(self, response: list[int], row: dict[str, Any]) -> dict[str, Any]:
        extra_info = row["extra_info"] if isinstance(row["extra_info"], dict) else {}
        extra_fields = row["extra_fields"] if isinstance(row["extra_fields"], dict) else {}
        reported = extra_fields.get("reward_extra_info") or {}
        record = {
            "question_id": row["question_id"],
            "question": row["question"] or extra_info.get("question"),
            "kind": extra_info.get("kind"),
            "output": self.decode(response),
            "response_tokens": len(response),
        }
        if row["turn_ids"] is not None and row["action_ids"] is not None:
            record["searches"] = searches_of(row["turn_ids"], row["action_ids"])
            spoken = [t for t, a in zip(response, row["action_ids"], strict=True) if a == ANSWER]
            record["prediction"] = reported.get("prediction", _inside_tags(self.decode(spoken)))
        return record


def _inside_tags(text: str) -> str | None:
    """The answer of ``<answer> x </answer>``; None if nothing was answered."""
    body = text.partition("<answer>")[2] if "<answer>" in text else text
    return body.partition("</answer>")[0].strip() or None


def _targets(ground_truth: Any) -> list[str]:
    target = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    if target is None:
        return []
    return [target] if isinstance(target, str) else [str(entry) for entry in target]


def _rows(data: Any, name: str, rows: int) -> list[Any]:
    """A field that may be absent, as plain Python values, one a row."""
    if name not in data:
        return [None] * rows
    value = data[name]
    if getattr(value, "is_nested", False):
        return [row.tolist() for row in value.unbind()]
    return [getattr(entry, "data", entry) for entry in (value.tolist() if hasattr(value, "tolist") else list(value))]
