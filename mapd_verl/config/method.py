"""The rest of a method's row: whose probabilities the teacher's are, how lambda moves, and which tokens count."""

from __future__ import annotations

from dataclasses import dataclass

#: Names of ``mapd_verl.teachers``, spelled out so that reading a recipe needs no torch.
TEACHER_KINDS = ("live", "snapshot", "ema", "fixed", "external")
SCHEDULES = ("constant", "linear", "cosine")
TASK_TYPES = ("single_hop", "multi_hop", "comparison", "others", "no_protocol")
ACTIONS = ("think", "search", "answer")


@dataclass
class TeacherConfig:
    """Whose weights read the privileged context. Bad values raise ``ValueError`` naming the key."""

    kind: str = "live"
    """``live``: the policy at this very moment (MAPD). ``snapshot``: the policy before this step's update. ``ema``: a
    moving average of the policy. ``fixed``: the policy before training. ``external``: another checkpoint."""

    ema_decay: float = 0.95
    """``ema`` only: what the average keeps at each optimizer step (SDPO's is 0.95)."""

    path: str | None = None
    """``external`` only: a folder (or hub id) with a model of the same tokenizer."""

    def __post_init__(self) -> None:
        if self.kind not in TEACHER_KINDS:
            raise ValueError(f"mapd.teacher.kind: choose from {', '.join(TEACHER_KINDS)}, got {self.kind!r}")
        if not 0.0 <= self.ema_decay <= 1.0:
            raise ValueError(f"mapd.teacher.ema_decay: must lie in [0, 1], got {self.ema_decay}")
        if (self.path is not None) != (self.kind == "external"):
            raise ValueError(f"mapd.teacher.path: external needs it and no other takes it, got {self.path}")


@dataclass
class ScheduleConfig:
    """Lambda over the training steps, as a factor of ``objective.weight``. Bad values raise ``ValueError``."""

    kind: str = "constant"
    """``constant``, or from 1 down (or up) to ``end`` along a line or half a cosine."""

    warmup_steps: int = 0
    """Steps at the start over which the factor rises linearly from 1/warmup_steps to 1."""

    steps: int | None = None
    """Step, counted from the end of the warm-up, at which ``end`` is reached; null is the end of the training."""

    end: float = 0.0
    """The factor from then on."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"mapd.schedule.kind: choose from {', '.join(SCHEDULES)}, got {self.kind!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"mapd.schedule.warmup_steps: must be at least 0, got {self.warmup_steps}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"mapd.schedule.steps: must be null or at least 1, got {self.steps}")
        if not 0.0 <= self.end < float("inf"):
            raise ValueError(f"mapd.schedule.end: must be a finite number >= 0, got {self.end}")


@dataclass
class FilterConfig:
    """Policy tokens that carry the signal; null takes all. The others still count in the mean, with 0."""

    task_types: list[str] | None = None
    """Of ``single_hop, multi_hop, comparison, others, no_protocol``."""

    turns: list[int] | None = None
    """Counted from 0."""

    actions: list[str] | None = None
    """Of ``think, search, answer``."""

    def __post_init__(self) -> None:
        for key, names in (("task_types", TASK_TYPES), ("actions", ACTIONS)):
            for name in getattr(self, key) or ():
                if name not in names:
                    raise ValueError(f"mapd.filter.{key}: choose from {', '.join(names)}, got {name!r}")
        for turn in self.turns or ():
            if turn < 0:
                raise ValueError(f"mapd.filter.turns: turns count from 0, got {turn}")
        for key in ("task_types", "turns", "actions"):
            if getattr(self, key) == []:
                raise ValueError(f"mapd.filter.{key}: an empty list would leave no token; null takes all")
