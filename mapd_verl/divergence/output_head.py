"""An output head, a teacher's states, and what a pass over them yields. Shapes: ``chunked_head.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Head:
    """An output head: ``s = softcap(scale * (h W^T + b))``, with ``softcap(x) = cap * tanh(x / cap)``.

    Attributes:
        weight: ``[V, H]``, whole (not a shard).
        bias: ``[V]`` or None.
        scale: Cohere multiplies the logits by one, Granite divides.
        softcap: Gemma's ``final_logit_softcapping``, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Head:
        """Detached, weight and bias in ``dtype``."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return replace(self, weight=self.weight.detach().to(dtype), bias=bias)

    def clone(self) -> Head:
        """A detached copy that outlives the module's weights."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return replace(self, weight=self.weight.detach().clone(), bias=bias)

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """Logits of ``hidden`` (``[n, H]``, of the weight's type) in ``out`` (``[n, V]``, float32 or wider)."""
        if out.dtype == self.weight.dtype:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            out.copy_(hidden @ self.weight.t())
        if self.bias is not None:
            out.add_(self.bias)
        if self.scale != 1.0:
            out.mul_(self.scale)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True)
class TeacherStates:
    """The teacher's last hidden states of the first ``M`` tokens, ``[M, H']``, and its head.

    ``head`` None stands for the student's own: the same weights.
    """

    hidden: torch.Tensor
    head: Head | None = None


@dataclass(frozen=True)
class TokenStatistics:
    """What a chunk, or a whole pass, yields. Nats, float32 or wider.

    Attributes:
        log_prob: of the label under the student, ``[N]``; differentiable.
        entropy: the student's, ``[N]``; differentiable.
        divergence: ``[M]``; differentiable. 0 where no divergence was asked for.
        teacher_log_prob: of the label under the teacher, ``[M]``.
        teacher_entropy: ``[M]``.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor
    teacher_log_prob: torch.Tensor
    teacher_entropy: torch.Tensor

    def at(self, chunk: slice) -> TokenStatistics:
        """A chunk's part, as views."""
        return TokenStatistics(*(column[chunk] for column in self.columns()))

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of the attributes."""
        return self.log_prob, self.entropy, self.divergence, self.teacher_log_prob, self.teacher_entropy
