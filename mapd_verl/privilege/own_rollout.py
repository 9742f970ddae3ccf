"""The self-rollout baseline (OPSD), and the fallback of MAPD: a successful rollout of the same group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class OwnRollout(Source):
    """One of the group's own successful rollouts, policy and observation tokens as text.

    The rule: going round the group from the sample, the first *other* success; the sample itself only if it
    is the group's single success; nothing if the group has none. Neighbours so read different successes
    where there are several, and nothing depends on chance.
    """

    name = "own_rollout"

    def __init__(self, decode: Callable[[Sequence[int]], str], success_score: float) -> None:
        self._decode = decode
        self._success_score = success_score

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        me = rollouts[index]
        group = [i for i, other in enumerate(rollouts) if other.group == me.group and not other.is_padding]
        start = group.index(index)
        # The sample itself comes last.
        for i in group[start + 1 :] + group[: start + 1]:
            if rollouts[i].score >= self._success_score:
                return Context(self._decode(rollouts[i].response_ids))
        return None
