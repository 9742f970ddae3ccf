"""What one trajectory tells validation dumps and the trainer's charts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mapd_verl.agent.episode import Episode
    from mapd_verl.evaluation.records import Record


def reward_extra_info(record: Record) -> dict[str, Any]:
    """The record as verl's ``reward_extra_info``: numbers are averaged by verl's validation, text is only dumped.

    Lists travel as JSON text, since verl would try to average them.
    """
    return {
        "acc": record.em,
        "f1": record.f1,
        "searches": record.searches,
        "turns": record.turns,
        "valid_turns": record.valid_turns,
        "policy_tokens": record.policy_tokens,
        "response_tokens": record.response_tokens,
        "question_id": record.question_id,
        "kind": record.kind,
        "question": record.question,
        "prediction": record.prediction or "",
        "status": record.status,
        "targets": json.dumps(record.targets, ensure_ascii=False),
        "flags": json.dumps(record.flags),
        "segments": json.dumps(record.segments, ensure_ascii=False),
        "context": record.context,
    }


def agent_metrics(infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the trajectories of a step, from their ``reward_extra_info``; no trajectory, no metric.

    ``agent/valid_turns`` is the share of all turns that hold a complete action and nothing malformed, the
    others are means per trajectory.
    """
    infos = list(infos)
    if not infos:
        return {}
    metrics = {
        f"agent/{name}": sum(float(info[name]) for info in infos) / len(infos)
        for name in ("acc", "f1", "searches", "turns", "policy_tokens", "response_tokens")
    }
    metrics["agent/valid_turns"] = sum(i["valid_turns"] for i in infos) / max(1, sum(i["turns"] for i in infos))
    for status in ("answered", "no_answer", "truncated"):
        metrics[f"agent/{status}"] = sum(info["status"] == status for info in infos) / len(infos)
    return metrics


def chat_turns(episode: Episode) -> int:
    """Messages as verl counts them: the user's, each turn of the policy, each observation."""
    return 1 + len(episode.turns) + sum(bool(turn.observation) for turn in episode.turns)
