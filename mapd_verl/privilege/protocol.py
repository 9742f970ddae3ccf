"""MAPD's context: the question's own protocol."""

from __future__ import annotations

from collections.abc import Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class Protocol(Source):
    """The protocol of the question; nothing for a question whose protocol is missing or was rejected."""

    name = "protocol"

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        rollout = rollouts[index]
        if rollout.protocol_prompt_ids is not None:
            return Context(prompt_ids=rollout.protocol_prompt_ids)
        return Context(rollout.protocol) if rollout.protocol else None
