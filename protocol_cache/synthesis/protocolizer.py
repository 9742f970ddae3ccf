"""The protocolizer: compiles an exploration into the draft of a protocol (stage B)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from protocol_cache.schema import compile_schema
from protocol_cache.synthesis.state import Exploration, Limits, Question

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

    from protocol_cache.synthesis.llm import Account, Teacher


@lru_cache(maxsize=1)
def _any_object() -> Validator:
    # The gate judges the fields: a draft that fails its schema check is a candidate like any other, and is kept.
    return compile_schema({"type": "object"})


class Protocolizer:
    """See the role prompt ``protocolizer``."""

    def __init__(self, teacher: Teacher, limits: Limits) -> None:
        self._teacher = teacher
        self._limits = limits

    async def write(
        self,
        question: Question,
        exploration: Exploration,
        answer: str | None,
        previous: dict[str, Any] | None,
        account: Account,
    ) -> dict[str, Any]:
        """A draft of the variant "succeeded" for a verified ``answer``, of "evidence" for None.

        Args:
            previous: the last draft and why it was refused, as ``{"draft": ..., "reason": ...}``.

        Raises:
            TeacherError: no JSON object after the re-asks.
        """
        inputs: dict[str, Any] = {
            "variant": "succeeded" if answer is not None else "evidence",
            "question": question.text,
            "task_type": exploration.task_type,
            "findings": [{**f.brief(), "passage_ids": f.passage_ids} for f in exploration.findings.values()],
            "passages": self._passages(exploration),
            "previous": previous,
        }
        if answer is not None:
            inputs["answer"] = answer
        return await self._teacher.ask("protocolizer", inputs, _any_object(), account)

    def _passages(self, exploration: Exploration) -> list[dict[str, str]]:
        cited = [i for f in exploration.findings.values() for i in f.passage_ids]
        order = list(dict.fromkeys([*cited, *exploration.passages]))[: self._limits.passages]
        return [{"id": i, "contents": exploration.passages[i].contents} for i in order]
