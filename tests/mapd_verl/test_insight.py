"""Sums of a micro-batch, against sums taken token by token."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mapd_verl import insight
from protocol_cache.schema import TASK_TYPES


def test_task_numbers_are_the_schemas_task_types():
    assert (*TASK_TYPES, "no_protocol") == insight.TASKS


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 12))
def test_groups_add_up_to_all(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    losses = torch.rand(rows, width, generator=g).mul(2)
    mask = torch.rand(rows, width, generator=g) < 0.7
    distilled = mask & (torch.rand(rows, 1, generator=g) < 0.7)
    turns = torch.randint(0, 9, (rows, width), generator=g).where(mask, torch.tensor(-1))
    actions = torch.randint(0, 3, (rows, width), generator=g).where(mask, torch.tensor(-1))
    tasks = torch.randint(0, len(insight.TASKS), (rows, 1), generator=g)
    sums = insight.raw_sums(losses, mask, distilled, {"turn_ids": turns, "action_ids": actions, "task_ids": tasks})
    for prefix in ("turn_", "task_"):
        for kind, total in (("sum/", sums["sum/all"]), ("tokens/", sums["tokens/all"])):
            parts = [v for k, v in sums.items() if k.startswith(kind + prefix)]
            assert math.isclose(sum(parts), total, rel_tol=1e-5, abs_tol=1e-5)
    last = f"turn_{insight.MAX_TURNS - 1}"
    assert sums[f"tokens/{last}"] == (distilled & (turns >= insight.MAX_TURNS - 1)).sum().item()
    assert sums["above/1"] == sum(
        bool(distilled[i, j]) and losses[i, j].item() > 1 for i in range(rows) for j in range(width)
    )
    assert sums["policy_tokens"] == mask.sum().item()


def test_the_histogram_counts_each_distilled_token_once_in_its_bin():
    ratio = torch.tensor([[-9.0, -2.0, -0.5, 0.0, 0.5, 2.0, 9.0, 9.0]])
    distilled = torch.tensor([[True] * 7 + [False]])
    zeros = torch.zeros_like(ratio)
    sums = insight.signal_sums(distilled, zeros, ratio, zeros + 1, zeros + 2)
    assert [sums[f"signal/log_ratio/{name}"] for name in insight.RATIO_BINS] == [1.0] * 7
    assert sums["signal/log_ratio/mean"] == 0.0
    assert (sums["signal/entropy/student"], sums["signal/entropy/teacher"]) == (7.0, 14.0)
