"""What the step's log says about distillation; plain numbers in, plain numbers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from mapd_verl.data.join import STATES, Join
from mapd_verl.privilege import SOURCES

#: verl prefixes what the actor's loss reports.
_RAW = "actor/distillation/raw/"


def fold_raw_sums(metrics: MutableMapping[str, Any], updates: int) -> None:
    """Turn the loss's sums into means, in place.

    ``distillation/kl`` is the mean divergence (nats) of all distilled tokens, ``distillation/kl/turn_0``,
    ``.../search``, ``.../task_multi_hop`` that of a turn, action or task type; a group without tokens has no entry.
    ``distillation/kl_above/0.1`` is the share of distilled tokens with more than 0.1 nats,
    ``distillation/log_ratio/*`` mean, standard deviation and histogram (shares) of ``T_t - S_t`` on the sampled token.

    Args:
        metrics: the step's metrics after verl's ``_update_actor``.
        updates: mini-batches of the step: verl averages over them, seconds are to be a total.
    """
    raw = {key.removeprefix(_RAW): metrics.pop(key) for key in [k for k in metrics if k.startswith(_RAW)]}
    if not raw:
        return
    for key in [k for k in raw if k.startswith("sum/")]:
        name = key.removeprefix("sum/")
        tokens = raw[f"tokens/{name}"]
        if tokens > 0:
            metrics["distillation/kl" if name == "all" else f"distillation/kl/{name}"] = raw[key] / tokens
    distilled = raw["tokens/all"]
    if distilled > 0:
        for key, value in raw.items():
            if key.startswith("above/"):
                metrics[f"distillation/kl_above/{key.removeprefix('above/')}"] = value / distilled
            elif key.startswith("signal/"):
                metrics[f"distillation/{key.removeprefix('signal/')}"] = value / distilled
        if "distillation/log_ratio/square" in metrics:
            square, mean = metrics.pop("distillation/log_ratio/square"), metrics["distillation/log_ratio/mean"]
            metrics["distillation/log_ratio/std"] = max(square - mean * mean, 0.0) ** 0.5
    if raw["policy_tokens"] > 0:
        metrics["distillation/token_share"] = distilled / raw["policy_tokens"]
    metrics["distillation/loss"] = metrics.pop("actor/distillation/loss")
    for name, key in (("teacher_forward", "teacher_seconds"), ("divergence", "divergence_seconds")):
        metrics[f"timing_s/{name}"] = raw[key] * updates


def source_shares(chosen: Sequence[str], names: Iterable[str]) -> dict[str, float]:
    """``mapd/source/<name>``: the share of rollouts whose context came from each source.

    Args:
        chosen: the source of each rollout, padding left out.
        names: sources that get an entry even at 0, so that curves have no gaps.
    """
    counts = Counter(chosen)
    shown = [name for name in SOURCES if name in set(names) | set(counts)]
    return {f"mapd/source/{name}": counts[name] / max(len(chosen), 1) for name in shown}


def protocol_states(groups: Sequence[str], states: Sequence[str], join: Join | None) -> dict[str, float]:
    """``mapd/protocols/<state>``: questions of this step by where the join left them, every state named.

    ``mapd/protocols/cache_<state>`` and ``mapd/protocols/skipped`` count the whole training set, those that a policy
    left out of it included; they stand in every step, so that no log is read without them.

    Args:
        groups: the group (a question's rollouts) of each rollout, padding left out.
        states: the question's state, of each rollout.
    """
    step = Counter(dict(zip(groups, states, strict=True)).values())
    shown: dict[str, float] = {f"mapd/protocols/{state}": step[state] for state in STATES}
    if join is not None:
        shown |= {f"mapd/protocols/cache_{state}": count for state, count in join.counts.items()}
        shown["mapd/protocols/skipped"] = join.actions()["skip"]
    return shown


def mean_min_max(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name/mean``, ``/min``, ``/max``; nothing for no values."""
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}
