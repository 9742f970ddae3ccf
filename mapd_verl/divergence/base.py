"""What a divergence of two next-token distributions is: a sum over entries, with its gradient in the logits.

Shapes: ``n`` tokens, ``V`` vocabulary (or buckets of it). ``p = softmax(s)`` is the student's distribution, ``q`` the
teacher's.

Every divergence here is ``D = sum_v phi(p_v, q_v)``. With the *pull* ``w_v = p_v * (d phi / d p_v + c)``, ``c`` any
constant, its gradient in the student's logits is ``dD/ds_v = w_v - p_v sum_u w_u``: the constant cancels, and is
chosen so that equal distributions give a gradient of exactly 0. An entry whose summand is clipped contributes
``d phi / d p_v = 0``, so its pull is ``c * p_v``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass
class Distribution:
    """Of each token, over the vocabulary or buckets of it.

    Attributes:
        log: log-probabilities, ``[n, V]``, float32 or wider.
        p: probabilities, ``[n, V]``.
        residual: what rounding the normaliser's logarithm left of it, ``[n]``: the true log-probabilities are
            ``log - residual``. All of a row share that error, so that it does not average out of a KL: where the KL is
            0.01, it is 2e-5 of it.
    """

    log: torch.Tensor
    p: torch.Tensor
    residual: torch.Tensor

    def log_prob(self, labels: torch.Tensor) -> torch.Tensor:
        """Of ``labels`` (``[n, 1]``), ``[n]``."""
        return self.log.gather(-1, labels).squeeze(-1) - self.residual

    def entropy(self) -> torch.Tensor:
        """Nats, ``[n]``."""
        return self.residual - weighted(self.p, self.log.clone()).sum(-1)


@dataclass
class Pair:
    """The student's and the teacher's. A divergence may overwrite all of it but ``student.p``."""

    student: Distribution
    teacher: Distribution


class Divergence(ABC):
    """A divergence and its gradient.

    Args:
        clip: upper bound of each vocabulary entry's summand (OPSD's later versions: 0.05); None leaves them.

    Raises:
        ValueError: the bound isn't positive.
    """

    def __init__(self, clip: float | None = None) -> None:
        if clip is not None and not clip > 0.0:
            raise ValueError(f"clip must be positive, got {clip}")
        self.clip = clip

    @abstractmethod
    def summands(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Summands ``phi`` and pulls ``w`` (``[n, V]``, new or in an input's place), and the pulls' constant ``c``."""

    def corrected(self, values: torch.Tensor, pair: Pair) -> torch.Tensor:
        """The values less what the residuals did to them, where that is of first order."""
        return values

    def value_and_gradient(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Values in nats, ``[n]``, and their gradient in the student's *logits*, ``[n, V]``."""
        summands, pulls, constant = self.summands(pair)
        if self.clip is not None:
            over = summands > self.clip
            pulls = torch.where(over, constant * pair.student.p, pulls)
            summands = summands.clamp(max=self.clip)
        values = summands.sum(-1)
        total = values if pulls is summands else pulls.sum(-1)
        return self.corrected(values, pair), pulls.addcmul_(pair.student.p, total.unsqueeze(-1), value=-1.0)


def weighted(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """``p * log_ratio`` in the place of ``log_ratio``, with ``0 * anything = 0``: a masked-out token has ``p = 0`` and
    an infinite ratio. NaN stays NaN."""
    return log_ratio.mul_(p).masked_fill_(p == 0, 0.0)


def normalise_(logits: torch.Tensor, p: torch.Tensor | None = None) -> tuple[Distribution, torch.Tensor]:
    """The distribution of ``logits`` (``[n, V]``), and the logarithm of their normaliser, ``[n]``.

    Log-probabilities take the logits' place, probabilities that of ``p`` if given. The normaliser is summed in float64.
    Equal logits in equal memory layout give equal bits.
    """
    top = logits.amax(-1, keepdim=True)
    logits.sub_(top)
    p = torch.exp(logits, out=p)
    mass = p.sum(-1, keepdim=True, dtype=torch.float64)
    p.mul_(mass.reciprocal().to(p.dtype))
    exact = mass.log_()
    rounded = exact.to(p.dtype, copy=True)
    logits.sub_(rounded)
    residual = exact.sub_(rounded).to(p.dtype)
    return Distribution(logits, p, residual.squeeze(-1)), rounded.add_(top).squeeze(-1)


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows of ``[n, V]`` to handle at once: on a CPU, few enough to stay in its cache between passes."""
    if logits.device.type != "cpu":
        return max(1, logits.shape[0])
    return max(1, _CPU_BLOCK // max(1, logits.shape[1]))


#: Entries; 0.6 MB of float32, which is one row of Qwen's vocabulary.
_CPU_BLOCK = 160_000
