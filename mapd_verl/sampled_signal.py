"""The sampled token's two log-probabilities, scored before the update, and what objectives make of them.

Batches live in verl's transfer queue; each function reads the fields it needs and writes what it changes.
``d_t = T_t - S_t`` is 0 where a token has no teacher: an observation, a row without a context, a filtered token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl.config import MapdConfig
from mapd_verl.loss import TEACHER_LOG_PROBS
from mapd_verl.objectives import AdvantageObjective, RewardObjective
from mapd_verl.token_filter import TokenFilter
from mapd_verl.verl_seams import response_to_nested, tq

_FIELDS = [
    "response_mask",
    "privilege_source",
    "old_log_probs",
    TEACHER_LOG_PROBS,
    "turn_ids",
    "action_ids",
    "task_ids",
]


def score(workers: Any, batch: Any, temperature: float) -> Any:
    """Have the teacher score the sampled tokens; the batch gains ``teacher_log_probs``, nested like ``responses``."""
    batch.extra_info["temperature"] = temperature
    workers.compute_teacher_log_prob(batch)
    # The workers wrote the field; a handle that lists it comes with the next write.
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[TEACHER_LOG_PROBS])
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)


def change_advantages(
    batch: Any, objective: AdvantageObjective, weight: float, config: MapdConfig, metrics: dict
) -> Any:
    """``A'_t`` in place of ``A_t``; returns the batch's new handle."""
    data = _fetch(batch, "advantages")
    log_ratio = _log_ratio(data, config, metrics)
    before = data["advantages"].to_padded_tensor(0.0)
    after = objective.advantages(before, log_ratio, weight)
    mask = data["response_mask"].to_padded_tensor(0).bool()
    changed = (after - before)[mask]
    metrics["distillation/advantage_change"] = changed.abs().mean().item()
    metrics["distillation/advantage_sign_changes"] = (before * after < 0)[mask].float().mean().item()
    fields = {"advantages": response_to_nested(after * mask, data["response_mask"])}
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
    )


@contextmanager
def changed_rewards(
    batch: Any, objective: RewardObjective, weight: float, config: MapdConfig, metrics: dict
) -> Iterator[None]:
    """Within, ``rm_scores`` hold the changed rewards, from which advantages are computed; afterwards the plain ones,
    which verl's own metrics call the score."""
    data = _fetch(batch, "rm_scores")
    plain = data["rm_scores"]
    log_ratio = _log_ratio(data, config, metrics)
    rewards = plain.to_padded_tensor(0.0)
    mask = data["response_mask"].to_padded_tensor(0).bool()
    successful = rewards.sum(-1) >= config.privilege.success_score
    change = objective.reward_change(log_ratio, successful, mask, weight)
    metrics["distillation/reward_change"] = change.sum(-1).mean().item()
    _put(batch, response_to_nested(rewards + change, data["response_mask"]))
    try:
        yield
    finally:
        _put(batch, plain)


def _fetch(batch: Any, name: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_FIELDS, name])


def _put(batch: Any, rm_scores: torch.Tensor) -> None:
    fields = TensorDict({"rm_scores": rm_scores}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _log_ratio(data: TensorDict, config: MapdConfig, metrics: dict) -> torch.Tensor:
    """``d_t``, ``[B, T]``, and its mean and spread over the tokens that have a teacher."""
    mask = data["response_mask"].to_padded_tensor(0).bool()
    taught = TokenFilter(config.filter).padded(data, mask & (data["privilege_source"].reshape(-1, 1) > 0))
    ratio = data[TEACHER_LOG_PROBS].to_padded_tensor(0.0) - data["old_log_probs"].to_padded_tensor(0.0)
    ratio = torch.where(taught, ratio, 0.0)
    if taught.any():
        values = ratio[taught]
        metrics["distillation/log_ratio/mean"] = values.mean().item()
        metrics["distillation/log_ratio/std"] = values.std(unbiased=False).item()
    metrics["distillation/token_share"] = taught.sum().item() / max(1, mask.sum().item())
    return ratio
