import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.divergence import ForwardKL, GeneralisedJSD, ReverseKL, full_vocabulary_divergence

KINDS = [ReverseKL(), ForwardKL(), GeneralisedJSD(0.1), GeneralisedJSD(0.5), GeneralisedJSD(0.9)]


def dense(student: torch.Tensor, teacher: torch.Tensor, kind) -> torch.Tensor:
    """The definitions, written out in float64 and left to autograd."""
    log_p, log_q = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if isinstance(kind, ReverseKL):
        return (p * (log_p - log_q)).sum(-1)
    if isinstance(kind, ForwardKL):
        return (q * (log_q - log_p)).sum(-1)
    log_m = (kind.beta * q + (1 - kind.beta) * p).log()
    return kind.beta * (q * (log_q - log_m)).sum(-1) + (1 - kind.beta) * (p * (log_p - log_m)).sum(-1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{type(k).__name__}{getattr(k, 'beta', '')}")
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
    student = (scale * torch.randn(tokens, vocabulary)).requires_grad_()
    teacher = scale * torch.randn(tokens, vocabulary)
    upstream = torch.randn(tokens)
    values = full_vocabulary_divergence(student, teacher, kind, chunk)
    (gradient,) = torch.autograd.grad((values * upstream).sum(), student)

    reference = student.detach().double().requires_grad_()
    expected = dense(reference, teacher, kind)
    (expected_gradient,) = torch.autograd.grad((expected * upstream.double()).sum(), reference)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)
    assert (values >= -1e-6).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{type(k).__name__}{getattr(k, 'beta', '')}")
def test_chunks_change_no_value(kind):
    torch.manual_seed(0)
    student, teacher = torch.randn(17, 30), torch.randn(17, 30)
    whole = full_vocabulary_divergence(student, teacher, kind, 17)
    for chunk in (1, 4, 100):
        torch.testing.assert_close(
            full_vocabulary_divergence(student, teacher, kind, chunk), whole, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("kind", [ReverseKL(), ForwardKL()])
def test_equal_logits_give_exactly_zero(kind):
    student = torch.randn(5, 11, requires_grad=True)
    values = full_vocabulary_divergence(student, student.detach().clone(), kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert values.eq(0).all()
    assert gradient.eq(0).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{type(k).__name__}{getattr(k, 'beta', '')}")
def test_a_token_masked_out_in_both_counts_for_nothing(kind):
    torch.manual_seed(1)
    short_s, short_t = torch.randn(3, 6), torch.randn(3, 6)
    column = torch.full((3, 1), float("-inf"))
    student = torch.cat([short_s, column], -1).requires_grad_()
    values = full_vocabulary_divergence(student, torch.cat([short_t, column], -1), kind)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    torch.testing.assert_close(values, full_vocabulary_divergence(short_s, short_t, kind))
    assert gradient.isfinite().all()
    assert gradient[:, -1].eq(0).all()


def test_reductions_of_half_precision_logits_run_in_float32():
    torch.manual_seed(2)
    student = torch.randn(4, 2000).bfloat16().requires_grad_()
    teacher = torch.randn(4, 2000).bfloat16()
    values = full_vocabulary_divergence(student, teacher, ReverseKL())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), dense(student.detach(), teacher, ReverseKL()), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert gradient.dtype == torch.bfloat16


def test_the_teacher_gets_no_gradient():
    student, teacher = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    full_vocabulary_divergence(student, teacher, ReverseKL()).sum().backward()
    assert teacher.grad is None


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        full_vocabulary_divergence(torch.zeros(2, 3), torch.zeros(2, 4), ReverseKL())
    with pytest.raises(ValueError, match="chunk_tokens"):
        full_vocabulary_divergence(torch.zeros(2, 3), torch.zeros(2, 3), ReverseKL(), 0)
    with pytest.raises(ValueError, match="beta"):
        GeneralisedJSD(1.0)


def test_a_second_backward_is_refused():
    student = torch.randn(2, 5, requires_grad=True)
    total = full_vocabulary_divergence(student, torch.randn(2, 5), ReverseKL()).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already been differentiated"):
        total.backward()


def test_the_sampled_k1_estimate_has_no_gradient_on_policy():
    """Trap 1 of the method: why the exact divergence is used and not ``mean(S_t - T_t)`` of sampled tokens.

    Differentiating the sampled log-ratio with the teacher detached gives the score function, whose mean under
    the policy is zero: it trains nothing. The exact gradient is far from zero at the same place.
    """
    torch.manual_seed(0)
    student, teacher = torch.randn(6, requires_grad=True), torch.randn(6)
    exact = full_vocabulary_divergence(student[None], teacher[None], ReverseKL()).sum()
    (exact_gradient,) = torch.autograd.grad(exact, student)

    samples = 200_000
    drawn = torch.multinomial(student.detach().softmax(-1), samples, replacement=True)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    k1 = (log_p - log_q)[drawn].mean()
    (k1_gradient,) = torch.autograd.grad(k1, student, retain_graph=True)
    # The same samples as a stop-gradient advantage on the log-probability: unbiased.
    advantage = (log_p - log_q).detach()[drawn]
    (score_gradient,) = torch.autograd.grad((advantage * log_p[drawn]).mean(), student)

    # A score has a standard deviation of at most 1 per logit; the advantage of at most its largest value.
    error = 5 / samples**0.5
    assert k1_gradient.abs().max() < error
    assert exact_gradient.abs().max() > 20 * error
    spread = float(advantage.abs().max())
    torch.testing.assert_close(score_gradient, exact_gradient, rtol=0, atol=error * spread)
