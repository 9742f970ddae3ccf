"""Weights from the trainer to rollout servers that stand apart, without NCCL: verl's checkpoint engine over Ray.

For ``trainer.v1.trainer_mode=mapd_separate_async`` on CPUs (``rollout.checkpoint_engine.backend=mapd_cpu``). The
first actor rank puts all weights into Ray's object store and their reference into a mailbox, from which every
receiver takes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch

from mapd_verl.cpu.mailbox import Mailbox
from mapd_verl.verl_seams import CheckpointEngine, CheckpointEngineRegistry

NAME = "mapd_cpu"
_MAILBOX = "mapd_cpu_weights"


def _mailbox() -> Any:
    options = {"name": _MAILBOX, "get_if_exists": True, "num_cpus": 0, "max_concurrency": 100}
    return ray.remote(Mailbox).options(**options).remote()


@CheckpointEngineRegistry.register(NAME)
class RayCheckpointEngine(CheckpointEngine):
    """verl makes one in each actor rank and each rollout worker, and calls them in this order."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        # The whole model is one object: this path is for models that fit in a laptop's memory twice.
        self._sends = False
        self._mail: Any = None

    def prepare(self) -> dict[str, Any]:
        """Nothing to tell the others."""
        # The actor ends with the first handle to it, so that one is kept.
        self._mail = self._mail or _mailbox()
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The first actor rank sends; see verl's base class for the shapes."""
        return {"sends": [rank == 0 for rank in range(actor_wg_world_size)]}, {"sends": [False] * rollout_world_size}

    def init_process_group(self, sends: bool) -> None:
        """Take the role that :meth:`build_topology` gave."""
        self._sends = sends

    def finalize(self) -> None:
        """Free the weights once every worker has them."""
        if self._sends:
            ray.get(self._mail.clear.remote())

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """All ranks run the generator, which gathers sharded tensors; one sends."""
        with torch.no_grad():
            full = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        if self._sends:
            await self._mail.put.remote([ray.put(full)])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields each weight's name and tensor."""
        (reference,) = await self._mail.get.remote()
        for name, tensor in (await reference).items():
            yield name, tensor
