"""verl's two halves of a rollout backend, name ``mapd_cpu``: the replica starts the server, the adapter in
the training worker sends it weights."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import ray
import torch

from mapd_verl.cpu.server import CPURolloutServer, ServerConfig
from mapd_verl.verl_seams import BaseRollout, RolloutReplica, ensure_async_iterator

NAME = "mapd_cpu"


def _server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


#: Servers started before verl asked for them; a named actor ends when its last handle goes.
_STARTED: dict[int, Any] = {}


def start_server(replica_rank: int, rollout: Any, model_path: str) -> Any:
    """The server actor of a replica, started on the first call; it loads its model meanwhile.

    Args: ``rollout`` is verl's rollout config (dataclass or DictConfig).
    """
    if replica_rank not in _STARTED:
        config = ServerConfig(
            model_path=os.path.expanduser(model_path),
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_num_seqs=rollout.max_num_seqs,
            seed=rollout.seed,
        )
        # Each waiting request holds one slot of the actor's concurrency, and control calls must still pass.
        concurrency = max(1000, 2 * rollout.max_num_seqs)
        options = {"name": _server_name(replica_rank), "num_cpus": 0, "max_concurrency": concurrency}
        _STARTED[replica_rank] = ray.remote(CPURolloutServer).options(**options).remote(config)
    return _STARTED[replica_rank]


class CPURolloutReplica(RolloutReplica):
    """One server actor; it takes no accelerator and no scheduler slot."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is loaded.

        Raises ``ValueError`` for settings that this backend does not have, and what the server's start raises.
        """
        if self.world_size != 1:
            raise ValueError(f"rollout.name={NAME} runs on one rank, got a replica of {self.world_size}")
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError(f"rollout.name={NAME} serves the policy only")
        server = start_server(self.replica_rank, self.config, self.model_config.path)
        await server.stats.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = _server_name(self.replica_rank)


class CPUServerAdapter(BaseRollout):
    """Sends the actor's weights to the server of the same rank, through Ray's object store."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ["RANK"])
        self._replica_rank = self._rank if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Training and rollout share host memory: nothing to give back."""

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send all weights; returns when the server generates with them.

        Raises ``ValueError`` for another wire format or LoRA adapters, and what the server refuses.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"rollout.name={NAME} takes full tensors only, got wire_format={wire_format!r}")
        if kwargs.get("peft_config") is not None:
            raise ValueError(f"rollout.name={NAME} needs merged LoRA weights (model.lora.merge=True)")
        if self._server is None:
            self._server = ray.get_actor(_server_name(self._replica_rank))
        # Every rank runs the generator (sharded tensors are gathered in it), each feeds its own server.
        with torch.no_grad():
            full = {name: tensor.detach().to("cpu", copy=True) async for name, tensor in ensure_async_iterator(weights)}
        await self._server.load_weights.remote(full, global_steps)
