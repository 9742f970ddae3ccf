"""Loss and gradient of the whole (GRPO and the term) however a mini-batch is cut; ``-s`` prints the table."""

from __future__ import annotations

import pytest
import torch

from mapd_verl.config import ObjectiveConfig
from mapd_verl.loss import MapdLoss
from mapd_verl.objectives import make_objective
from mapd_verl.verl_seams import tensordict_utils

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows, run

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
#: What the batch, or the engine, is told.
CUTS = {
    "micro-batches of 4": (4, {}, {}),
    "of 2": (2, {}, {}),
    "of 1": (1, {}, {}),
    "dynamic, 60 tokens": (4, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 60}, {}),
    "dynamic, 120 tokens": (4, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 120}, {}),
    "packed, of 2": (2, {"use_remove_padding": True}, {}),
    "verl's own forward, of 2": (2, {}, {"lean": False}),
    "chunks of 3 tokens": (4, {}, {"chunk_tokens": 3}),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(make_model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("mode", MODES)
def test_no_cut_changes_loss_or_gradient(worker, mode):
    rows = random_rows(11, count=8, with_context=0.7)
    # Without a fixed scale verl divides this mode by the micro-batch's own width, which no cut can leave alone.
    scale = {"loss_scale_factor": 32} if mode == "seq-mean-token-sum-norm" else {}
    loss = MapdLoss(base_loss(mode, **scale), make_objective(ObjectiveConfig(weight=0.3)))

    def result(size, switches, settings):
        kept = {key: getattr(worker.engine, key) for key in settings}
        try:
            for key, value in settings.items():
                setattr(worker.engine, key, value)
            batch = make_batch(rows, size)
            tensordict_utils.assign_non_tensor(batch, **switches)
            return run(worker, loss, batch)[:2]
        finally:
            for key, value in kept.items():
                setattr(worker.engine, key, value)

    expected, gradients = result(8, {}, {})
    for name, cut in CUTS.items():
        value, found = result(*cut)
        error = abs(value - expected) / abs(expected)
        worst = max(
            ((found[key] - gradients[key]).abs().max() / gradients[key].abs().max()).item() for key in gradients
        )
        print(f"{mode:24s} {name:26s} loss {error:.1e}  gradient {worst:.1e}")
        assert error <= 1e-5 and worst <= 1e-5, name
    assert torch.isfinite(torch.tensor(expected))
