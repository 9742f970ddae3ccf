"""From hidden states through the output head to what a loss reads, chunk by chunk: no ``[N, V]`` tensor exists.

Shapes: ``N`` tokens that count, of which the first ``M`` have a teacher; ``H`` hidden size, ``V`` vocabulary, ``n``
tokens of a chunk. ``h`` hidden states, ``s`` logits, ``p = softmax(s)`` the student's, ``q`` the teacher's.

For each chunk the student's logits are projected once, and the teacher's once. From them come, for each token, the
log-probability of its label, the entropy and the divergence, and of the teacher the first two.

**Gradients are computed in the forward** where the caller can tell what a chunk's outputs will be differentiated with
(``foresee``): while ``p`` and ``q`` are at hand,

    dL/ds = a (onehot - p) + e (-p (log p + entropy)) + c dD/ds

with ``a, e, c`` the derivatives of the loss in the token's log-probability, entropy and divergence, and then
``dL/dh = dL/ds W`` and ``dL/dW += dL/ds^T h``. That is four products of a chunk with the head, two for the forward and
two for the backward, which is the least there is; recomputing in the backward would make it six. A loss that is a sum
over tokens can be foreseen exactly, since a token's derivatives depend on its own outputs only. The backward compares
what it is given with what was foreseen: equal up to one factor, it hands the gradients over; tokens that differ are
projected again and the difference is added. So ``foresee`` decides the cost and never the result.

Reductions over the vocabulary and over tokens run in float32 (float64 for float64 input).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mapd_verl.divergence.base import Divergence
from mapd_verl.divergence.output_head import Head, TeacherStates, TokenStatistics
from mapd_verl.divergence.sweep import Foresee, Setting, Sweep, Upstream

#: A derivative within this of the foreseen one, relative, is the same: four times float32's rounding.
_SAME = 2.0**-21


def head_pass(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    teacher: TeacherStates | None = None,
    divergence: Divergence | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk_tokens: int = 256,
    foresee: Foresee | None = None,
) -> TokenStatistics:
    """The statistics of ``N`` tokens, differentiable in ``hidden``, ``head.weight`` and ``head.bias``, once.

    Bitwise equal hidden states of student and teacher, with one head, give a divergence of exactly 0 and an exactly
    zero gradient.

    Args:
        hidden: ``[N, H]``, the student's last hidden states.
        head: the student's.
        labels: ``[N]`` int64.
        teacher: of the first ``M`` tokens; no gradient reaches it.
        divergence: None computes log-probabilities and entropies only.
        temperature: what logits are divided by, of both views: a number, or ``[N]``.
        chunk_tokens: tokens projected at once; two buffers ``[chunk, V]`` are what the pass costs in memory.
        foresee: the loss's derivatives of a chunk; None computes gradients in the backward, at two projections more.

    Raises:
        ValueError: shapes that don't fit each other.
    """
    _check(hidden, head, labels, teacher, temperature, chunk_tokens)
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    setting = Setting(labels, teacher, divergence, temperature, chunk_tokens, foresee, dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return TokenStatistics(*_HeadPass.apply(hidden, head.weight, head.bias, head, setting))


def _check(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    teacher: TeacherStates | None,
    temperature: float | torch.Tensor,
    chunk_tokens: int,
) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"want hidden [N, H], labels [N] and a head [V, H], got {tuple(hidden.shape)}, {tuple(labels.shape)} "
            f"and {tuple(head.weight.shape)}"
        )
    if isinstance(temperature, torch.Tensor) and temperature.shape != labels.shape:
        raise ValueError(f"want one temperature a token, {tuple(labels.shape)}, got {tuple(temperature.shape)}")
    if teacher is None:
        return
    weight = (teacher.head or head).weight
    if weight.shape[0] != head.weight.shape[0]:
        raise ValueError(f"student and teacher want one vocabulary, got {head.weight.shape[0]} and {weight.shape[0]}")
    if teacher.hidden.dim() != 2 or teacher.hidden.shape[1] != weight.shape[1] or len(teacher.hidden) > len(hidden):
        raise ValueError(
            f"the teacher's hidden states {tuple(teacher.hidden.shape)} fit neither its head {tuple(weight.shape)} "
            f"nor {len(hidden)} tokens"
        )


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        setting: Setting,
    ) -> tuple[torch.Tensor, ...]:
        needed = tuple(ctx.needs_input_grad[:3])
        run = Sweep(hidden, head, setting, needed if setting.foresee is not None else (False,) * 3)
        foreseen: list[Upstream] = []

        def upstream_of(chunk: slice, statistics: TokenStatistics) -> Upstream:
            assert setting.foresee is not None
            a, e, c = setting.foresee(chunk, statistics)
            foreseen.append((a.detach().to(run.wide), e.detach().to(run.wide), c.detach().to(run.wide)))
            return foreseen[-1]

        statistics = run.run(upstream_of)
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.setting, ctx.needed = head, setting, needed
        ctx.gradients, ctx.foreseen = run.gradients, foreseen
        ctx.done = False
        ctx.mark_non_differentiable(statistics.teacher_log_prob, statistics.teacher_entropy)
        return statistics.columns()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError("the head pass has already been differentiated; its gradients are kept for one backward")
        ctx.done = True
        hidden, weight = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        actual: Upstream = (upstream[0], upstream[1], upstream[2])
        if ctx.foreseen:
            actual, factor = _unforeseen(actual, ctx.foreseen)
            if factor != 1.0:
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(factor)
        nonzero = (actual[0] != 0) | (actual[1] != 0)
        nonzero[: len(actual[2])] |= actual[2] != 0
        index = nonzero.nonzero().squeeze(-1)
        if len(index) or not ctx.foreseen:
            rest = tuple(u[index] for u in actual[:2])
            last = actual[2][index[index < len(actual[2])]]
            run = Sweep(hidden[index], replace(ctx.head, weight=weight), ctx.setting.at(index), ctx.needed)
            teachers = len(last)

            def upstream_of(chunk: slice, _: TokenStatistics) -> Upstream:
                return rest[0][chunk], rest[1][chunk], last[chunk.start : min(chunk.stop, teachers)]

            with torch.autocast(hidden.device.type, enabled=False):
                run.run(upstream_of)
            gradients = _sum(gradients, run.gradients, index, hidden)
        types = (hidden.dtype, weight.dtype, None if ctx.head.bias is None else ctx.head.bias.dtype)
        return (*(g if g is None else g.to(t) for g, t in zip(gradients, types, strict=True)), None, None)


def _unforeseen(actual: Upstream, foreseen: list[Upstream]) -> tuple[Upstream, float]:
    """What the backward was given beyond ``factor`` times what was foreseen; entries within rounding are 0.

    The factor is 1, or what a gradient scaler multiplied the loss by.
    """
    expected = [torch.cat(parts) for parts in zip(*foreseen, strict=True)]
    if all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)):
        return (torch.zeros_like(actual[0]), torch.zeros_like(actual[1]), torch.zeros_like(actual[2])), 1.0
    flat_actual, flat_expected = torch.cat(actual), torch.cat(expected)
    largest = flat_expected.abs().argmax()
    factor = float(flat_actual[largest] / flat_expected[largest]) if float(flat_expected[largest]) != 0 else 1.0
    if not 0.0 < factor < float("inf"):
        factor = 1.0
    rest = flat_actual - factor * flat_expected
    rest.masked_fill_(rest.abs() <= _SAME * flat_actual.abs(), 0.0)
    parts = rest.split([len(a) for a in actual])
    return (parts[0], parts[1], parts[2]), factor


def _sum(
    gradients: list[torch.Tensor | None], more: list[torch.Tensor | None], index: torch.Tensor, hidden: torch.Tensor
) -> list[torch.Tensor | None]:
    """Both, where the second's hidden states are those at ``index``."""
    if more[0] is not None:
        whole = gradients[0]
        if whole is None:
            whole = more[0].new_zeros(hidden.shape)
        more = [whole.index_add_(0, index, more[0]), *more[1:]]
        gradients = [None, *gradients[1:]]
    return [m if g is None else g if m is None else g.add_(m) for g, m in zip(gradients, more, strict=True)]
