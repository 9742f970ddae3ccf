"""What a source of privileged context sees, and what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Rollout:
    """One finished rollout, as a source may look at it.

    Attributes:
        group: id of the question's group in this step; rollouts of one question share it.
        question_id: stable id of the question across steps and files.
        score: its reward.
        response_ids: policy and observation tokens, ``[T]``.
        protocol: rendered protocol of the question, None if it has none (or if only its prompt came along).
        protocol_prompt_ids: the teacher's prompt with that protocol, when the agent loop has already made it.
        answer: a gold answer.
        is_padding: a row that verl added to fill a mini-batch.
    """

    group: str
    question_id: str
    score: float
    response_ids: Sequence[int] = ()
    protocol: str | None = None
    protocol_prompt_ids: Sequence[int] | None = None
    answer: str | None = None
    is_padding: bool = False


@dataclass(frozen=True)
class Context:
    """A privileged context: text for the prompt, or a prompt that already holds it.

    Empty text is a context too: the control whose teacher is the student.
    """

    text: str = ""
    prompt_ids: Sequence[int] | None = None


class Source(ABC):
    """Question -> context. Stateless across steps; sees the whole step's batch, so that a context may come
    from the rollout's own group or from another question."""

    name: ClassVar[str]

    @abstractmethod
    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        """The context for ``rollouts[index]``, or None when this source has nothing for it."""
