"""The exchanged head: other architectures' heads, and what a training step projects."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from mapd_verl.config import EstimatorConfig, ObjectiveConfig
from mapd_verl.divergence import Head
from mapd_verl.errors import UserError
from mapd_verl.head import exchanged_head, head_of
from mapd_verl.loss import MapdLoss
from mapd_verl.objectives import make_objective

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows, run

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS = {
    "tied": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
    "untied": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"tie_word_embeddings": False, "head_dim": 8}),
    "gemma_softcap": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"final_logit_softcapping": 0.4, "head_dim": 8}),
    "granite_divides": (hf.GraniteForCausalLM, hf.GraniteConfig, {"logits_scaling": 3.0}),
    "cohere_multiplies": (hf.CohereForCausalLM, hf.CohereConfig, {"logit_scale": 0.25}),
}


def make(name):
    torch.manual_seed(0)
    model, config, keys = MODELS[name]
    return model(config(**SIZES, **keys)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_head_is_read_off_the_model_as_the_model_uses_it(name):
    """Logits by our head from the hidden states that the model hands it, and the gradient of everything before."""
    model = make(name)
    ids = torch.randint(1, 60, (2, 7))
    positions = torch.tensor([1, 5, 9, 13])

    def project(hidden: torch.Tensor, head: Head) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        out = torch.empty_like(logits)
        head.to(torch.float32).logits_into(out, hidden.detach())
        torch.testing.assert_close(out, logits.detach())
        return logits

    expected = model(ids).logits.reshape(-1, 60)[positions]
    with exchanged_head(model, positions, project):
        got = model(ids).logits.squeeze(0)
    torch.testing.assert_close(got, expected)
    probe = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * probe).sum(), list(model.parameters())) for x in (got, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert model(ids).logits.shape == (2, 7, 60)  # all is as before


def test_an_unknown_way_from_head_to_logits_is_refused():
    model = make("tied")
    plain = type(model).forward
    model.forward = lambda *args, **keys: _shifted(plain(model, *args, **keys))
    with (
        pytest.raises(UserError, match="Qwen3ForCausalLM"),
        exchanged_head(model, torch.tensor([0]), lambda hidden, _: hidden),
    ):
        model(torch.tensor([[1, 2]]))


def _shifted(output):
    output.logits = 2 * output.logits
    return output


def test_a_head_that_is_no_linear_layer_is_refused():
    model = make("untied")
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(UserError, match="linear output head"):
        head_of(model)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(make_model_folder(tmp_path_factory.mktemp("model")))


def loss_of(weight=0.5, **keys):
    return MapdLoss(base_loss(), make_objective(ObjectiveConfig(weight=weight, **keys)))


def close(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, gradient in one[1].items():
        expected = other[1][name]
        assert (gradient - expected).abs().max() <= 2e-5 * expected.abs().max() + 1e-9, name


def test_a_training_step_projects_each_view_once(worker, monkeypatch):
    """verl's loss is foreseen to the last bit: the backward projects nothing, whatever the chunk size."""
    projected = []
    original = Head.logits_into
    monkeypatch.setattr(Head, "logits_into", lambda self, out, h: (projected.append(len(h)), original(self, out, h))[1])
    rows = random_rows(40)
    tokens = sum(sum(row.mask) for row in rows)
    results = []
    for chunk in (3, 256):
        monkeypatch.setattr(worker.engine, "chunk_tokens", chunk)
        projected.clear()
        results.append(run(worker, loss_of(), make_batch(rows, 2)))
        assert sum(projected) == 2 * tokens
    close(*results)


@pytest.mark.parametrize("loss_mode", ["gspo", "geo_mean"])
def test_a_loss_over_whole_sequences_is_not_foreseen_and_as_right(worker, monkeypatch, loss_mode):
    from verl.workers.config import PolicyLossConfig

    def loss():
        return base_loss("seq-mean-token-mean", policy_loss=PolicyLossConfig(loss_mode=loss_mode))

    rows = random_rows(41)
    lean = run(worker, loss(), make_batch(rows, 2))
    monkeypatch.setattr(worker.engine, "lean", False)
    close(lean, run(worker, loss(), make_batch(rows, 2)))


@pytest.mark.parametrize(
    "estimator",
    [
        EstimatorConfig(name="topk", k=20, of="union"),
        EstimatorConfig(name="sampled", sample="k3_weighted"),
        EstimatorConfig(name="sampled", sample="score"),
    ],
    ids=lambda e: e.sample or e.of,
)
def test_each_estimator_gives_the_same_from_hidden_states_and_from_logits(worker, monkeypatch, estimator):
    rows = random_rows(42)
    rows[1].teacher_prompt = None
    lean = run(worker, loss_of(estimator=estimator), make_batch(rows, 2))
    grpo = run(worker, base_loss(), make_batch(rows, 2))
    assert abs(lean[0] - grpo[0]) > 1e-4
    monkeypatch.setattr(worker.engine, "lean", False)
    close(lean, run(worker, loss_of(estimator=estimator), make_batch(rows, 2)))
