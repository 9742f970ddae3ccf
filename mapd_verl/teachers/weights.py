"""Copies of a module's trainable weights, and lending them to the module for a while.

Under FSDP2 each rank copies its own shards: parameters are DTensors, and what is copied is their local part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharing its memory."""
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def copy_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter that training changes, on the parameter's device."""
    return {name: local(p).clone() for name, p in module.named_parameters() if p.requires_grad}


@contextmanager
def lent(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[torch.nn.Module]:
    """Within, the module has ``weights``; afterwards exactly what it had.

    Raises:
        ValueError: names or shapes are not the module's.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if set(parameters) != set(weights):
        odd = sorted(set(parameters) ^ set(weights))
        raise ValueError(f"the teacher's weights are another model's: {odd[0]} and {len(odd) - 1} more differ")
    own = copy_of(module)
    try:
        _put(parameters, weights)
        yield module
    finally:
        _put(parameters, own)


def _put(parameters: dict[str, torch.nn.Parameter], weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            mine = local(parameter)
            if mine.shape != weights[name].shape:
                raise ValueError(f"{name}: {tuple(weights[name].shape)} does not fit {tuple(mine.shape)}")
            mine.copy_(weights[name])
