"""The hand-written forward against transformers' own."""

import pytest
import torch
from transformers import Qwen3Config

from mapd_verl.cpu.decoder import Chunk, Decoder, Weights, check_supported, weight_shapes

from .conftest import VOCABULARY, make_model

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_continuation_and_decode_equal_transformers(tied):
    model = make_model(tied)
    sequences = [tokens(count, seed) for seed, count in enumerate((5, 31, 100))]
    weights, decoder = Weights.fuse(model.state_dict(), model.config), Decoder(model.config, slots=5, capacity=128)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).logits[0] for ids in sequences]
        first = decoder.prefill(weights, [Chunk(slot, 0, ids[:-3]) for slot, ids in enumerate(sequences)])
        more = decoder.prefill(weights, [Chunk(slot, len(ids) - 3, ids[-3:-1]) for slot, ids in enumerate(sequences)])
        last = decoder.decode(
            weights, torch.tensor([ids[-1] for ids in sequences]), torch.tensor([len(ids) - 1 for ids in sequences])
        )
    for slot in range(3):
        torch.testing.assert_close(first[slot], expected[slot][-4], **TOLERANCE)
        torch.testing.assert_close(more[slot], expected[slot][-2], **TOLERANCE)
        torch.testing.assert_close(last[slot], expected[slot][-1], **TOLERANCE)


def test_other_slots_and_what_a_slot_held_before_do_not_matter(model):
    weights, decoder = Weights.fuse(model.state_dict(), model.config), Decoder(model.config, slots=2, capacity=64)
    ids = tokens(20, seed=3)
    with torch.inference_mode():
        decoder.prefill(weights, [Chunk(0, 0, tokens(60, seed=4)), Chunk(1, 0, tokens(60, seed=5))])
        logits = decoder.prefill(weights, [Chunk(1, 0, ids)])
        torch.testing.assert_close(logits[0], model(torch.tensor([ids])).logits[0, -1], **TOLERANCE)


def test_weight_shapes_are_those_of_the_model():
    for tied in (True, False):
        model = make_model(tied)
        ours, theirs = weight_shapes(model.config), {k: tuple(v.shape) for k, v in model.state_dict().items()}
        assert ours == {k: v for k, v in theirs.items() if not (tied and k == "lm_head.weight")}


def test_fused_weights_are_a_copy(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    weights = Weights.fuse(state, model.config)
    before = weights.layers[0].out.clone(), weights.embedding.clone()
    for value in state.values():
        value.zero_()
    assert torch.equal(weights.layers[0].out, before[0]) and torch.equal(weights.embedding, before[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), "missing weight 'model.norm.weight'"),
        (lambda s: s.update(extra=torch.zeros(1)), "unknown weight 'extra'"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), r"'model.norm.weight' has shape \(3,\)"),
    ],
)
def test_a_wrong_set_of_weights_is_named(model, change, message):
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        Weights.fuse(state, model.config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
    ],
)
def test_what_the_forward_does_not_compute_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check_supported(Qwen3Config(num_hidden_layers=2, **settings))
