"""No context: the rollout carries no distillation term."""

from __future__ import annotations

from collections.abc import Sequence

from mapd_verl.privilege.base import Context, Rollout, Source


class NoSource(Source):
    """Never has a context; as the only source it turns MAPD into GRPO, row by row."""

    name = "none"

    def context(self, index: int, rollouts: Sequence[Rollout]) -> Context | None:
        return None
