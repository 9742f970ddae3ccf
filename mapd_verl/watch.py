"""The collapse alarm: looks at each step's metrics for the ways in which search agents are seen to collapse.

Plain numbers in, alarms out; the trainer prints them, and stops if the recipe says so. What is watched, and
why: responses that run into the length limit, malformed turns, agents that stop searching, answers that shrink
(what too large a lambda does, arXiv 2607.24280), and drift from the reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mapd_verl.config.safety import WatchConfig

#: verl's validation scores of a data source: the mean over its questions of the mean over N answers.
_SCORE = re.compile(r"val-core/(?P<source>.+)/(?:acc|reward)/mean@\d+")


@dataclass(frozen=True)
class Rule:
    """``metric`` may not lie beyond ``bound`` on the side that ``above`` names."""

    name: str
    metric: str
    bound: float | None
    above: bool
    of_baseline: bool = False


@dataclass(frozen=True)
class Alarm:
    """A rule broken ``steps`` steps in a row."""

    rule: str
    text: str


class CollapseWatch:
    """Feed it every step once, in order.

    Args:
        config: bounds and patience.
    """

    def __init__(self, config: WatchConfig) -> None:
        self.config = config
        self.rules = [
            Rule("max_truncated", "agent/truncated", config.max_truncated, above=True),
            Rule("min_valid_turns", "agent/valid_turns", config.min_valid_turns, above=False),
            Rule("min_searches", "agent/searches", config.min_searches, above=False),
            Rule("min_length_share", "agent/policy_tokens", config.min_length_share, above=False, of_baseline=True),
            Rule("max_reference_kl", "actor/kl_loss", config.max_reference_kl, above=True),
        ]
        self._broken: dict[str, int] = {}
        self._history: dict[str, list[float]] = {}

    def unwatched(self, metrics: Mapping[str, float]) -> list[str]:
        """Rules that are on but whose metric this run does not log."""
        return [rule.name for rule in self.rules if rule.bound is not None and rule.metric not in metrics]

    def observe(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms of this step; a rule whose metric is absent says nothing. NaN breaks every rule."""
        alarms = []
        for rule in self.rules:
            if rule.bound is None or rule.metric not in metrics or self.config.action == "off":
                continue
            value = float(metrics[rule.metric])
            bound = self._bound(rule, value)
            inside = bound is None or (value <= bound if rule.above else value >= bound)
            self._broken[rule.name] = 0 if inside else self._broken.get(rule.name, 0) + 1
            if self._broken[rule.name] >= self.config.patience:
                side = "above" if rule.above else "below"
                alarms.append(
                    Alarm(
                        rule.name,
                        f"{rule.metric} {value:.4g} is {side} {bound:.4g} for {self._broken[rule.name]} steps "
                        f"(mapd.watch.{rule.name})",
                    )
                )
        return alarms

    def _bound(self, rule: Rule, value: float) -> float | None:
        """The rule's bound in the metric's own units; None while its baseline is being taken."""
        assert rule.bound is not None
        if not rule.of_baseline:
            return rule.bound
        history = self._history.setdefault(rule.metric, [])
        if len(history) < self.config.baseline_steps:
            history.append(value)
            return None
        return rule.bound * sum(history) / len(history)

    def state_dict(self) -> dict:
        """What a resumed run needs to go on watching against the same baseline."""
        return {"broken": dict(self._broken), "history": {k: list(v) for k, v in self._history.items()}}

    def load_state_dict(self, state: Mapping) -> None:
        """The inverse of :meth:`state_dict`."""
        self._broken, self._history = dict(state["broken"]), {k: list(v) for k, v in state["history"].items()}


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """The mean over data sources of verl's core validation score (``acc`` before ``reward``); None if there is none."""
    scores: dict[str, float] = {}
    for key, value in metrics.items():
        match = _SCORE.fullmatch(key)
        if match and (match["source"] not in scores or "/acc/" in key):
            scores[match["source"]] = float(value)
    return sum(scores.values()) / len(scores) if scores else None
