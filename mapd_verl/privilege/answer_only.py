"""Control: the gold answer and nothing of the way there."""

from __future__ import annotations

from collections.abc import Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class AnswerOnly(Source):
    """The gold answer, in the words of a protocol's last line."""

    name = "answer_only"

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        answer = rollouts[index].answer
        return Context(f"Answer: {answer}") if answer else None
