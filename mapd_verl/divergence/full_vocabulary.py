"""Divergences over the whole vocabulary, exact, in chunks of tokens.

Shapes: ``N`` selected tokens (policy tokens with a privileged context, no others), ``V`` vocabulary.

The whole row of logits is given, not the hidden states: only the selected tokens went through the model's
head (``engine.py``), so ``[N, V]`` twice is what exists anyway. Projecting chunk by chunk from hidden states
would remove that too; it needs the head's weight gathered outside the model's forward, which FSDP makes a
matter of its own.

With ``p = softmax(student)``, ``q = softmax(teacher)`` and logits ``s`` of the student:

* reverse KL, ``KL(p || q) = sum_v p (log p - log q)`` (MAPD, arXiv 2607.24280);
  gradient in ``s``: ``p * (log p - log q - KL)``.
* forward KL, ``KL(q || p)``; gradient ``p - q``.
* generalised JSD with teacher weight ``beta`` (OPSD, arXiv 2601.18734), ``m = beta q + (1-beta) p``:
  ``beta KL(q || m) + (1-beta) KL(p || m)``; gradient ``(1-beta) p (log p - log m - KL(p || m))``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch


class Divergence(ABC):
    """A divergence of two distributions and its gradient in the student's logits."""

    @abstractmethod
    def value_and_gradient(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-token value and gradient.

        Args:
            log_p: student's log-probabilities, ``[n, V]``, float32 or wider.
            log_q: teacher's, same shape. Both may be overwritten.

        Returns:
            value in nats, ``[n]``, and its gradient in the student's *logits*, ``[n, V]``.
        """


def _weighted(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """``p * log_ratio`` with ``0 * anything = 0``: a masked-out token has p = 0 and an infinite ratio."""
    return torch.where(p > 0, p * log_ratio, 0.0)


class ReverseKL(Divergence):
    """``KL(student || teacher)``: expectation under the student."""

    def value_and_gradient(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = log_p.exp()
        gradient = _weighted(p, log_p.sub_(log_q))
        value = gradient.sum(-1)
        return value, gradient.addcmul_(p, value.unsqueeze(-1), value=-1.0)


class ForwardKL(Divergence):
    """``KL(teacher || student)``: expectation under the teacher."""

    def value_and_gradient(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = log_q.exp()
        value = _weighted(q, log_q - log_p).sum(-1)
        return value, log_p.exp_().sub_(q)


class GeneralisedJSD(Divergence):
    """Jensen-Shannon divergence with weight ``beta`` on the teacher, strictly between 0 and 1.

    Raises:
        ValueError: at the ends; they are :class:`ForwardKL` and :class:`ReverseKL` by convention.
    """

    def __init__(self, beta: float) -> None:
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must lie strictly between 0 and 1, got {beta}")
        self.beta = beta

    def value_and_gradient(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        beta = self.beta
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        p, q = log_p.exp(), log_q.exp()
        gradient = _weighted(p, log_p - log_m)
        to_student = gradient.sum(-1)
        to_teacher = _weighted(q, log_q - log_m).sum(-1)
        gradient.addcmul_(p, to_student.unsqueeze(-1), value=-1.0).mul_(1.0 - beta)
        return beta * to_teacher + (1.0 - beta) * to_student, gradient


class _FullVocabulary(torch.autograd.Function):
    """Value forward, the gradient computed with it: nothing of size ``[N, V]`` is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, divergence: Divergence, chunk: int
    ) -> torch.Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        values = torch.empty(student.shape[0], dtype=wide, device=student.device)
        gradients = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for start in range(0, student.shape[0], chunk):
            part = slice(start, start + chunk)
            values[part], gradient = divergence.value_and_gradient(
                torch.log_softmax(student[part].to(wide), -1), torch.log_softmax(teacher[part].to(wide), -1)
            )
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


def full_vocabulary_divergence(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: Divergence, chunk_tokens: int = 1024
) -> torch.Tensor:
    """The divergence of each token's two next-token distributions, differentiable in the student only.

    Reductions run in float32 (float64 for float64 input) whatever the logits' type. Bitwise equal logits
    give exactly 0 and an exactly zero gradient. The result can be differentiated once.

    Args:
        student_logits: ``[N, V]``, temperature already applied.
        teacher_logits: ``[N, V]``; no gradient reaches them (``sg`` of the method).
        divergence: which one.
        chunk_tokens: tokens handled at once; bounds the float32 temporaries to a few ``[chunk, V]``.

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
    return _FullVocabulary.apply(student_logits, teacher_logits.detach(), divergence, chunk_tokens)
