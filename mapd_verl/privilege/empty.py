"""Control: the teacher runs, but reads nothing more than the student."""

from __future__ import annotations

from collections.abc import Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class Empty(Source):
    """The empty context for every rollout. With a live teacher its divergence is 0, or alignment is broken."""

    name = "empty"

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        return Context("")
