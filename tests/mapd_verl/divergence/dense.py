"""The definitions in float64, whole, left to autograd: what every divergence is held against."""

from __future__ import annotations

import torch

from mapd_verl.divergence import Divergence, ForwardKL, GeneralisedJSD, Head, ReverseKL, TopK


def divergence(student: torch.Tensor, teacher: torch.Tensor, kind: Divergence) -> torch.Tensor:
    """``[N]`` nats of two ``[N, V]`` tensors of logits."""
    p, q = student.double().softmax(-1), teacher.double().softmax(-1)
    return torch.stack([_one(a, b, kind) for a, b in zip(p, q, strict=True)]) if len(p) else p.sum(-1)


def _one(p: torch.Tensor, q: torch.Tensor, kind: Divergence) -> torch.Tensor:
    if isinstance(kind, TopK):
        k = min(kind.k, len(p))
        top = {"student": p.topk(k).indices.tolist(), "teacher": q.topk(k).indices.tolist()}
        top["union"] = sorted(set(top["student"]) | set(top["teacher"]))
        chosen = torch.zeros(len(p), dtype=torch.bool)
        chosen[top[kind.of]] = True
        p, q = (torch.cat([d[chosen], d[~chosen].sum()[None]]) for d in (p, q))
        kind = kind.inner
    if isinstance(kind, ReverseKL):
        summands = torch.xlogy(p, p) - torch.xlogy(p, q)
    elif isinstance(kind, ForwardKL):
        summands = torch.xlogy(q, q) - torch.xlogy(q, p)
    else:
        assert isinstance(kind, GeneralisedJSD)
        beta = kind.beta
        m = beta * q + (1 - beta) * p
        summands = beta * (torch.xlogy(q, q) - torch.xlogy(q, m)) + (1 - beta) * (torch.xlogy(p, p) - torch.xlogy(p, m))
    if kind.clip is not None:
        summands = summands.clamp(max=kind.clip)
    return summands.sum()


def logits(hidden: torch.Tensor, head: Head, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``[N, V]``."""
    out = hidden @ head.weight.t()
    if head.bias is not None:
        out = out + head.bias
    out = out * head.scale
    if head.softcap is not None:
        out = head.softcap * torch.tanh(out / head.softcap)
    return out / (temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The error's norm over the reference's; 0 if both are 0."""
    error, size = (got.double() - expected.double()).norm().item(), expected.double().norm().item()
    return error / size if size else error
