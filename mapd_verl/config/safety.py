"""The recipe's ``mapd.watch`` and ``mapd.nan_guard``: when a run counts as collapsing, and what a NaN does."""

from __future__ import annotations

from dataclasses import dataclass

ACTIONS = ("off", "warn", "stop")
NAN_ACTIONS = ("off", "skip", "stop")


@dataclass
class WatchConfig:
    """Rules on each step's metrics (``mapd_verl.watch``); null switches a rule off. Bad values raise ``ValueError``."""

    action: str = "warn"
    """``warn`` prints a line and sets ``watch/alarm``, ``stop`` also ends the training, ``off`` looks at nothing."""

    patience: int = 3
    """Steps in a row that a rule must be broken."""

    baseline_steps: int = 5
    """Steps at the start whose mean is the baseline of ``min_length_share``."""

    max_truncated: float | None = 0.5
    """Largest share of trajectories that end by the length limit (``agent/truncated``)."""

    min_valid_turns: float | None = 0.3
    """Smallest share of turns that hold one complete action and nothing malformed (``agent/valid_turns``)."""

    min_searches: float | None = 0.05
    """Fewest searches a trajectory (``agent/searches``): a search agent that never searches is not one."""

    min_length_share: float | None = 0.4
    """Smallest policy length as a share of the baseline (``agent/policy_tokens``). At lambda 0.1 the paper's 4B
    model fell from 135 to 42 tokens, and lost 7 points."""

    max_reference_kl: float | None = 2.0
    """Largest KL to the reference policy, nats a token (``actor/kl_loss``; only with ``actor.use_kl_loss``)."""

    keep_best: bool = False
    """Keep the checkpoint with the best validation score in ``default_local_dir/best``, optimizer included."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"mapd.watch.action: choose from {', '.join(ACTIONS)}, got {self.action!r}")
        for key in ("patience", "baseline_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"mapd.watch.{key}: must be at least 1, got {getattr(self, key)}")
        for key in ("max_truncated", "min_valid_turns", "min_length_share"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"mapd.watch.{key}: must be null or lie in [0, 1], got {value}")
        for key in ("min_searches", "max_reference_kl"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"mapd.watch.{key}: must be null or a finite number >= 0, got {value}")
        if self.action == "stop" and not self.keep_best:
            raise ValueError("mapd.watch.keep_best: must be true with action: stop, which leaves the best checkpoint")


@dataclass
class NanGuardConfig:
    """What happens to a loss or gradient that is no finite number. Bad values raise ``ValueError``."""

    action: str = "stop"
    """``stop`` ends the run; ``skip`` leaves out that optimizer step, as verl does; both write the batch first.
    ``off`` leaves it to verl, which skips the step and prints a line."""

    folder: str | None = None
    """Where the batch goes; null is ``default_local_dir/nan``."""

    max_dumps: int = 3
    """Batches that each rank writes at most, so that a run that skips for ever fills no disk."""

    def __post_init__(self) -> None:
        if self.action not in NAN_ACTIONS:
            raise ValueError(f"mapd.nan_guard.action: choose from {', '.join(NAN_ACTIONS)}, got {self.action!r}")
        if self.max_dumps < 0:
            raise ValueError(f"mapd.nan_guard.max_dumps: must be at least 0, got {self.max_dumps}")
