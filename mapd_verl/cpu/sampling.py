"""Sampling for a batch whose rows have settings of their own.

Row ``b`` draws by inverse transform from one uniform number that its own request supplies, so what a
request samples does not depend on which others share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. ``temperature`` 0 is greedy; ``top_k`` -1 or 0 and ``top_p`` 1 keep every token.

    Raises ``ValueError`` naming the value that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 or positive, got {self.top_k}")


class BatchSampling:
    """The settings of B requests as columns, rebuilt only when the batch changes."""

    def __init__(self, params: Sequence[SamplingParams]):
        temperature = torch.tensor([p.temperature for p in params])
        self.greedy = temperature == 0
        self.any_greedy = bool(self.greedy.any())
        self.temperature = torch.where(self.greedy, 1.0, temperature)[:, None]
        self.unit_temperature = bool((self.temperature == 1).all())
        self.top_p = torch.tensor([p.top_p for p in params])[:, None]
        self.top_k = torch.tensor([p.top_k if p.top_k > 0 else torch.iinfo(torch.int64).max for p in params])[:, None]
        self.truncated = any(p.top_p < 1 or p.top_k > 0 for p in params)

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token a row.

        Args: ``logits [B, V]`` fp32; ``uniform [B]`` fp64 in [0, 1).
        Returns ids ``[B]`` and their log-probabilities ``[B]`` under ``softmax(logits / temperature)`` over the
        whole vocabulary, before top-k and top-p: what the trainer computes for the same token. A greedy row's
        log-probability is at temperature 1.
        Raises ``FloatingPointError`` if a row holds a NaN or no finite logit.
        """
        log_probs = torch.log_softmax(logits if self.unit_temperature else logits / self.temperature, dim=-1)
        probs = log_probs.exp()
        if self.truncated:
            probs = truncate(probs, self.top_k, self.top_p)
        cdf = probs.cumsum(-1, dtype=torch.float64)
        total = cdf[:, -1:]
        if not bool(torch.isfinite(total).all()):
            raise FloatingPointError("the model's logits are not finite: are its weights?")
        # right=True with a value below the total always lands on a token of positive probability.
        ids = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
        if self.any_greedy:
            ids = torch.where(self.greedy[:, None], log_probs.argmax(-1, keepdim=True), ids)
        return ids[:, 0], log_probs.gather(-1, ids)[:, 0]


def truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what top-k and nucleus sampling (arXiv 1904.09751) drop; ``probs [B, V]``, ``top_k``/``top_p [B, 1]``.

    Top-k first; then the smallest set of the most probable tokens whose renormalised mass reaches ``top_p``,
    which always has at least one member. The result is not renormalised.
    """
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1])[None]
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
    keep = (mass_before < top_p * total) | (top_p >= 1)
    return torch.zeros_like(probs).scatter(-1, index, ordered * keep)
