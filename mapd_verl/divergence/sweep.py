"""The loop over chunks of tokens behind ``chunked_head.py``, whose notation it shares. No autograd here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mapd_verl.divergence.base import Divergence, Pair, normalise_, rows_at_once
from mapd_verl.divergence.output_head import Head, TeacherStates, TokenStatistics

#: Derivatives of the loss in ``log_prob`` and ``entropy``, ``[n]``, and in ``divergence``, of those with a teacher.
Upstream = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Called with a chunk's place among the ``N`` tokens and its statistics.
Foresee = Callable[[slice, TokenStatistics], Upstream]


@dataclass(frozen=True)
class Setting:
    """The arguments of :func:`head_pass` that carry no gradient; ``dtype`` is the products' type."""

    labels: torch.Tensor
    teacher: TeacherStates | None
    divergence: Divergence | None
    temperature: float | torch.Tensor
    chunk_tokens: int
    foresee: Foresee | None
    dtype: torch.dtype

    def at(self, index: torch.Tensor) -> Setting:
        """Of the tokens at ``index`` (ascending)."""
        teacher, temperature = self.teacher, self.temperature
        if teacher is not None:
            teacher = replace(teacher, hidden=teacher.hidden[index[index < len(teacher.hidden)]])
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[index]
        return replace(self, labels=self.labels[index], teacher=teacher, temperature=temperature, foresee=None)


class Sweep:
    """Some tokens, their heads, and the gradients that a run adds up.

    Args:
        needed: whether ``hidden``, the head's weight and its bias need a gradient.
    """

    def __init__(self, hidden: torch.Tensor, head: Head, setting: Setting, needed: tuple[bool, bool, bool]) -> None:
        dtype = setting.dtype
        self.setting = setting
        self.wide = torch.promote_types(dtype, torch.float32)
        self.hidden = hidden.detach().to(dtype)
        self.head = head.to(dtype)
        teacher = setting.teacher
        self.teacher_hidden = None if teacher is None else teacher.hidden.detach().to(dtype)
        self.teacher_head = self.head if teacher is None or teacher.head is None else teacher.head.to(dtype)
        #: Of ``hidden``, weight and bias; None where not needed.
        self.gradients: list[torch.Tensor | None] = [
            torch.zeros(shape, dtype=self.wide, device=hidden.device) if need else None
            for shape, need in zip((hidden.shape, head.weight.shape, head.weight.shape[:1]), needed, strict=True)
        ]

    def run(self, upstream_of: Foresee) -> TokenStatistics:
        """Statistics of all tokens; where gradients are needed, ``upstream_of`` is asked for each chunk."""
        n, m = len(self.hidden), 0 if self.teacher_hidden is None else len(self.teacher_hidden)
        chunks = [*_split(0, m, self.setting.chunk_tokens), *_split(m, n, self.setting.chunk_tokens)]
        largest = max((c.stop - c.start for c in chunks), default=0)
        vocabulary = self.head.weight.shape[0]
        student = self.hidden.new_empty(largest, vocabulary, dtype=self.wide)
        teacher = self.hidden.new_empty(largest if m else 0, vocabulary, dtype=self.wide)
        scratch = self.hidden.new_empty(2, min(largest, rows_at_once(student)), vocabulary, dtype=self.wide)
        sizes = {"log_prob": n, "entropy": n, "divergence": m, "teacher_log_prob": m, "teacher_entropy": m}
        whole = TokenStatistics(**{k: self.hidden.new_zeros(size, dtype=self.wide) for k, size in sizes.items()})
        for chunk in chunks:
            size = chunk.stop - chunk.start
            rows = _Rows(
                logits=student[:size],
                labels=self.setting.labels[chunk].unsqueeze(-1),
                temperature=_column(self.setting.temperature, chunk),
                teacher=teacher[:size] if chunk.start < m else None,
                statistics=whole.at(chunk),
            )
            self.head.logits_into(rows.logits, self.hidden[chunk])
            _divide(rows.logits, rows.temperature)
            if rows.teacher is not None and self.teacher_hidden is not None:
                self.teacher_head.logits_into(rows.teacher, self.teacher_hidden[chunk])
                _divide(rows.teacher, rows.temperature)
            rows.reduce(self.setting.divergence, scratch)
            if any(g is not None for g in self.gradients):
                rows.differentiate(upstream_of(chunk, rows.statistics), self.head)
                self._add(chunk, rows.logits)
        return whole

    def _add(self, chunk: slice, logit_gradient: torch.Tensor) -> None:
        """A chunk's ``dL/ds``, ``[n, V]``, into the gradients."""
        of_hidden, of_weight, of_bias = self.gradients
        gradient = logit_gradient.to(self.setting.dtype)
        if of_hidden is not None:
            of_hidden[chunk] = gradient @ self.head.weight
        if of_weight is not None:
            if gradient.dtype == of_weight.dtype:
                of_weight.addmm_(gradient.t(), self.hidden[chunk])
            else:
                of_weight.add_(gradient.t() @ self.hidden[chunk])
        if of_bias is not None:
            of_bias.add_(logit_gradient.sum(0))


@dataclass
class _Rows:
    """A chunk of ``n`` tokens. Its two buffers change meaning, so that no third is needed.

    Attributes:
        logits: ``[n, V]``: the student's logits; after :meth:`reduce` the divergence's gradient in them, or ``p`` where
            there is no divergence; after :meth:`differentiate` the loss's gradient in them.
        teacher: ``[n, V]`` or None: the teacher's logits; after :meth:`reduce` the student's ``p``.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    temperature: float | torch.Tensor
    teacher: torch.Tensor | None
    statistics: TokenStatistics
    log_mass: torch.Tensor | None = None

    def reduce(self, divergence: Divergence | None, scratch: torch.Tensor) -> None:
        """Fill the statistics."""
        out = self.statistics
        log_mass = torch.empty_like(out.log_prob)
        for rows in _split(0, len(self.logits), scratch.shape[1]):
            size = rows.stop - rows.start
            labels = self.labels[rows]
            student, log_mass[rows] = normalise_(self.logits[rows], scratch[0, :size])
            out.log_prob[rows] = student.log_prob(labels)
            out.entropy[rows] = student.entropy()
            if self.teacher is not None:
                teacher, _ = normalise_(self.teacher[rows], scratch[1, :size])
                out.teacher_log_prob[rows] = teacher.log_prob(labels)
                out.teacher_entropy[rows] = teacher.entropy()
                if divergence is not None:
                    out.divergence[rows], gradient = divergence.value_and_gradient(Pair(student, teacher))
                    if gradient.data_ptr() != student.log.data_ptr():
                        self.logits[rows] = gradient
                    self.teacher[rows] = student.p
                    continue
            self.logits[rows] = student.p
        self.log_mass = log_mass
        if divergence is None:
            self.teacher = None

    def differentiate(self, upstream: Upstream, head: Head) -> None:
        """``dL/ds`` of the head's raw product, in the place of ``logits``."""
        factor = head.scale / self.temperature
        of_log_prob, of_entropy = (u.unsqueeze(-1) * factor for u in upstream[:2])
        of_divergence = upstream[2].unsqueeze(-1) * factor if self.teacher is not None else of_entropy
        with_entropy = bool((of_entropy != 0).any())
        for rows in _split(0, len(self.logits), rows_at_once(self.logits)):
            gradient, a = self.logits[rows], of_log_prob[rows]
            if self.teacher is not None:
                p = self.teacher[rows]
                gradient.mul_(of_divergence[rows]).addcmul_(p, a, value=-1.0)
            else:
                p = gradient.clone() if with_entropy or head.softcap is not None else gradient
                gradient.mul_(-a)
            gradient.scatter_add_(-1, self.labels[rows], a)
            if with_entropy:
                e = of_entropy[rows]
                gradient.addcmul_(torch.special.entr(p), e)
                gradient.addcmul_(p, e * self.statistics.entropy[rows].unsqueeze(-1), value=-1.0)
            if head.softcap is not None:
                assert self.log_mass is not None
                temperature = self.temperature if isinstance(self.temperature, float) else self.temperature[rows]
                # The capped logit again, over its cap: tanh, whose derivative is 1 - tanh^2.
                tanh = p.log().add_(self.log_mass[rows].unsqueeze(-1)).mul_(temperature).div_(head.softcap)
                tanh.clamp_(-1.0, 1.0)
                gradient.addcmul_(gradient.clone(), tanh.square_(), value=-1.0)


def _split(start: int, stop: int, at_most: int) -> Iterator[slice]:
    """Even parts of ``[start, stop)``, none longer than ``at_most``."""
    if stop <= start:
        return
    parts = -(-(stop - start) // at_most)
    size = -(-(stop - start) // parts)
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def _column(temperature: float | torch.Tensor, chunk: slice) -> float | torch.Tensor:
    return temperature[chunk].unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature


def _divide(logits: torch.Tensor, temperature: float | torch.Tensor) -> None:
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        logits.div_(temperature)
