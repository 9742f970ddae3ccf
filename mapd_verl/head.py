"""The model's output head for policy tokens only, and what the update reads off it.

Shapes: ``N`` selected tokens (the micro-batch's policy tokens), ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl import views
from mapd_verl.objectives.base import AuxiliaryLoss
from mapd_verl.verl_seams import tensordict_utils


@contextmanager
def selected_positions(module: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Within, the model's head sees only ``positions`` of its flattened input: logits are ``[1, N, V]``."""

    def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1])[positions].unsqueeze(0), *args[1:])

    handle = module.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def selected_outputs(
    logits: torch.Tensor, micro_batch: TensorDict, selection: views.TokenSelection
) -> dict[str, torch.Tensor]:
    """verl's ``log_probs`` and ``entropy`` from the logits of the policy tokens; 0 at all other positions."""
    input_ids = micro_batch["input_ids"]
    where = views.packed_positions(micro_batch["prompts"], input_ids, selection)
    logits = logits.float()
    normaliser = torch.logsumexp(logits, -1)
    labels = views.take(micro_batch["responses"], selection)
    log_probs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
    output = {"log_probs": views.scatter_packed(log_probs, where, input_ids)}
    if tensordict_utils.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
        entropy = normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        output["entropy"] = views.scatter_packed(entropy, where, input_ids)
    return output


def divergence(
    logits: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor] | None,
    micro_batch: TensorDict,
    selection: views.TokenSelection,
    objective: AuxiliaryLoss,
) -> torch.Tensor:
    """``l_t`` where it is predicted, nested like ``input_ids``; 0 for tokens without a teacher.

    Args:
        logits: the student's, ``[N, V]``.
        teacher: its logits ``[N', V]`` and which selected tokens they face, ``[N]`` bool.
    """
    input_ids = micro_batch["input_ids"]
    where = views.packed_positions(micro_batch["prompts"], input_ids, selection)
    if teacher is None:
        return views.scatter_packed(logits.new_zeros(0, dtype=torch.float32), where[:0], input_ids)
    teacher_logits, mask = teacher
    if not bool(mask.all()):
        logits, where = logits[mask], where[mask]
    return views.scatter_packed(objective.token_losses(logits, teacher_logits), where, input_ids)


def full(logits: torch.Tensor) -> torch.Tensor:
    """Under tensor parallelism logits are sharded on the vocabulary."""
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def scaled(logits: torch.Tensor, temperature: Any) -> torch.Tensor:
    """``logits / temperature`` without a copy at temperature 1."""
    return logits if isinstance(temperature, float) and temperature == 1.0 else logits / temperature


def temperature_of(micro_batch: TensorDict, rows: torch.Tensor) -> Any:
    """What the logits of tokens in ``rows`` are divided by: a number, or ``[N, 1]``. As verl clamps it."""
    temperature = micro_batch["temperature"]
    if isinstance(temperature, torch.Tensor):
        return temperature.to(torch.float32)[rows].clamp(min=1e-8).unsqueeze(-1)
    return max(float(temperature), 1e-8)
