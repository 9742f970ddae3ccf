"""Teachers and signals through verl's real FSDP2 engine, against float64 references written from the method."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mapd_verl.config import ObjectiveConfig
from mapd_verl.config.method import FilterConfig, TeacherConfig
from mapd_verl.config.schema import MapdConfig
from mapd_verl.errors import UserError
from mapd_verl.loss import TEACHER_LOG_PROBS, WEIGHT, MapdLoss
from mapd_verl.objectives import make_objective
from mapd_verl.teachers import TEACHERS, make_teacher
from mapd_verl.teachers.live import Live
from mapd_verl.teachers.weights import copy_of, local
from mapd_verl.token_filter import TokenFilter
from mapd_verl.verl_seams import tensordict_utils
from mapd_verl.views import ragged

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows, run

COPIES = ("snapshot", "ema", "fixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("other"), hidden=48, seed=7)


@pytest.fixture(scope="module")
def worker(folder):
    return make_worker(folder)


@pytest.fixture(params=["lean", "stock"])
def engine(request, worker):
    engine = worker.engine
    engine.lean = request.param == "lean"
    before = copy_of(engine.module)
    yield engine
    engine.lean, engine.teacher, engine.token_filter = True, Live(TeacherConfig()), TokenFilter(FilterConfig())
    put(engine, before)


def put(engine, weights):
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            local(p).copy_(weights[name])


def perturb(engine, scale=0.05, seed=0):
    """The policy moves on, as an update would move it."""
    g = torch.Generator().manual_seed(seed)
    put(engine, {n: w + scale * torch.randn(w.shape, generator=g) for n, w in copy_of(engine.module).items()})


def rows(**keys):
    made = random_rows(5, **keys)
    for row in made:
        row.advantage = 0.0  # what remains of the loss is the term alone
    return made


def kl_loss(weight=1.0, **keys):
    return MapdLoss(base_loss(), make_objective(ObjectiveConfig(weight=weight, **keys)))


def teach(engine, kind, **keys):
    engine.teacher = make_teacher(TeacherConfig(kind=kind, **keys))
    engine.teacher.prepare(engine)


def log_probs_of(folder, prompt, response, weights=None):
    """``[T, V]`` in float64."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if weights is not None:
        model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, -len(response) - 1 : -1]
    return torch.log_softmax(logits, -1)


def expected_term(batch_rows, student, teacher):
    """token-mean of the reverse KL; ``student`` and ``teacher`` map (prompt, response) to log-probabilities."""
    total, tokens = 0.0, sum(sum(row.mask) for row in batch_rows)
    for row in batch_rows:
        if row.teacher_prompt is not None:
            log_p, log_q = student(row.prompt, row.response), teacher(row.teacher_prompt, row.response)
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            total += (kl * torch.tensor(row.mask)).sum().item()
    return total / tokens


@pytest.mark.parametrize("kind", COPIES)
def test_the_student_is_bitwise_what_it_was_after_the_teacher_ran(worker, engine, kind):
    teach(engine, kind)
    engine.teacher.before_update(engine)
    perturb(engine)
    before = copy_of(engine.module)
    run(worker, kl_loss(), make_batch(rows(), 2))
    after = copy_of(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", COPIES)
def test_before_the_policy_moves_every_copy_is_the_live_teacher(worker, engine, kind):
    live, gradients, _ = run(worker, kl_loss(), make_batch(rows(), 2))
    teach(engine, kind)
    engine.teacher.before_update(engine)
    loss, same, _ = run(worker, kl_loss(), make_batch(rows(), 2))
    assert loss == pytest.approx(live, rel=1e-6)
    for name in gradients:
        torch.testing.assert_close(same[name], gradients[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", COPIES)
def test_after_it_has_moved_the_teacher_is_the_policy_of_then(worker, engine, folder, kind):
    old = copy_of(engine.module)
    teach(engine, kind, **({"ema_decay": 1.0} if kind == "ema" else {}))
    engine.teacher.before_update(engine)
    perturb(engine)
    engine.teacher.after_step(engine)
    new = copy_of(engine.module)
    batch_rows = rows(with_context=0.7)
    loss, gradients, _ = run(worker, kl_loss(), make_batch(batch_rows, 2))
    expected = expected_term(
        batch_rows, lambda p, r: log_probs_of(folder, p, r, new), lambda p, r: log_probs_of(folder, p, r, old)
    )
    assert loss == pytest.approx(expected, rel=1e-5)
    assert any(g.abs().max() > 0 for g in gradients.values())


def test_the_average_moves_by_its_decay_and_survives_a_checkpoint(worker, engine):
    old = copy_of(engine.module)
    teach(engine, "ema", ema_decay=0.75)
    perturb(engine)
    engine.teacher.after_step(engine)
    new = copy_of(engine.module)
    state = engine.teacher.state_dict()
    for name in old:
        torch.testing.assert_close(state[name], 0.75 * old[name] + 0.25 * new[name], rtol=1e-6, atol=1e-7)
    teach(engine, "ema")
    engine.teacher.load_state_dict(copy.deepcopy(state))
    assert all(torch.equal(engine.teacher.state_dict()[name], state[name]) for name in state)


def test_an_external_teacher_of_another_width(worker, engine, folder, other):
    teach(engine, "external", path=str(other))
    batch_rows = rows()
    loss, _, _ = run(worker, kl_loss(), make_batch(batch_rows, 2))
    expected = expected_term(
        batch_rows, lambda p, r: log_probs_of(folder, p, r), lambda p, r: log_probs_of(other, p, r)
    )
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_wrong_external_teacher_is_one_line(engine, tmp_path):
    with pytest.raises(UserError, match=r"mapd\.teacher\.path: no model folder"):
        teach(engine, "external", path=str(tmp_path / "nowhere"))
    wide = make_model_folder(tmp_path / "wide", vocab=640)
    with pytest.raises(UserError, match="640 vocabulary entries, the policy 512"):
        teach(engine, "external", path=str(wide))


def test_scores_before_the_update_are_the_teachers_log_probabilities(worker, engine, folder):
    batch_rows = rows(with_context=0.6)
    batch = make_batch(batch_rows, 2, temperature=1.0)
    with engine.eval_mode(), torch.no_grad():
        scored = engine.teacher_log_probs(batch, rows_at_once=3).unbind()
    for row, values in zip(batch_rows, scored, strict=True):
        mask = torch.tensor(row.mask).bool()
        assert len(values) == len(row.response) and (values[~mask] == 0).all()
        if row.teacher_prompt is None:
            assert (values == 0).all()
            continue
        labels = torch.tensor(row.response).unsqueeze(-1)
        expected = log_probs_of(folder, row.teacher_prompt, row.response).gather(-1, labels).squeeze(-1)
        torch.testing.assert_close(values[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [{"turns": [0]}, {"actions": ["search"]}, {"turns": [0, 1], "actions": ["think"]}])
def test_a_filter_leaves_the_other_tokens_out_and_the_mean_as_it_was(worker, engine, folder, keys):
    batch_rows = rows()
    engine.token_filter = token_filter = TokenFilter(FilterConfig(**keys))
    loss = MapdLoss(base_loss(), make_objective(ObjectiveConfig(weight=1.0)), token_filter)
    value, _, metrics = run(worker, loss, make_batch(batch_rows, 2))
    tokens = sum(sum(row.mask) for row in batch_rows)
    numbers = {"think": 0, "search": 1, "answer": 2}
    total = 0.0
    for row in batch_rows:
        log_p, log_q = (log_probs_of(folder, p, row.response) for p in (row.prompt, row.teacher_prompt))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        for t, policy in enumerate(row.mask):
            turn_ok = "turns" not in keys or row.turn_ids[t] in keys["turns"]
            action_ok = "actions" not in keys or row.action_ids[t] in [numbers[a] for a in keys["actions"]]
            total += kl[t].item() if policy and turn_ok and action_ok else 0.0
    assert value == pytest.approx(total / tokens, rel=1e-5, abs=1e-9)
    assert metrics["distillation/raw/policy_tokens"].aggregate() == tokens


def test_the_gated_loss_reads_the_scores_and_runs_no_teacher(worker, engine, folder):
    batch_rows = rows(with_context=0.7)
    batch = make_batch(batch_rows, 2)
    g = torch.Generator().manual_seed(1)
    scores = [-3 * torch.rand(len(row.response), generator=g) for row in batch_rows]
    batch[TEACHER_LOG_PROBS] = ragged(scores)
    loss = kl_loss(name="sigmoid_gated", sharpness=5.0)
    engine._teacher_forward = lambda *_: pytest.fail("no teacher in this update")  # type: ignore[method-assign]
    try:
        value, gradients, _ = run(worker, loss, batch)
    finally:
        del engine._teacher_forward
    total = 0.0
    for row, teacher in zip(batch_rows, scores, strict=True):
        if row.teacher_prompt is not None:
            labels = torch.tensor(row.response).unsqueeze(-1)
            gap = teacher.double() - log_probs_of(folder, row.prompt, row.response).gather(-1, labels).squeeze(-1)
            total += (torch.sigmoid(5 * gap) * gap * torch.tensor(row.mask)).sum().item()
    assert value == pytest.approx(total / sum(sum(row.mask) for row in batch_rows), rel=1e-5)
    assert any(g.abs().max() > 0 for g in gradients.values())


def test_the_weight_of_the_step_travels_with_the_batch(worker, engine):
    whole, _, _ = run(worker, kl_loss(), make_batch(rows(), 2))
    batch = make_batch(rows(), 2)
    tensordict_utils.assign_non_tensor(batch, **{WEIGHT: 0.25})
    quarter, _, _ = run(worker, kl_loss(), batch)
    assert quarter == pytest.approx(0.25 * whole, rel=1e-6)


def test_a_clipped_token_carries_its_bound_and_no_gradient(worker, engine, folder):
    batch_rows = rows()
    values = []
    for row in batch_rows:
        log_p, log_q = (log_probs_of(folder, p, row.response) for p in (row.prompt, row.teacher_prompt))
        values += (log_p.exp() * (log_p - log_q)).sum(-1)[torch.tensor(row.mask).bool()].tolist()
    clip = sorted(values)[len(values) // 2]
    loss, _, _ = run(worker, kl_loss(token_clip=clip), make_batch(batch_rows, 2))
    assert loss == pytest.approx(sum(min(v, clip) for v in values) / len(values), rel=1e-4)
    tiny = min(values) / 2
    _, gradients, _ = run(worker, kl_loss(token_clip=tiny), make_batch(batch_rows, 2))
    assert all(g.abs().max() == 0 for g in gradients.values())


def test_the_schema_knows_the_teachers():
    for kind in TEACHERS:
        assert MapdConfig.from_mapping({"teacher": {"kind": kind, "path": "x" if kind == "external" else None}})
