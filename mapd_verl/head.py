"""The head for policy tokens only: what a model's forward hands to a loss instead of logits.

``mapd.forward: lean`` exchanges the model's output head, for one forward, against the chunked pass of
``divergence/chunked_head.py``: the model's own code runs up to the head and after it, and the head yields a few
numbers a token. The head module is called as ever, so that what FSDP has hung on it (all-gather, reduce-scatter)
happens as ever.

Shapes: ``N`` selected tokens (the micro-batch's policy tokens), ``M`` of them with a teacher, ``V`` vocabulary. Where
both occur, those with a teacher come first (``Tokens.order``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl import views
from mapd_verl.divergence import (
    Divergence,
    Head,
    TeacherStates,
    TokenStatistics,
    divergence_from_logits,
    head_pass,
)
from mapd_verl.divergence.sweep import Foresee, Upstream
from mapd_verl.errors import UserError
from mapd_verl.loss import DIVERGENCE, SIGNALS, foreseeable, loss_value
from mapd_verl.verl_seams import tensordict_utils

#: What the exchanged head appends to each token's numbers: the model must treat them as the table below says.
_PROBES = (1.0, -3.0)


def head_of(module: torch.nn.Module) -> Head:
    """The output head of a causal language model as ``chunked_head.py`` takes it; inside the model's forward, where its
    weight is whole.

    Raises:
        UserError: the head is not a plain linear layer (LoRA on the head, say).
    """
    linear: Any = module.get_output_embeddings()
    if not isinstance(linear, torch.nn.Linear):
        raise UserError(
            f"mapd.forward: lean takes a linear output head, this model's is a {type(linear).__name__}; use stock"
        )
    config: Any = module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Gemma; RecurrentGemma; Granite divides; Cohere multiplies.
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    bias = None if linear.bias is None else full(linear.bias)
    return Head(full(linear.weight), bias, scale, None if softcap is None else float(softcap))


@contextmanager
def exchanged_head(
    module: torch.nn.Module, positions: torch.Tensor, compute: Callable[[torch.Tensor, Head], torch.Tensor]
) -> Iterator[None]:
    """Within, the model's ``logits`` are ``compute(hidden, head)`` of the hidden states at ``positions``.

    Args:
        positions: into the head's input, its first two dimensions flattened, ``[N]``.
        compute: from ``[N, H]`` to ``[N, C]``; ``logits`` become ``[1, N, C]``.

    Raises:
        UserError: the model changes what its head yields in a way that :func:`head_of` does not know.
    """
    linear: Any = module.get_output_embeddings()
    inner: Any = module
    while hasattr(inner, "_fsdp_wrapped_module"):  # FSDP1 looks for gradients in what the module inside returns
        inner = inner._fsdp_wrapped_module
    made: list[tuple[Head, torch.Tensor]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        head = head_of(module)
        numbers = compute(hidden.reshape(-1, hidden.shape[-1])[positions], head)
        # No view: FSDP2 warns of those, as an in-place change of one would lose its hook.
        made.append((head, numbers.unsqueeze(0).clone()))
        probes = numbers.new_tensor(_PROBES).expand(len(numbers), -1)
        return torch.cat([numbers, probes], -1).unsqueeze(0)

    def hand_over(_: torch.nn.Module, args: Any, output: Any) -> Any:
        head, numbers = made[0]
        probes = output.logits.detach()[..., -len(_PROBES) :].float()
        expected = probes.new_tensor(_PROBES) * head.scale
        if head.softcap is not None:
            expected = head.softcap * torch.tanh(expected / head.softcap)
        if not torch.allclose(probes, expected.expand_as(probes), rtol=1e-2):  # bfloat16 models round here
            raise UserError(
                f"mapd.forward: lean does not know what {type(inner).__name__} does to its head's output; use stock"
            )
        output.logits = numbers
        return output

    before = linear.__dict__.get("forward")
    linear.forward = forward
    # First of all hooks, so that FSDP2 sees the tensor that the loss is made of.
    handle = inner.register_forward_hook(hand_over, prepend=True)
    try:
        yield
    finally:
        handle.remove()
        if before is None:
            del linear.forward
        else:
            linear.forward = before


@contextmanager
def selected_positions(module: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Within, the model's own head sees only ``positions`` of its flattened input: logits are ``[1, N, V]``."""

    def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[positions].unsqueeze(0), *args[1:])

    handle = module.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Tokens:
    """A micro-batch's selected tokens in the order in which the head sees them.

    Attributes:
        selection: as in the batch.
        order: their places in the selection, those with a teacher first, ``[N]``.
        taught: ``M``.
        where: in the packed layout, where each is predicted, ``[N]``.
        labels: ``[N]``.
        temperature: a number, or ``[N]``.
    """

    selection: views.TokenSelection
    order: torch.Tensor
    taught: int
    where: torch.Tensor
    labels: torch.Tensor
    temperature: float | torch.Tensor

    @classmethod
    def of(cls, micro_batch: TensorDict, selection: views.TokenSelection, mask: torch.Tensor | None) -> Tokens:
        """``mask``: which selected tokens have a teacher, ``[N]`` bool; None: none has."""
        if mask is None:
            mask = torch.zeros_like(selection.rows, dtype=torch.bool)
        order = torch.argsort(~mask, stable=True)
        where = views.packed_positions(micro_batch["prompts"], micro_batch["input_ids"], selection)
        temperature = temperature_of(micro_batch, selection.rows)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[order]
        labels = views.take(micro_batch["responses"], selection)
        return cls(selection, order, int(mask.sum()), where[order], labels[order], temperature)


@dataclass
class HeadTask:
    """What the student's head does in one micro-batch, and the model output that comes of it."""

    micro_batch: TensorDict
    tokens: Tokens
    chunk_tokens: int
    teacher: TeacherStates | None = None
    divergence: Divergence | None = None
    #: verl's loss function if this forward will be differentiated.
    loss_function: Any = None
    with_signals: bool = False
    seconds: float = 0.0

    def compute(self, hidden: torch.Tensor, head: Head) -> torch.Tensor:
        """``[N, 5]``: the statistics' columns, 0 where there is no teacher."""
        start = time.perf_counter()
        foresee = None
        if torch.is_grad_enabled() and foreseeable(self.loss_function):
            foresee = self._foresee()
        statistics = head_pass(
            hidden,
            head,
            self.tokens.labels,
            self.teacher,
            self.divergence,
            temperature=self.tokens.temperature,
            chunk_tokens=self.chunk_tokens,
            foresee=foresee,
        )
        n = len(hidden)
        columns = [torch.nn.functional.pad(column, (0, n - len(column))) for column in statistics.columns()]
        self.seconds = time.perf_counter() - start
        return torch.stack(columns, -1)

    def model_output(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """verl's ``log_probs`` and ``entropy``, and what the objective reads, nested like ``input_ids``; 0 at all other
        positions."""
        log_prob, entropy, divergence, teacher_log_prob, teacher_entropy = numbers.unbind(-1)
        columns = {"log_probs": log_prob}
        if tensordict_utils.get_non_tensor_data(data=self.micro_batch, key="calculate_entropy", default=False):
            columns["entropy"] = entropy
        if self.divergence is not None:
            columns[DIVERGENCE] = divergence
        if self.with_signals:
            columns |= dict(zip(SIGNALS, (teacher_log_prob, entropy.detach(), teacher_entropy), strict=True))
        return {name: self._scatter(column) for name, column in columns.items()}

    def _scatter(self, column: torch.Tensor) -> torch.Tensor:
        return views.scatter_packed(column, self.tokens.where, self.micro_batch["input_ids"])

    def _foresee(self) -> Foresee:
        """The loss's derivatives in a chunk's statistics, from the loss itself with that chunk's numbers in place.

        Tokens that the head has not come to yet stand at their old log-probabilities: a loss that is a sum over tokens
        does not look at them, and any other is put right in the backward.
        """
        numbers = self.tokens.labels.new_zeros((len(self.tokens.labels), 5), dtype=torch.float32)
        if "old_log_probs" in self.micro_batch:
            numbers[:, 0] = views.take(self.micro_batch["old_log_probs"], self.tokens.selection)[self.tokens.order]

        def foresee(chunk: slice, statistics: TokenStatistics) -> Upstream:
            columns = statistics.columns()
            taught = len(statistics.divergence)
            for i, column in enumerate(columns):
                numbers[chunk.start : chunk.start + len(column), i] = column
            with torch.enable_grad():
                leaf = numbers.clone().requires_grad_()
                value = loss_value(self.loss_function, self.model_output(leaf), self.micro_batch)
                (gradient,) = torch.autograd.grad(value, leaf)
            gradient = gradient[chunk]
            return gradient[:, 0], gradient[:, 1], gradient[:taught, 2]

        return foresee


def label_scores(
    labels: torch.Tensor, temperature: Any, chunk_tokens: int, hidden: torch.Tensor, head: Head
) -> torch.Tensor:
    """Log-probabilities of ``labels`` (``[N]``) for :func:`exchanged_head` to compute, ``[N, 1]``."""
    statistics = head_pass(hidden, head, labels, temperature=temperature, chunk_tokens=chunk_tokens)
    return statistics.log_prob.unsqueeze(-1)


def outputs_from_logits(
    logits: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor] | None,
    micro_batch: TensorDict,
    selection: views.TokenSelection,
    divergence: Divergence | None,
    chunk_tokens: int,
) -> dict[str, torch.Tensor]:
    """What the objective reads, for ``mapd.forward: stock``, where logits exist.

    Args:
        logits: the student's at the selected tokens, temperature applied, ``[N, V]``.
        teacher: its logits ``[M, V]`` likewise, and which selected tokens they face, ``[N]`` bool; or None.
    """
    tokens = Tokens.of(micro_batch, selection, None if teacher is None else teacher[1])
    columns = [logits.new_zeros(0, dtype=torch.float32)] * 4
    if teacher is not None:
        student, taught = logits[tokens.order[: tokens.taught]], teacher[0]
        labels = tokens.labels[: tokens.taught, None]
        log_q = torch.log_softmax(taught.float(), -1)
        with torch.no_grad():
            log_p = torch.log_softmax(student.float(), -1)
            entropy = -(log_p.exp() * log_p).sum(-1)
        columns = [log_q.gather(-1, labels).squeeze(-1), entropy, -(log_q.exp() * log_q).sum(-1), columns[0]]
        if divergence is not None:
            columns[3] = divergence_from_logits(student, taught, divergence, chunk_tokens)
    names = (*SIGNALS, DIVERGENCE)[: 4 if divergence is not None else 3]
    return {
        name: views.scatter_packed(column, tokens.where[: len(column)], micro_batch["input_ids"])
        for name, column in zip(names, columns, strict=False)
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Whole, where tensor parallelism or FSDP2 left a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def scaled(logits: torch.Tensor, temperature: Any) -> torch.Tensor:
    """``logits / temperature`` without a copy at temperature 1."""
    if isinstance(temperature, torch.Tensor):
        return logits / temperature.unsqueeze(-1)
    return logits if temperature == 1.0 else logits / temperature


def temperature_of(micro_batch: TensorDict, rows: torch.Tensor) -> float | torch.Tensor:
    """What the logits of tokens in ``rows`` are divided by: a number, or ``[N]``. As verl clamps it."""
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32)[rows].clamp(min=1e-8)
    return max(float(temperature), 1e-8)
