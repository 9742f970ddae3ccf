"""One rule, two layouts: the engine's selected tokens and the loss's padded mask agree for every filter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from mapd_verl import insight, views
from mapd_verl.config.method import ACTIONS, TASK_TYPES, FilterConfig
from mapd_verl.errors import UserError
from mapd_verl.token_filter import TokenFilter


def test_the_schemas_names_are_the_batchs():
    assert TASK_TYPES == insight.TASKS and ACTIONS == insight.ACTIONS


def subset(names):
    return st.one_of(st.none(), st.lists(st.sampled_from(names), min_size=1, unique=True))


@given(st.integers(0, 2**31), subset(TASK_TYPES), subset([0, 1, 2, 5]), subset(ACTIONS))
def test_both_layouts_agree_with_the_rule_token_by_token(seed, tasks, turns, actions):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (3,), generator=g).tolist()
    rows = [(torch.rand(n, generator=g) < 0.6).long() for n in lengths]
    turn_rows = [torch.randint(0, 6, (n,), generator=g).where(m > 0, -1) for n, m in zip(lengths, rows, strict=True)]
    action_rows = [torch.randint(0, 3, (n,), generator=g).where(m > 0, -1) for n, m in zip(lengths, rows, strict=True)]
    task_ids = torch.randint(0, len(TASK_TYPES), (3,), generator=g)
    batch = TensorDict(
        {
            "response_mask": views.ragged(rows),
            "turn_ids": views.ragged(turn_rows),
            "action_ids": views.ragged(action_rows),
            "task_ids": task_ids,
        },
        batch_size=[3],
    )
    token_filter = TokenFilter(FilterConfig(tasks, turns, actions))
    selection = views.select_tokens(batch["response_mask"])
    kept = set(zip(*(x.tolist() for x in _kept(selection, token_filter.selected(batch, selection))), strict=True))
    mask = batch["response_mask"].to_padded_tensor(0).bool()
    assert kept == {tuple(place) for place in token_filter.padded(batch, mask).nonzero().tolist()}
    expected = {
        (i, t)
        for i in range(3)
        for t in range(lengths[i])
        if rows[i][t]
        and (tasks is None or TASK_TYPES[task_ids[i]] in tasks)
        and (turns is None or turn_rows[i][t] in turns)
        and (actions is None or ACTIONS[action_rows[i][t]] in actions)
    }
    assert kept == expected
    assert bool(token_filter) == any(x is not None for x in (tasks, turns, actions))


def _kept(selection, keep):
    chosen = selection.keep(keep)
    return chosen.rows, chosen.steps


def test_a_batch_without_spans_is_refused_by_name():
    batch = TensorDict({"response_mask": views.ragged([torch.ones(2, dtype=torch.int64)])}, batch_size=[1])
    with pytest.raises(UserError, match=r"mapd\.filter: the batch has no turn_ids"):
        TokenFilter(FilterConfig(turns=[0])).padded(batch, torch.ones(1, 2, dtype=torch.bool))
