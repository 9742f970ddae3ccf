"""Intervals and tests for exact match, which is a yes or no per question."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval, all as fractions (0..1, or -1..1 for differences); ``n`` questions."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927): never outside [0, 1], sound for small n.

    With n = 0 the mean is NaN and the interval [0, 1].

    Raises:
        ValueError: if not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"want 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the formula is exact but rounding is not.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, low, high, n)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Exact two-sided McNemar p value for paired yes/no outcomes (binomial test on the questions that changed).

    Raises:
        ValueError: if the lengths differ.
    """
    if len(before) != len(after):
        raise ValueError(f"paired outcomes of different lengths: {len(before)} and {len(after)}")
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    # Whole numbers until the last division: 2**-n underflows for large n.
    return min(1.0, (2 * tail) / (1 << n)) if n else 1.0


def paired_difference(before: Sequence[float], after: Sequence[float], samples: int = 2000, seed: int = 0) -> Interval:
    """Mean of ``after - before`` over the same questions, with a percentile bootstrap over questions.

    Raises:
        ValueError: if the lengths differ.
    """
    if len(before) != len(after):
        raise ValueError(f"paired outcomes of different lengths: {len(before)} and {len(after)}")
    differences = [a - b for b, a in zip(before, after, strict=True)]
    n = len(differences)
    if n == 0:
        return Interval(math.nan, -1.0, 1.0, 0)
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(differences, k=n)) / n for _ in range(samples))
    low, high = means[math.floor(0.025 * (samples - 1))], means[math.ceil(0.975 * (samples - 1))]
    return Interval(math.fsum(differences) / n, low, high, n)


def mean_over_seeds(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> Interval:
    """Mean over runs with a 95% t interval, cut to what the quantity can be; a single run's bounds are NaN."""
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = _student_t95(n - 1) * deviation / math.sqrt(n)
    return Interval(mean, max(mean - half, least), min(mean + half, most), n)


# Two-sided 95% quantiles of Student's t; above 30 degrees of freedom the normal quantile with Fisher's
# first correction is right to three digits.
_T95: tuple[float, ...] = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_T95 += (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def _student_t95(degrees: int) -> float:
    return _T95[degrees - 1] if degrees <= len(_T95) else Z95 + (Z95**3 + Z95) / (4 * degrees)
