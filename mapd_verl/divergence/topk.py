"""Divergences over the top of the vocabulary, with everything else as one further entry: the tail bucket.

Trap 2 of the method: without the tail the truncated sums are no divergence. Reverse KL then falls when mass leaves the
top ``k`` altogether, and forward KL can be negative and gets clamped. With it, both distributions are mapped by the
same map onto ``k + 1`` entries, so that the result is a divergence again, at most the one over the whole vocabulary
(data processing inequality).

The head projects the whole vocabulary in any case (the log-probabilities need it), so that top-k saves no projection;
it is here because published methods are defined by it (SDPO: student, 100; OPCD: student, 256; HDPO: 64).
"""

from __future__ import annotations

import torch

from mapd_verl.config.estimators import TOPK_OF
from mapd_verl.divergence.base import Distribution, Divergence, Pair


class TopK(Divergence):
    """``inner`` over the ``k`` most likely tokens of the student, the teacher, or of either, and the tail.

    Args:
        inner: the divergence over the ``k + 1`` (union: up to ``2k + 1``) entries; its clip applies to those.
        k: how many; from the vocabulary's size on it is ``inner`` over the whole vocabulary.
        of: whose.

    Raises:
        ValueError: ``k`` below 1, or ``of`` unknown.
    """

    def __init__(self, inner: Divergence, k: int, of: str = "student") -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if of not in TOPK_OF:
            raise ValueError(f"top-k of {of!r}: choose from {', '.join(TOPK_OF)}")
        self.inner, self.k, self.of = inner, k, of

    def summands(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, float]:
        raise NotImplementedError("a top-k divergence has no summand per vocabulary entry")

    def value_and_gradient(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        index, repeated, in_top = self._top(pair)
        student = _buckets(pair.student, index, repeated, in_top)
        tail = student.p[:, -1:].clone()
        teacher = _buckets(pair.teacher, index, repeated, in_top)
        values, gradient = self.inner.value_and_gradient(Pair(student, teacher))
        # Within the tail p_v / tail stays as it is, whatever the divergence; the sum moves.
        spread = torch.where(tail > 0, gradient[:, -1:] / tail, 0.0)
        dense = (pair.student.p * spread).masked_fill_(in_top, 0.0)
        return values, dense.scatter_add_(-1, index, gradient[:, :-1])

    def _top(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Indices ``[n, K]``, which of them repeat an earlier one (None: none), and ``[n, V]`` who is among them."""
        p, log_p, log_q = pair.student.p, pair.student.log, pair.teacher.log
        k = min(self.k, p.shape[-1])
        in_top = torch.zeros_like(p, dtype=torch.bool)
        first = (log_q if self.of == "teacher" else log_p).topk(k, sorted=False).indices
        in_top.scatter_(-1, first, True)
        if self.of != "union":
            return first, None, in_top
        second = log_q.topk(k, sorted=False).indices
        repeated = torch.cat([torch.zeros_like(first, dtype=torch.bool), in_top.gather(-1, second)], -1)
        in_top.scatter_(-1, second, True)
        return torch.cat([first, second], -1), repeated, in_top


def _buckets(
    whole: Distribution, index: torch.Tensor, repeated: torch.Tensor | None, in_top: torch.Tensor
) -> Distribution:
    """The top and the tail, ``[n, K + 1]``; repeated entries have no probability."""
    # The tail is summed, not 1 minus the top (a small tail would be all rounding), and its logarithm has no residual.
    log, p = whole.log.gather(-1, index).sub_(whole.residual.unsqueeze(-1)), whole.p.gather(-1, index)
    if repeated is not None:
        log.masked_fill_(repeated, float("-inf"))
        p.masked_fill_(repeated, 0.0)
    tail = whole.p.masked_fill(in_top, 0.0).sum(-1, keepdim=True)
    return Distribution(torch.cat([log, tail.log()], -1), torch.cat([p, tail], -1), torch.zeros_like(whole.residual))
