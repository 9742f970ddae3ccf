"""What a micro-batch's loss reports about the distillation: sums and counts, made into means once per step.

Means of micro-batches can't be averaged (their token counts differ), so everything travels as a sum
(``metrics.fold_raw_sums`` divides). Every micro-batch reports the same names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

#: Turns with a column of their own; later ones share the last.
MAX_TURNS = 6
ACTIONS = ("think", "search", "answer")
#: The protocol schema's task types, and what has no protocol. ``task_ids`` in the batch count from 0.
TASKS = ("single_hop", "multi_hop", "comparison", "others", "no_protocol")
#: Nats: the share of tokens whose divergence lies above.
THRESHOLDS = (0.01, 0.1, 1.0)
#: Nats: edges of the histogram of ``T_t - S_t`` on the sampled token.
RATIO_EDGES = (-5.0, -1.0, -0.1, 0.1, 1.0, 5.0)
RATIO_BINS = (
    f"below_{RATIO_EDGES[0]:g}",
    *(f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(RATIO_EDGES)),
    f"above_{RATIO_EDGES[-1]:g}",
)


def raw_sums(
    token_losses: torch.Tensor, mask: torch.Tensor, distilled: torch.Tensor, ids: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Sums and token counts of the divergence, in all and by turn, action and task type.

    Args:
        token_losses: nats, ``[B, T]``.
        mask: policy tokens, ``[B, T]`` bool.
        distilled: those with a teacher, ``[B, T]`` bool.
        ids: ``turn_ids`` and ``action_ids`` ``[B, T]``, ``task_ids`` ``[B, 1]``; each may be absent.
    """
    sums: dict[str, float] = {"policy_tokens": mask.sum().item()}
    for name, group in _groups(distilled, ids):
        sums[f"sum/{name}"] = (token_losses * group).sum().item()
        sums[f"tokens/{name}"] = group.sum().item()
    for threshold in THRESHOLDS:
        sums[f"above/{threshold:g}"] = (distilled & (token_losses > threshold)).sum().item()
    return sums


def signal_sums(
    distilled: torch.Tensor,
    log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    entropy: torch.Tensor,
    teacher_entropy: torch.Tensor,
) -> dict[str, float]:
    """Both views' entropies and the log ratio of the sampled token, summed over distilled tokens; all ``[B, T]``."""
    ratio = (teacher_log_probs - log_probs)[distilled].float()
    edges = torch.tensor(RATIO_EDGES, device=ratio.device)
    counts = torch.bincount(torch.bucketize(ratio, edges), minlength=len(RATIO_BINS)).tolist()
    return {
        "signal/entropy/student": entropy[distilled].sum().item(),
        "signal/entropy/teacher": teacher_entropy[distilled].sum().item(),
        "signal/log_ratio/mean": ratio.sum().item(),
        "signal/log_ratio/square": ratio.square().sum().item(),
        **{f"signal/log_ratio/{name}": float(count) for name, count in zip(RATIO_BINS, counts, strict=True)},
    }


def _groups(distilled: torch.Tensor, ids: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "all", distilled
    for field, names in (
        ("turn_ids", [f"turn_{i}" for i in range(MAX_TURNS)]),
        ("action_ids", list(ACTIONS)),
        ("task_ids", [f"task_{name}" for name in TASKS]),
    ):
        if field in ids:
            numbers = ids[field].clamp(max=len(names) - 1)
            yield from ((name, distilled & (numbers == i)) for i, name in enumerate(names))
