"""Control: another question's protocol, in this question's prompt.

Without this arm no claim about protocols can be tested: a different problem's solution stays a
competitive context for self-distillation (arXiv 2608.09228).
"""

from __future__ import annotations

from collections.abc import Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class Shuffled(Source):
    """The protocol of the next question of the batch that is a different one and has a protocol.

    All rollouts of a group read the same one. Nothing if the batch holds no other protocol. Needs the
    protocols' text, not only ready-made prompts.
    """

    name = "shuffled"

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        me = rollouts[index]
        groups = list(dict.fromkeys(other.group for other in rollouts if not other.is_padding))
        first_of = {other.group: other for other in reversed(rollouts)}
        start = groups.index(me.group)
        for group in groups[start + 1 :] + groups[:start]:
            other = first_of[group]
            if other.question_id != me.question_id and other.protocol:
                return Context(other.protocol)
        return None
