import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.config.estimators import TOPK_OF
from mapd_verl.divergence import (
    Divergence,
    ForwardKL,
    GeneralisedJSD,
    ReverseKL,
    TopK,
    divergence_from_logits,
)

from . import dense

INNER: dict[str, Divergence] = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd": GeneralisedJSD(0.5),
    "clipped": ReverseKL(0.05),
}


def check(student, teacher, kind, within=1e-5):
    student = student.detach().requires_grad_()
    values = divergence_from_logits(student, teacher, kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    reference = student.detach().double().requires_grad_()
    expected = dense.divergence(reference, teacher.double(), kind)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), reference)
    torch.testing.assert_close(values.double(), expected, rtol=within, atol=within * float(expected.abs().max()))
    assert dense.relative(gradient, expected_gradient) < within


@pytest.mark.parametrize("of", TOPK_OF)
@pytest.mark.parametrize("inner", INNER)
def test_value_and_gradient_equal_the_float64_definition(inner, of):
    torch.manual_seed(0)
    student = 2 * torch.randn(7, 3000)
    for k in (1, 20, 256):
        check(student, student + torch.randn(7, 3000), TopK(INNER[inner], k, of))


@settings(max_examples=40, deadline=None)
@given(
    inner=st.sampled_from(sorted(INNER)),
    of=st.sampled_from(TOPK_OF),
    k=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    seed=st.integers(0, 10_000),
)
def test_any_k_up_to_and_beyond_the_vocabulary(inner, of, k, vocabulary, seed):
    torch.manual_seed(seed)
    student, teacher = torch.randn(3, vocabulary), torch.randn(3, vocabulary)
    check(student, teacher, TopK(INNER[inner], k, of), within=3e-5)
    if k >= vocabulary:
        whole = divergence_from_logits(student, teacher, INNER[inner])
        torch.testing.assert_close(divergence_from_logits(student, teacher, TopK(INNER[inner], k, of)), whole)


@settings(max_examples=30, deadline=None)
@given(of=st.sampled_from(TOPK_OF), k=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_buckets_never_exceed_the_whole_and_are_never_negative(of, k, seed):
    torch.manual_seed(seed)
    student, teacher = 3 * torch.randn(4, 30), 3 * torch.randn(4, 30)
    for inner in (ReverseKL(), ForwardKL(), GeneralisedJSD(0.3)):
        top = divergence_from_logits(student, teacher, TopK(inner, k, of))
        assert (top >= -1e-6).all()
        assert (top <= divergence_from_logits(student, teacher, inner) + 1e-5).all()


def test_without_the_tail_mass_drains_out_of_the_top():
    """Trap 2. Descending on the truncated reverse KL empties the top k; with the tail the distributions meet."""
    torch.manual_seed(0)
    k = 3
    teacher = torch.linspace(2, 0, 12)[None]
    index = torch.arange(k)

    def truncated(s):
        log_p, log_q = s.log_softmax(-1)[:, index], teacher.log_softmax(-1)[:, index]
        return (log_p.exp() * (log_p - log_q)).sum()

    def with_tail(s):
        return divergence_from_logits(s, teacher, TopK(ReverseKL(), k, "teacher")).sum()

    mass = {}
    for name, loss in (("truncated", truncated), ("with_tail", with_tail)):
        s = teacher.clone().add_(0.1 * torch.randn(1, 12)).requires_grad_()
        for _ in range(2000):
            (gradient,) = torch.autograd.grad(loss(s), s)
            s.data.sub_(0.5 * gradient)
        mass[name] = s.softmax(-1)[0, index].sum().item()
        if name == "truncated":
            assert truncated(s) < 0  # "better" than equality: it is no divergence
    target = teacher.softmax(-1)[0, index].sum().item()
    assert mass["with_tail"] == pytest.approx(target, abs=1e-3)
    assert mass["truncated"] < target - 0.1


def test_truncated_forward_kl_goes_negative_and_the_bucketed_one_does_not():
    student, teacher = torch.tensor([[5.0, 0, 0, 0, 0]]), torch.zeros(1, 5)
    p, q = student.softmax(-1)[0, :1], teacher.softmax(-1)[0, :1]
    assert (q * (q / p).log()).sum() < 0
    assert divergence_from_logits(student, teacher, TopK(ForwardKL(), 1)) > 0


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="k must be"):
        TopK(ReverseKL(), 0)
    with pytest.raises(ValueError, match="student, teacher, union"):
        TopK(ReverseKL(), 3, "both")
