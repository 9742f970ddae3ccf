"""The distillation term through verl's real FSDP2 engine and a real (tiny) Qwen3, against a float64 reference."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mapd_verl.config import ObjectiveConfig
from mapd_verl.errors import UserError
from mapd_verl.loss import RAW, MapdLoss
from mapd_verl.objectives import make_objective

from .harness import Row, base_loss, make_batch, make_model_folder, make_worker, random_rows, run

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(folder):
    return make_worker(folder)


@pytest.fixture(params=["lean", "stock"])
def forward(request, worker):
    worker.engine.lean = request.param == "lean"
    yield request.param
    worker.engine.lean = True


def mapd_loss(weight=1.0, mode="token-mean", **keys):
    return MapdLoss(base_loss(mode), make_objective(ObjectiveConfig(weight=weight, **keys)))


def grpo_free(rows: list[Row]) -> list[Row]:
    """The rows with all advantages zero: what remains of the loss is the term alone."""
    rows = copy.deepcopy(rows)
    for row in rows:
        row.advantage = 0.0
    return rows


def reference(folder, rows: list[Row], mode: str, temperature: float = 1.0):
    """``agg_t m_t KL(student || teacher)`` in float64, row by row without padding, written from the method."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    per_row = []
    for row in rows:
        n = len(row.response)
        student = model(torch.tensor([row.prompt + row.response])).logits[0, -n - 1 : -1] / temperature
        kl = torch.zeros(n, dtype=torch.float64)
        if row.teacher_prompt is not None:
            with torch.no_grad():
                teacher = model(torch.tensor([row.teacher_prompt + row.response])).logits[0, -n - 1 : -1] / temperature
            log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        per_row.append((kl * torch.tensor(row.mask), sum(row.mask)))
    if mode == "token-mean":
        total = sum(kl.sum() for kl, _ in per_row) / sum(count for _, count in per_row)
    elif mode == "seq-mean-token-sum":
        total = sum(kl.sum() for kl, _ in per_row) / len(rows)
    else:
        total = sum(kl.sum() / count for kl, count in per_row if count) / len(rows)
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(gradients, expected, rtol=1e-5):
    """Relative to each parameter's largest entry."""
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        scale = expected[name].abs().max().item()
        assert (gradient.double() - expected[name].double()).abs().max().item() <= rtol * scale + 1e-9, name


@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient_equal_the_float64_reference(worker, folder, forward, mode):
    rows = grpo_free(random_rows(3))
    rows[1].teacher_prompt = None
    loss, gradients, _ = run(worker, mapd_loss(mode=mode), make_batch(rows, 2))
    expected, expected_gradients = reference(folder, rows, mode)
    assert expected > 0.01
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_gradients_close(gradients, expected_gradients)


def test_both_views_take_the_policys_temperature(worker, folder, forward):
    rows = grpo_free(random_rows(4))
    loss, gradients, _ = run(worker, mapd_loss(), make_batch(rows, 2, temperature=0.7))
    expected, expected_gradients = reference(folder, rows, "token-mean", temperature=0.7)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_gradients_close(gradients, expected_gradients)


@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_give_the_same_as_padded_ones(worker, folder, forward, mode):
    """verl's remove-padding layout, which GPU recipes use: rows laid end to end, told apart by positions."""
    rows = grpo_free(random_rows(21))
    rows[2].teacher_prompt = None
    loss, gradients, _ = run(worker, mapd_loss(mode=mode), make_batch(rows, 2, use_remove_padding=True))
    expected, expected_gradients = reference(folder, rows, mode)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_gradients_close(gradients, expected_gradients)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_change_neither_loss_nor_gradient(worker, mode):
    rows = random_rows(5, count=4, with_context=0.6)
    results = [run(worker, mapd_loss(0.3, mode), make_batch(rows, size)) for size in (4, 2, 1)]
    for loss, gradients, _ in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert_gradients_close(gradients, results[0][1])


def test_lambda_scales_the_term_and_nothing_else(worker):
    rows = random_rows(6)
    grpo, _, _ = run(worker, base_loss(), make_batch(rows, 2))
    for weight in (0.05, 0.5):
        loss, _, metrics = run(worker, mapd_loss(weight), make_batch(rows, 2))
        assert loss == pytest.approx(grpo + weight * metrics["distillation/loss"].aggregate(), rel=1e-5)


def test_without_an_objective_the_engine_is_verls_bit_for_bit(worker, monkeypatch):
    from mapd_verl.cpu.engine import CPUFSDPEngineWithLMHead as Stock

    worker.engine.lean = False
    rows = random_rows(20)
    ours, gradients, _ = run(worker, base_loss(), make_batch(rows, 2))
    for method in ("forward_step", "prepare_model_outputs"):
        monkeypatch.setattr(type(worker.engine), method, getattr(Stock, method))
    stock, stock_gradients, _ = run(worker, base_loss(), make_batch(rows, 2))
    worker.engine.lean = True
    assert ours == stock
    assert all(torch.equal(gradients[name], stock_gradients[name]) for name in stock_gradients)


def test_selected_logits_give_verls_own_loss_and_gradient(worker):
    """``forward: lean`` against verl's full logits, entropy bonus and all, without any distillation."""
    rows = random_rows(7)
    batch, other = (make_batch(rows, 2, calculate_entropy=True) for _ in range(2))
    worker.engine.lean = False
    loss, gradients, metrics = run(worker, base_loss(entropy_coeff=0.01), batch)
    worker.engine.lean = True
    lean, lean_gradients, lean_metrics = run(worker, base_loss(entropy_coeff=0.01), other)
    assert lean == pytest.approx(loss, rel=1e-5)
    assert_gradients_close(lean_gradients, gradients)
    assert lean_metrics["actor/entropy_loss"].aggregate() == pytest.approx(
        metrics["actor/entropy_loss"].aggregate(), rel=1e-5
    )


def test_selected_log_probs_equal_verls_at_policy_tokens(worker):
    """The forward before the update (old log-probabilities) takes the same short cut."""
    rows = random_rows(8)
    outputs = {}
    for name in ("stock", "lean"):
        worker.engine.lean = name == "lean"
        batch = make_batch(rows, 2, calculate_entropy=True)
        with worker.engine.eval_mode():
            outputs[name] = worker.engine.infer_batch(batch, loss_function=None)["model_output"]
    for key in ("log_probs", "entropy"):
        for full, lean, row in zip(*(outputs[n][key].unbind() for n in ("stock", "lean")), rows, strict=True):
            at = torch.tensor(row.mask).bool()
            response = slice(len(row.prompt) - 1, len(row.prompt) + len(row.response) - 1)
            torch.testing.assert_close(lean[response][at], full[response][at], rtol=1e-5, atol=1e-5)
            assert lean[response][~at].eq(0).all()


def test_an_empty_context_gives_exactly_zero(worker, forward):
    rows = grpo_free(random_rows(9, count=4))
    for row in rows:
        row.teacher_prompt, row.source = None, 3  # a source, and the student's own prompt
    loss, gradients, metrics = run(worker, mapd_loss(), make_batch(rows, 2))
    assert metrics[RAW + "tokens/all"].aggregate() == sum(sum(row.mask) for row in rows)
    assert loss == 0.0
    assert all(g.eq(0).all() for g in gradients.values())


def test_shuffled_contexts_give_another_term(worker):
    rows = grpo_free(random_rows(10))
    loss, _, _ = run(worker, mapd_loss(), make_batch(rows, 2))
    swapped = copy.deepcopy(rows)
    for row, other in zip(swapped, rows[1:] + rows[:1], strict=True):
        context = other.teacher_prompt[: len(other.teacher_prompt) - len(other.prompt)]
        row.teacher_prompt = context + row.prompt
    other_loss, _, _ = run(worker, mapd_loss(), make_batch(swapped, 2))
    assert abs(other_loss - loss) > 1e-3


def test_observations_carry_no_divergence(worker, forward):
    """Masking a turn out takes exactly its tokens' share of the term away."""
    rows = grpo_free(random_rows(11, count=2))
    whole, _, metrics = run(worker, mapd_loss(mode="seq-mean-token-sum"), make_batch(rows, 2))
    by_turn = {i: metrics[f"{RAW}sum/turn_{i}"].aggregate() for i in range(3)}
    assert sum(by_turn.values()) == pytest.approx(whole * len(rows), rel=1e-5)
    for row in rows:
        row.mask = [m if t != 0 else 0 for m, t in zip(row.mask, row.turn_ids, strict=True)]
        row.turn_ids = [t if m else -1 for m, t in zip(row.mask, row.turn_ids, strict=True)]
    rest, _, metrics = run(worker, mapd_loss(mode="seq-mean-token-sum"), make_batch(rows, 2))
    assert metrics[f"{RAW}tokens/turn_0"].aggregate() == 0
    assert rest * len(rows) == pytest.approx(whole * len(rows) - by_turn[0], rel=1e-5)


def test_rows_without_a_context_carry_no_term_but_count(worker, folder):
    rows = grpo_free(random_rows(12, count=4))
    for row in rows[2:]:
        row.teacher_prompt = None
    loss, _, metrics = run(worker, mapd_loss(), make_batch(rows, 2))
    expected, _ = reference(folder, rows, "token-mean")
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics[RAW + "tokens/all"].aggregate() == sum(sum(row.mask) for row in rows[:2])
    assert metrics[RAW + "policy_tokens"].aggregate() == sum(sum(row.mask) for row in rows)


def test_padding_rows_change_nothing(worker):
    """A row as verl pads with: one response token, not the policy's, and no context."""
    rows = random_rows(13, count=3)
    padding = Row([7] * 127, [(0, [7])], None, advantage=0.0)
    with_padding = make_batch([*rows, padding], 2)
    without = make_batch(rows, 3)
    loss, gradients, metrics = run(worker, mapd_loss(0.3), with_padding)
    expected, expected_gradients, expected_metrics = run(worker, mapd_loss(0.3), without)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_gradients_close(gradients, expected_gradients)
    assert metrics[RAW + "tokens/all"].aggregate() == expected_metrics[RAW + "tokens/all"].aggregate()


def test_a_micro_batch_of_padding_alone_goes_through(worker, forward):
    padding = Row([7] * 127, [(0, [7])], None, advantage=0.0)
    loss, gradients, _ = run(worker, mapd_loss(), make_batch([*random_rows(14, 1), padding], 1))
    assert loss == loss and all(g.isfinite().all() for g in gradients.values())


def test_the_teacher_reads_the_parameters_of_this_moment(worker, folder):
    """Live, not a copy: after a change of the weights both branches move together."""
    rows = grpo_free(random_rows(15))
    before, _, _ = run(worker, mapd_loss(), make_batch(rows, 2))
    norm = worker.engine.module.model.norm.weight
    original = norm.detach().clone()
    with torch.no_grad():
        norm.mul_(1.5)
    try:
        after, _, _ = run(worker, mapd_loss(), make_batch(rows, 2))
        model = Qwen3ForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
        moved = folder.parent / "moved"
        model.save_pretrained(moved)
        expected, _ = reference(moved, rows, "token-mean")
    finally:
        with torch.no_grad():
            norm.copy_(original)
    assert after == pytest.approx(expected, rel=1e-5)
    assert abs(after - before) > 1e-3


def test_training_mode_is_restored_and_no_hook_stays(worker):
    module = worker.engine.module
    run(worker, mapd_loss(), make_batch(random_rows(16), 2))
    with worker.engine.train_mode():
        worker.engine.forward_backward_batch(make_batch(random_rows(16), 2), mapd_loss())
        assert module.training
    assert not module.get_output_embeddings()._forward_pre_hooks


def test_a_missing_field_is_named(worker):
    batch = make_batch(random_rows(17), 2)
    del batch["privilege_source"]
    with pytest.raises(UserError, match="privilege_source"):
        run(worker, mapd_loss(), batch)


def test_fused_kernels_are_refused_by_name(worker):
    batch = make_batch(random_rows(18), 2, use_fused_kernels=True)
    with pytest.raises(UserError, match="use_fused_kernels"):
        run(worker, mapd_loss(), batch)


@pytest.mark.parametrize("name, keys", [("forward_kl", {}), ("jsd", {"beta": 0.5})])
def test_the_siblings_run_through_the_engine_too(worker, name, keys):
    rows = grpo_free(random_rows(19))
    loss, gradients, _ = run(worker, mapd_loss(name=name, **keys), make_batch(rows, 2))
    assert loss > 0 and any(g.abs().max() > 0 for g in gradients.values())
