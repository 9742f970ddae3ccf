"""Divergences over the whole vocabulary, exact. For the notation see ``base.py``.

* reverse KL, ``KL(p || q) = sum_v p (log p - log q)`` (MAPD, arXiv 2607.24280);
  gradient in the logits: ``p * (log p - log q - KL)``.
* forward KL, ``KL(q || p)``; gradient ``p - q``.
* generalised JSD with teacher weight ``beta`` (OPSD, arXiv 2601.18734), ``m = beta q + (1-beta) p``:
  ``beta KL(q || m) + (1-beta) KL(p || m)``; gradient ``(1-beta) p (log p - log m - KL(p || m))``. Its ends are
  conventions, not limits: ``beta = 0`` is forward KL, ``beta = 1`` reverse KL (the formula itself gives 0 there).
"""

from __future__ import annotations

from typing import Any

import torch

from mapd_verl.divergence.base import Divergence, Pair, normalise_, rows_at_once, weighted


class ReverseKL(Divergence):
    """``KL(student || teacher)``: expectation under the student."""

    def summands(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, float]:
        # d phi / d p = log p - log q + 1; the pull leaves the 1 out, so c = -1.
        summands = weighted(pair.student.p, pair.student.log.sub_(pair.teacher.log))
        return summands, summands, -1.0

    def corrected(self, values: torch.Tensor, pair: Pair) -> torch.Tensor:
        return values - (pair.student.residual - pair.teacher.residual)


class ForwardKL(Divergence):
    """``KL(teacher || student)``: expectation under the teacher."""

    def summands(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, float]:
        # d phi / d p = -q / p; with c = 1 the pull is p - q.
        pulls = pair.student.p - pair.teacher.p
        return weighted(pair.teacher.p, pair.teacher.log.sub_(pair.student.log)), pulls, 1.0

    def corrected(self, values: torch.Tensor, pair: Pair) -> torch.Tensor:
        return values + (pair.student.residual - pair.teacher.residual)


class GeneralisedJSD(Divergence):
    """Jensen-Shannon divergence with weight ``beta`` on the teacher, strictly between 0 and 1.

    Raises:
        ValueError: at the ends; :func:`make_jsd` knows what they stand for.
    """

    def __init__(self, beta: float, clip: float | None = None) -> None:
        super().__init__(clip)
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")
        self.beta = beta

    def summands(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, float]:
        # log(m / p) and log(m / q) from log(q / p) alone, by the side on which the exponential cannot overflow.
        log_ratio = pair.teacher.log.sub_(pair.student.log)
        below = log_ratio <= 0
        weight = torch.where(below, self.beta, 1.0 - self.beta).to(log_ratio.dtype)
        log_m = weight.mul_(torch.expm1(-log_ratio.abs())).log1p_()  # over p where q <= p, over q elsewhere
        over_p = torch.where(below, log_m, log_m + log_ratio)
        over_q = torch.where(below, log_m - log_ratio, log_m)
        pulls = weighted(pair.student.p, over_p.mul_(self.beta - 1.0))
        summands = weighted(pair.teacher.p, over_q.mul_(-self.beta)).add_(pulls)
        return summands, pulls, 0.0


def make_jsd(beta: float, clip: float | None = None) -> Divergence:
    """The generalised JSD for any ``beta`` in ``[0, 1]``, with OPSD's conventions at the ends."""
    if beta == 0.0:
        return ForwardKL(clip)
    if beta == 1.0:
        return ReverseKL(clip)
    return GeneralisedJSD(beta, clip)


class _FromLogits(torch.autograd.Function):
    """Value forward, the gradient computed with it: nothing of size ``[N, V]`` is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, divergence: Divergence, chunk: int
    ) -> torch.Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        values = torch.empty(student.shape[0], dtype=wide, device=student.device)
        gradients = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        step = min(chunk, rows_at_once(student))
        for start in range(0, student.shape[0], step):
            part = slice(start, start + step)
            pair = Pair(*(normalise_(logits[part].to(wide, copy=True))[0] for logits in (student, teacher)))
            values[part], gradient = divergence.value_and_gradient(pair)
            if gradients is not None:
                gradients[part] = gradient
        ctx.gradients = gradients
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the divergence has already been differentiated; its gradient is kept for one backward")
        return gradients.mul_(upstream.to(gradients.dtype).unsqueeze(-1)), None, None, None


def divergence_from_logits(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: Divergence, chunk_tokens: int = 1024
) -> torch.Tensor:
    """The divergence of each token's two next-token distributions, differentiable in the student only.

    For logits that exist anyway (``mapd.forward: stock``); ``chunked_head.py`` starts from hidden states. Reductions
    run in float32 (float64 for float64 input) whatever the logits' type. Bitwise equal logits give exactly 0 and an
    exactly zero gradient. The result can be differentiated once.

    Args:
        student_logits: ``[N, V]``, temperature already applied.
        teacher_logits: ``[N, V]``; no gradient reaches them (``sg`` of the method).
        divergence: which one.
        chunk_tokens: tokens handled at once, at most; bounds the float32 temporaries to a few ``[chunk, V]``.

    Returns:
        nats, ``[N]``, float32 (float64 for float64 input).

    Raises:
        ValueError: shapes differ or are not two-dimensional, or the chunk is below 1.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.dim() != 2:
        raise ValueError(
            f"want two [N, V] tensors of one shape, got {tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    return _FromLogits.apply(student_logits, teacher_logits.detach(), divergence, chunk_tokens)
