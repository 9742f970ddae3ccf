"""Intervals and tests against values from the literature and from scipy-free brute force."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapd_verl.evaluation.statistics import mcnemar, mean_over_seeds, paired_difference, wilson


def test_wilson_known_values():
    # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3.
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        interval = wilson(successes, n)
        assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert wilson(29, 29).high == 1.0 and wilson(29, 29).low == pytest.approx(0.8830, abs=5e-5)


@given(st.integers(0, 500), st.integers(0, 500))
def test_wilson_holds_its_mean(a, b):
    interval = wilson(min(a, b), max(a, b))
    if interval.n:
        assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0


def test_wilson_of_nothing_knows_nothing():
    interval = wilson(0, 0)
    assert math.isnan(interval.mean) and (interval.low, interval.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 1), (3, 3), (10, 2)])
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    n = gained + lost
    # All ways in which the n changed questions could have fallen: at least as lopsided as what was seen.
    extreme = sum(abs(2 * sum(flips) - n) >= abs(gained - lost) for flips in product((0, 1), repeat=n))
    before = [False] * gained + [True] * lost + [True, False]
    after = [True] * gained + [False] * lost + [True, False]
    assert mcnemar(before, after) == pytest.approx(extreme / 2**n)


def test_mcnemar_of_thousands_neither_overflows_nor_exceeds_one():
    assert 0 <= mcnemar([False] * 4000, [True] * 4000) < 1e-300
    assert mcnemar([True, False] * 3000, [False, True] * 3000) == 1.0


def test_pairs_must_match():
    with pytest.raises(ValueError, match="2 and 1"):
        mcnemar([True, False], [True])
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference([1, 0], [1])


def test_paired_bootstrap_covers_the_truth_about_as_often_as_it_says():
    import random

    rng, covered = random.Random(0), 0
    for trial in range(200):
        before = [rng.random() < 0.4 for _ in range(80)]
        after = [b or rng.random() < 0.3 for b in before]  # true gain 0.6 * 0.3
        interval = paired_difference(before, after, samples=300, seed=trial)
        covered += interval.low <= 0.18 <= interval.high
    assert 178 <= covered <= 199


def test_paired_difference_of_equal_outcomes_is_zero():
    interval = paired_difference([1, 0, 1], [1, 0, 1])
    assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_seeds():
    three = mean_over_seeds([0.50, 0.60, 0.70])
    assert three.mean == pytest.approx(0.60) and three.high - three.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert math.isnan(mean_over_seeds([0.5]).low) and mean_over_seeds([0.5]).mean == 0.5
    near_one = mean_over_seeds([0.9, 1.0, 0.95], 0.0, 1.0)  # the t interval alone would end at 1.07
    assert near_one.high == 1.0 and near_one.low == pytest.approx(0.95 - 0.1242, abs=1e-4)
    many = mean_over_seeds([0.0, 1.0] * 50)  # 99 degrees of freedom: t = 1.984
    assert (many.high - 0.5) / math.sqrt(25 / 99 / 100) == pytest.approx(1.984, abs=2e-3)
