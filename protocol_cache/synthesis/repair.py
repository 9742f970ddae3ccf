"""The repair agent: the only one that sees the gold answer, and the one that cannot say anything freely."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, final

from protocol_cache.schema import compile_schema
from protocol_cache.synthesis.state import Exploration, Gold, Question

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

    from protocol_cache.synthesis.llm import Account, Teacher


@dataclass(frozen=True)
class Diagnosis:
    """All that leaves the repair agent: one of two words, and ids that existed before it was asked."""

    kind: Literal["expression", "search"]
    suspect_subtasks: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _schema() -> Validator:
    return compile_schema(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["expression", "search"]},
                "suspect_subtasks": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["kind"],
        }
    )


@final
class RepairAgent:
    """See the role prompt ``repair``."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher

    async def diagnose(
        self, question: Question, gold: Gold, candidate: str | None, exploration: Exploration, account: Account
    ) -> Diagnosis | None:
        """Why ``candidate`` does not match, or None if the teacher's reply was of no use.

        The teacher's words, even those that an error would quote, are dropped here: they may hold the gold.

        Raises:
            TeacherUnreachable: the request itself failed after all retries.
        """
        from protocol_cache.synthesis.llm import TeacherError, TeacherUnreachable

        earlier = [event["kind"] for event in exploration.events if event["event"] == "repair"]
        inputs = {
            "question": question.text,
            "reference_answers": list(gold.reveal_to(self)),
            "candidate": candidate,
            "findings": [finding.brief() for finding in exploration.findings.values()],
            "earlier_diagnoses": earlier,
        }
        try:
            reply = await self._teacher.ask("repair", inputs, _schema(), account)
        except TeacherUnreachable:
            raise TeacherUnreachable("teacher as repair: no answer after all tries") from None
        except TeacherError:
            exploration.note("repair", kind=None, problem="the repair agent gave no usable reply")
            return None
        named = reply.get("suspect_subtasks") or ()
        diagnosis = Diagnosis(reply["kind"], tuple(i for i in exploration.findings if i in named))
        exploration.note("repair", kind=diagnosis.kind, suspect_subtasks=list(diagnosis.suspect_subtasks))
        return diagnosis
