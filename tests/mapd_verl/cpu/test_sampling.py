import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.cpu.sampling import BatchSampling, SamplingParams, truncate


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return BatchSampling([params] * count)(logits.expand(count, -1), uniform)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_and_log_probs_are_those_of_the_tempered_softmax(temperature):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    expected = torch.log_softmax(logits / temperature, -1)
    ids, log_probs = draw(logits, SamplingParams(temperature))
    # Evenly spaced uniforms: counts are exact up to one draw a token.
    counts = torch.bincount(ids, minlength=5).double() / 20_000
    assert torch.allclose(counts, expected.exp().double(), atol=1e-4)
    assert torch.allclose(log_probs, expected[ids])


def test_greedy_takes_the_best_token_and_reports_it_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    sampling = BatchSampling([SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)])
    ids, log_probs = sampling(logits, torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    assert torch.allclose(log_probs, torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0])


def test_rows_keep_their_own_settings():
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(3, -1)
    rows = [SamplingParams(0.0), SamplingParams(1.0, top_k=1), SamplingParams(0.5)]
    ids, log_probs = BatchSampling(rows)(logits, torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64))
    assert ids.tolist() == [2, 2, 0]
    assert log_probs[2].item() == pytest.approx(torch.log_softmax(logits[0] / 0.5, -1)[0].item())


def test_log_probs_are_of_the_whole_distribution_under_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    ids, log_probs = draw(logits, SamplingParams(top_k=2))
    assert set(ids.tolist()) == {2, 3}
    assert torch.allclose(log_probs, torch.log_softmax(logits, -1)[ids])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(uniform):
    logits = torch.full((1, 9), -math.inf)
    logits[0, 4] = 1.0
    ids, _ = BatchSampling([SamplingParams()])(logits, torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise(bad):
    with pytest.raises(FloatingPointError):
        BatchSampling([SamplingParams()])(torch.tensor([[0.0, bad]]), torch.tensor([0.5], dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.floats(0.01, 1.0),
    st.integers(1, 12),
)
def test_truncation_keeps_the_smallest_nucleus_of_the_top_k(logits, top_p, top_k):
    probs = torch.softmax(torch.tensor([logits], dtype=torch.float64), -1)
    kept = truncate(probs, torch.tensor([[top_k]]), torch.tensor([[top_p]], dtype=torch.float64))[0]
    ordered = probs[0].sort(descending=True).values[:top_k]
    mass, expected = 0.0, 0
    for value in (ordered / ordered.sum()).tolist():  # by the definition, one token after the other
        if mass >= top_p:
            break
        mass, expected = mass + value, expected + 1
    assert abs(int((kept > 0).sum()) - expected) <= (1 if abs(mass - top_p) < 1e-9 else 0)
    assert kept.max() == probs.max()
    assert bool((kept[kept > 0] >= probs[0][kept == 0].max()).all()) if expected < len(logits) else True


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}]
)
def test_settings_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)
