"""The maths of comparing two next-token distributions, token by token. Knows logits, hidden states and heads."""

from mapd_verl.divergence.base import Distribution, Divergence, Pair
from mapd_verl.divergence.chunked_head import Head, TeacherStates, TokenStatistics, head_pass
from mapd_verl.divergence.full_vocabulary import (
    ForwardKL,
    GeneralisedJSD,
    ReverseKL,
    divergence_from_logits,
    make_jsd,
)
from mapd_verl.divergence.sampled import SAMPLED, sampled_estimator
from mapd_verl.divergence.topk import TopK

__all__ = [
    "SAMPLED",
    "Distribution",
    "Divergence",
    "ForwardKL",
    "GeneralisedJSD",
    "Head",
    "Pair",
    "ReverseKL",
    "TeacherStates",
    "TokenStatistics",
    "TopK",
    "divergence_from_logits",
    "head_pass",
    "make_jsd",
    "sampled_estimator",
]
