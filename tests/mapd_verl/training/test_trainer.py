"""The trainer's helpers; the trainer itself runs in ``test_e2e.py``."""

import random

import torch
from tensordict import NonTensorStack, TensorDict

from mapd_verl.privilege import Rollout, make_source
from mapd_verl.trainer import _choose_in_order, _column, _first_target, _trim_padding
from mapd_verl.views import ragged


def test_contexts_do_not_depend_on_the_order_in_which_rollouts_finish():
    keys, rollouts = [], []
    for group in "abc":
        for session in range(4):
            keys.append(f"{random.random()}{group}_{session}_0")
            score = float((session + ord(group)) % 2)
            rollouts.append(Rollout(group, f"q{group}", score, (ord(group), session), protocol=f"plan {group}"))
    decode = lambda ids: str(list(ids))  # noqa: E731
    for name in ("own_rollout", "shuffled"):
        source = make_source(name, decode, 1.0)
        expected = dict(zip(keys, _choose_in_order(keys, rollouts, [source]), strict=True))
        for seed in range(5):
            order = list(range(len(keys)))
            random.Random(seed).shuffle(order)
            shuffled = [keys[i] for i in order]
            assert _choose_in_order(shuffled, [rollouts[i] for i in order], [source]) == [expected[k] for k in shuffled]


def test_columns_come_back_from_every_wrapping():
    data = TensorDict(
        {
            "plain": torch.tensor([1, 2]),
            "one_element_rows": ragged([torch.tensor([3]), torch.tensor([4])]),
            "words": NonTensorStack("a", "b"),
        },
        batch_size=[2],
    )
    assert _column(data, "plain", 2) == [1, 2]
    assert _column(data, "one_element_rows", 2) == [3, 4]
    assert _column(data, "words", 2) == ["a", "b"]
    assert _column(data, "absent", 2) == [None, None]


def test_the_gold_answer_is_found_in_every_form():
    assert _first_target({"ground_truth": {"target": ["x", "y"]}}) == "x"
    assert _first_target({"ground_truth": {"target": "x"}}) == "x"
    assert _first_target({"ground_truth": "x"}) == "x"
    assert _first_target({"ground_truth": {"target": []}}) is None
    assert _first_target(None) is None


def test_padding_rows_get_spans_of_their_own_length():
    """verl's padding copies row 0's fields at row 0's length beside a one-token response."""
    spans = ragged([torch.tensor([0, 0, -1, 1]), torch.tensor([0, 0, -1, 1])])
    data = TensorDict({"turn_ids": spans, "action_ids": spans}, batch_size=[2])
    rollouts = [Rollout("a", "q", 1.0, (1, 2, 3, 4)), Rollout("pad", "q", 0.0, (9,), is_padding=True)]
    trimmed = _trim_padding(data, rollouts)
    for name in ("turn_ids", "action_ids"):
        assert [row.tolist() for row in trimmed[name].unbind()] == [[0, 0, -1, 1], [-1]]
    assert _trim_padding(data, rollouts[:1]) == {}
