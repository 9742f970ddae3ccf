"""The chunked head against logits in full, float64, and autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.divergence import (
    ForwardKL,
    GeneralisedJSD,
    Head,
    ReverseKL,
    TeacherStates,
    TokenStatistics,
    TopK,
    head_pass,
)

from . import dense

KINDS = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd": GeneralisedJSD(0.3),
    "reverse_kl_clipped": ReverseKL(0.05),
    "jsd_clipped": GeneralisedJSD(0.5, 0.02),
    "student_top": TopK(ReverseKL(), 5),
    "union_top": TopK(GeneralisedJSD(0.5), 4, "union"),
}
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "all": {"bias": True, "softcap": 4.0, "scale": 0.7},
}


class Case:
    """Random states, heads and upstream derivatives; everything from one seed."""

    def __init__(self, tokens=13, taught=8, vocabulary=40, hidden=16, seed=0, own_head=False, **keys):
        torch.manual_seed(seed)
        keys = dict(keys)
        self.hidden = torch.randn(tokens, hidden)
        self.weight = 0.5 * torch.randn(vocabulary, hidden)
        self.bias = 0.3 * torch.randn(vocabulary) if keys.pop("bias", False) else None
        self.head = Head(self.weight, self.bias, **keys)
        other = Head(0.5 * torch.randn(vocabulary, 9), None, softcap=6.0) if own_head else None
        states = self.hidden[:taught] + 0.5 * torch.randn(taught, hidden)
        self.teacher = TeacherStates(torch.randn(taught, 9) if other else states, other)
        self.labels = torch.randint(vocabulary, (tokens,))
        self.upstream = (torch.randn(tokens), 0.1 * torch.randn(tokens), torch.randn(taught))

    def leaves(self):
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def loss(self, statistics: TokenStatistics) -> torch.Tensor:
        outputs = (statistics.log_prob, statistics.entropy, statistics.divergence)
        return sum((o * u.to(o.dtype)).sum() for o, u in zip(outputs, self.upstream, strict=True))

    def foresee(self, chunk: slice, _: TokenStatistics):
        return self.upstream[0][chunk], self.upstream[1][chunk], self.upstream[2][chunk]

    def run(self, kind, **keys):
        """Statistics and gradients of the chunked pass."""
        leaves = [t.detach().clone().requires_grad_() for t in self.leaves()]
        head = replace(self.head, weight=leaves[1], bias=leaves[2] if self.bias is not None else None)
        statistics = head_pass(leaves[0], head, self.labels, self.teacher, kind, **keys)
        return statistics, torch.autograd.grad(self.loss(statistics), leaves)

    def reference(self, kind, temperature=1.0) -> tuple[TokenStatistics, tuple[torch.Tensor, ...]]:
        """The same in float64 from whole tensors of logits."""
        leaves = [t.detach().double().requires_grad_() for t in self.leaves()]
        head = replace(self.head, weight=leaves[1], bias=leaves[2] if self.bias is not None else None)
        s = dense.logits(leaves[0], head, temperature)
        other = self.teacher.head or head
        other = replace(
            other,
            weight=other.weight.detach().double(),
            bias=None if other.bias is None else other.bias.detach().double(),
        )
        m = len(self.teacher.hidden)
        of_teacher = temperature[:m] if isinstance(temperature, torch.Tensor) else temperature
        t = dense.logits(self.teacher.hidden.double(), other, of_teacher)
        log_p, log_q = s.log_softmax(-1), t.log_softmax(-1)
        statistics = TokenStatistics(
            log_p.gather(-1, self.labels[:, None])[:, 0],
            -(log_p.exp() * log_p).sum(-1),
            dense.divergence(s[:m], t, kind) if kind is not None else s.new_zeros(m),
            log_q.gather(-1, self.labels[:m, None])[:, 0],
            -(log_q.exp() * log_q).sum(-1),
        )
        return statistics, torch.autograd.grad(self.loss(statistics), leaves)

    def check(self, kind, temperature=1.0, within=1e-5, **keys):
        got, gradients = self.run(kind, temperature=temperature, **keys)
        expected, expected_gradients = self.reference(kind, temperature)
        for name in ("log_prob", "entropy", "divergence", "teacher_log_prob", "teacher_entropy"):
            assert dense.relative(getattr(got, name), getattr(expected, name)) < within, name
        for gradient, reference in zip(gradients, expected_gradients, strict=True):
            assert dense.relative(gradient, reference) < within


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "recomputed"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_float64_reference(kind, head, foreseen):
    case = Case(seed=1, **HEADS[head])
    case.check(KINDS[kind], chunk_tokens=3, foresee=case.foresee if foreseen else None)


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "recomputed"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_temperatures_by_number_and_by_token(foreseen, softcap):
    case = Case(seed=2, softcap=softcap)
    foresee = case.foresee if foreseen else None
    case.check(ReverseKL(), temperature=0.6, chunk_tokens=4, foresee=foresee)
    case.check(ReverseKL(), temperature=torch.linspace(0.5, 2.0, 13), chunk_tokens=4, foresee=foresee)


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "recomputed"])
def test_a_teacher_with_a_head_of_its_own(foreseen):
    """Another model: other hidden size, other weights, other softcap; one vocabulary."""
    case = Case(seed=3, own_head=True)
    case.check(ReverseKL(), chunk_tokens=5, foresee=case.foresee if foreseen else None)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 11),
    share=st.floats(0, 1),
    chunk=st.integers(1, 13),
    vocabulary=st.sampled_from([2, 7, 33]),
    seed=st.integers(0, 10_000),
    foreseen=st.booleans(),
)
def test_any_number_of_tokens_teachers_and_chunks(tokens, share, chunk, vocabulary, seed, foreseen):
    case = Case(tokens, round(share * tokens), vocabulary, 6, seed)
    case.check(ReverseKL(), within=3e-5, chunk_tokens=chunk, foresee=case.foresee if foreseen else None)


def test_without_a_divergence_the_teacher_is_scored_all_the_same():
    case = Case(seed=4)
    case.check(None, chunk_tokens=4, foresee=case.foresee)
    case.check(None, chunk_tokens=4)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd", "reverse_kl_clipped", "student_top", "union_top"])
def test_equal_states_give_exactly_zero(kind):
    """At several chunk sizes, with and without rows beside that have no teacher."""
    for taught in (13, 8):
        case = Case(taught=taught, vocabulary=1000, hidden=64, seed=5)
        case.teacher = TeacherStates(case.hidden[:taught].clone())
        case.upstream = (torch.zeros(13), torch.zeros(13), torch.ones(taught))
        for chunk in (1, 3, 64):
            for foresee in (case.foresee, None):
                statistics, gradients = case.run(KINDS[kind], chunk_tokens=chunk, foresee=foresee)
                assert statistics.divergence.eq(0).all()
                assert all(g.eq(0).all() for g in gradients)


def test_what_was_foreseen_wrongly_is_put_right():
    """Some tokens' derivatives turn out otherwise: the result is that of the derivatives which came."""
    case = Case(seed=6)
    truth = case.upstream
    for wrong in ([0, 9], range(13)):
        case.upstream = tuple(u.clone() for u in truth)
        for index in wrong:
            for u in case.upstream:
                if index < len(u):
                    u[index] += 1.0
        guess = case.upstream

        def foresee(chunk, _, guess=guess):
            return guess[0][chunk], guess[1][chunk], guess[2][chunk]

        case.upstream = truth
        case.check(ReverseKL(), chunk_tokens=4, foresee=foresee)


def test_a_scaled_loss_costs_no_second_projection(monkeypatch):
    """A gradient scaler's factor is recognised; so is the loss as foreseen."""
    case = Case(seed=7)
    projections = []
    original = Head.logits_into
    monkeypatch.setattr(Head, "logits_into", lambda *args: (projections.append(1), original(*args))[1])
    for factor in (1.0, 1024.0, 0.3):
        leaves = [t.detach().clone().requires_grad_() for t in case.leaves()]
        projections.clear()
        head = replace(case.head, weight=leaves[1])
        statistics = head_pass(
            leaves[0], head, case.labels, case.teacher, ReverseKL(), chunk_tokens=4, foresee=case.foresee
        )
        first = len(projections)
        gradients = torch.autograd.grad(factor * case.loss(statistics), leaves)
        assert len(projections) == first
        for gradient, expected in zip(gradients, case.reference(ReverseKL())[1], strict=True):
            assert dense.relative(gradient, factor * expected) < 1e-5


def test_a_frozen_head_gets_no_gradient():
    case = Case(seed=8)
    hidden = case.hidden.clone().requires_grad_()
    statistics = head_pass(hidden, case.head, case.labels, case.teacher, ReverseKL(), foresee=case.foresee)
    case.loss(statistics).backward()
    assert dense.relative(hidden.grad, case.reference(ReverseKL())[1][0]) < 1e-5
    assert case.weight.grad is None


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "recomputed"])
def test_bfloat16_inputs_are_reduced_in_float32(foreseen):
    """Against the reference on the same rounded inputs: what is left is the products' rounding."""
    case = Case(tokens=64, taught=40, vocabulary=500, hidden=64, seed=9)
    case.hidden, case.weight = case.hidden.bfloat16(), (0.2 * case.weight).bfloat16()
    case.head = Head(case.weight)
    case.teacher = TeacherStates(case.teacher.hidden.bfloat16())
    got, gradients = case.run(ReverseKL(), chunk_tokens=16, foresee=case.foresee if foreseen else None)
    expected, expected_gradients = case.reference(ReverseKL())
    assert got.log_prob.dtype == got.divergence.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in gradients)
    assert dense.relative(got.log_prob, expected.log_prob) < 2e-3
    assert dense.relative(got.divergence, expected.divergence) < 1e-2
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert dense.relative(gradient, reference) < 1e-2
    # The sum over the vocabulary is float32's: a uniform distribution's entropy to 1e-6, where bfloat16 stops at 1e-2.
    flat = head_pass(torch.zeros(3, 8).bfloat16(), Head(torch.zeros(50_000, 8).bfloat16()), torch.zeros(3).long())
    torch.testing.assert_close(flat.entropy, torch.full((3,), 50_000.0).log(), rtol=1e-6, atol=0)


def test_under_autocast_the_products_run_in_its_type():
    case = Case(tokens=64, taught=40, vocabulary=300, hidden=64, seed=10)
    case.weight.mul_(0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, gradients = case.run(ReverseKL(), chunk_tokens=16, foresee=case.foresee)
    expected, expected_gradients = case.reference(ReverseKL())
    assert 1e-5 < dense.relative(got.log_prob, expected.log_prob) < 5e-3
    assert all(g.dtype == torch.float32 for g in gradients)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert dense.relative(gradient, reference) < 2e-2


def test_nan_is_not_hidden():
    case = Case(seed=11)
    case.hidden[2, 3] = float("nan")
    statistics, _ = case.run(ReverseKL(), chunk_tokens=4)
    assert statistics.log_prob[2].isnan() and statistics.divergence[2].isnan()
    assert statistics.divergence[3:].isfinite().all()


def test_no_buffer_grows_with_the_tokens(monkeypatch):
    """Every tensor made in forward and backward: none has more rows of the vocabulary's size than a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocabulary, chunk = 96, 701, 8
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and vocabulary in tensor.shape and 16 not in tensor.shape:
                    largest = max(largest, tensor.numel() // vocabulary)
            return out

    for foreseen in (True, False):
        for kind in (ReverseKL(), GeneralisedJSD(0.5, 0.05), TopK(ForwardKL(), 10, "union")):
            case = Case(tokens, 60, vocabulary, seed=12)
            with Watch():
                case.run(kind, chunk_tokens=chunk, foresee=case.foresee if foreseen else None)
    assert 1 <= largest <= 2 * chunk  # the scratch of two distributions is one tensor


def test_a_second_backward_is_refused():
    hidden = torch.randn(3, 4, requires_grad=True)
    total = head_pass(hidden, Head(torch.randn(5, 4)), torch.tensor([0, 1, 2])).log_prob.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already been differentiated"):
        total.backward()


def test_bad_input_is_named():
    hidden, head, labels = torch.randn(3, 4), Head(torch.randn(5, 4)), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="chunk_tokens"):
        head_pass(hidden, head, labels, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"hidden \[N, H\]"):
        head_pass(hidden, Head(torch.randn(5, 6)), labels)
    with pytest.raises(ValueError, match="one temperature a token"):
        head_pass(hidden, head, labels, temperature=torch.ones(2))
    with pytest.raises(ValueError, match="one vocabulary"):
        head_pass(hidden, head, labels, TeacherStates(hidden, Head(torch.randn(6, 4))))
    with pytest.raises(ValueError, match="fit neither"):
        head_pass(hidden, head, labels, TeacherStates(torch.randn(4, 4)))
