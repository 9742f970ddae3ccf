"""The maths of comparing two next-token distributions, token by token. Knows only logits."""

from mapd_verl.divergence.full_vocabulary import (
    Divergence,
    ForwardKL,
    GeneralisedJSD,
    ReverseKL,
    full_vocabulary_divergence,
)

__all__ = ["Divergence", "ForwardKL", "GeneralisedJSD", "ReverseKL", "full_vocabulary_divergence"]
