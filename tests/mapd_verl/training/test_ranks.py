"""Two gloo ranks against one: the same loss and gradient, also where only one rank has anything to distil."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from mapd_verl.config import ObjectiveConfig
from mapd_verl.loss import MapdLoss
from mapd_verl.objectives import make_objective

from .harness import base_loss, make_batch, make_model_folder, make_worker, random_rows, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def rows_of(case: str):
    rows = random_rows(30, count=4)
    if case == "one_rank_without_contexts":
        for row in rows[2:]:
            row.teacher_prompt = None
    return rows


def work(rank: int, world: int, port: int, folder: str, case: str, out: str) -> None:
    torch.set_num_threads(1)
    worker = make_worker(folder, rank=rank, world=world, port=port)
    rows = rows_of(case)
    mine = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    loss = MapdLoss(base_loss(), make_objective(ObjectiveConfig(weight=0.3)))
    batch = make_batch(mine, 1)
    from mapd_verl.verl_seams import tensordict_utils

    tensordict_utils.assign_non_tensor(batch, global_batch_size=len(rows))
    total, gradients, _ = run(worker, loss, batch)
    torch.save((total, gradients), f"{out}/{world}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", ["contexts_everywhere", "one_rank_without_contexts", "a_head_of_its_own"])
def test_two_ranks_equal_one(tmp_path, monkeypatch, case):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])  # where a spawned rank finds this module
    folder = make_model_folder(tmp_path / "model", tied=case != "a_head_of_its_own")
    for world in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # A missing collective would hang: join with a limit.
        ranks = mp.spawn(work, (world, port, str(folder), case, str(tmp_path)), nprocs=world, join=False)
        deadline = 240
        while not ranks.join(timeout=5):
            deadline -= 5
            if deadline <= 0:
                for process in ranks.processes:
                    process.kill()
                pytest.fail("the ranks wait for each other")
    alone, gradients = torch.load(tmp_path / "1-0.pt")
    halves = [torch.load(tmp_path / f"2-{rank}.pt") for rank in (0, 1)]
    assert sum(loss for loss, _ in halves) / 2 == pytest.approx(alone, rel=1e-5)
    for name, expected in gradients.items():
        for _, got in halves:
            scale = expected.abs().max().item()
            assert (got[name] - expected).abs().max().item() <= 1e-5 * scale + 1e-9, name
