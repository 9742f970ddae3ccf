import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.divergence import ForwardKL, GeneralisedJSD, ReverseKL, divergence_from_logits, make_jsd

from . import dense

KINDS = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd_0.1": GeneralisedJSD(0.1),
    "jsd_0.5": GeneralisedJSD(0.5),
    "jsd_0.9": GeneralisedJSD(0.9),
    "reverse_kl_clipped": ReverseKL(0.05),
    "forward_kl_clipped": ForwardKL(0.05),
    "jsd_clipped": GeneralisedJSD(0.5, 0.05),
}


def both(student: torch.Tensor, teacher: torch.Tensor, kind, chunk: int = 1024):
    """Values and gradients under random upstream derivatives: ours, and the float64 definition's."""
    torch.manual_seed(len(student))
    upstream = torch.randn(len(student))
    student = student.detach().requires_grad_()
    values = divergence_from_logits(student, teacher, kind, chunk)
    (gradient,) = torch.autograd.grad((values * upstream).sum(), student)
    reference = student.detach().double().requires_grad_()
    expected = dense.divergence(reference, teacher, kind)
    (expected_gradient,) = torch.autograd.grad((expected * upstream.double()).sum(), reference)
    return values.detach(), gradient, expected.detach(), expected_gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_value_and_gradient_to_1e_5_relative(kind, scale):
    """At a vocabulary of thousands, for close and for far distributions."""
    torch.manual_seed(3)
    student = scale * torch.randn(6, 5000)
    teacher = student + 0.5 * scale * torch.randn(6, 5000)
    values, gradient, expected, expected_gradient = both(student, teacher, KINDS[kind])
    assert dense.relative(values, expected) < 1e-5
    assert dense.relative(gradient, expected_gradient) < 1e-5


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 12),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradient_equal_the_float64_definition(kind, tokens, vocabulary, chunk, scale, seed):
    torch.manual_seed(seed)
    student, teacher = scale * torch.randn(tokens, vocabulary), scale * torch.randn(tokens, vocabulary)
    values, gradient, expected, expected_gradient = both(student, teacher, kind, chunk)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)
    assert kind.clip is not None or (values >= -1e-6).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_chunks_change_no_value(kind):
    torch.manual_seed(0)
    student, teacher = torch.randn(17, 30), torch.randn(17, 30)
    whole = divergence_from_logits(student, teacher, kind, 17)
    for chunk in (1, 4, 100):
        torch.testing.assert_close(divergence_from_logits(student, teacher, kind, chunk), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equal_logits_give_exactly_zero(kind):
    student = torch.randn(5, 11, requires_grad=True)
    values = divergence_from_logits(student, student.detach().clone(), kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert values.eq(0).all()
    assert gradient.eq(0).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_token_masked_out_in_both_counts_for_nothing(kind):
    torch.manual_seed(1)
    short_s, short_t = torch.randn(3, 6), torch.randn(3, 6)
    column = torch.full((3, 1), float("-inf"))
    student = torch.cat([short_s, column], -1).requires_grad_()
    values = divergence_from_logits(student, torch.cat([short_t, column], -1), kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    torch.testing.assert_close(values, divergence_from_logits(short_s, short_t, kind))
    assert gradient.isfinite().all()
    assert gradient[:, -1].eq(0).all()


def test_reductions_of_half_precision_logits_run_in_float32():
    torch.manual_seed(2)
    student = torch.randn(4, 2000).bfloat16().requires_grad_()
    teacher = torch.randn(4, 2000).bfloat16()
    values = divergence_from_logits(student, teacher, ReverseKL())
    assert values.dtype == torch.float32
    torch.testing.assert_close(
        values.double(), dense.divergence(student.detach(), teacher, ReverseKL()), rtol=1e-5, atol=1e-5
    )
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert gradient.dtype == torch.bfloat16


def test_the_teacher_gets_no_gradient():
    student, teacher = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    divergence_from_logits(student, teacher, ReverseKL()).sum().backward()
    assert teacher.grad is None


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        divergence_from_logits(torch.zeros(2, 3), torch.zeros(2, 4), ReverseKL())
    with pytest.raises(ValueError, match="chunk_tokens"):
        divergence_from_logits(torch.zeros(2, 3), torch.zeros(2, 3), ReverseKL(), 0)
    with pytest.raises(ValueError, match="beta"):
        GeneralisedJSD(1.0)


def test_a_second_backward_is_refused():
    student = torch.randn(2, 5, requires_grad=True)
    total = divergence_from_logits(student, torch.randn(2, 5), ReverseKL()).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already been differentiated"):
        total.backward()


def test_the_ends_of_the_jsd_are_the_two_kls_by_convention():
    assert isinstance(make_jsd(0.0), ForwardKL) and isinstance(make_jsd(1.0, 0.1), ReverseKL)
    assert make_jsd(1.0, 0.1).clip == 0.1
    middle = make_jsd(0.25)
    assert isinstance(middle, GeneralisedJSD) and middle.beta == 0.25
    # The formula's own limits: JSD / beta tends to forward KL, JSD / (1 - beta) to reverse KL.
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    for kind, weight, limit in (
        (GeneralisedJSD(1e-3), 1e-3, make_jsd(0.0)),
        (GeneralisedJSD(1 - 1e-3), 1e-3, make_jsd(1.0)),
    ):
        near = divergence_from_logits(student, teacher, kind) / weight
        torch.testing.assert_close(near, divergence_from_logits(student, teacher, limit), rtol=2e-2, atol=1e-3)


def test_the_clip_bounds_each_entrys_summand():
    """One token on which the teacher is sure: the plain KL is large, the clipped one at most the bound an entry."""
    student, teacher = torch.zeros(1, 50), torch.zeros(1, 50)
    student[0, 3], teacher[0, 4] = 12.0, 12.0
    plain, clipped = (divergence_from_logits(student, teacher, ReverseKL(clip)) for clip in (None, 0.05))
    assert plain > 5
    assert clipped < 0.05 * 50 and clipped < plain
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="clip"):
            ReverseKL(bad)


def test_nan_is_not_hidden():
    student = torch.randn(2, 5)
    student[0, 1] = float("nan")
    values = divergence_from_logits(student, torch.randn(2, 5), ReverseKL())
    assert values[0].isnan() and values[1].isfinite()
