"""Every name of verl that this project uses, in one table; nothing else may import verl internals.

``from mapd_verl.verl_seams import PPOTrainerSync`` imports that name's module then, not before, so a
process pays only for what it uses. The first access checks verl's version. ``tests/contract_verl``
holds each name to the signature that we rely on.

Upstream's traps that a caller meets are told beside the function that steps around them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: The release series whose internals the table below describes.
SUPPORTED = "0.9."

#: Our name -> ``module:attribute`` in verl.
SEAMS: dict[str, str] = {
    # Launch
    "TaskRunnerV1": "verl.trainer.main_ppo:TaskRunnerV1",
    "run_ppo": "verl.trainer.main_ppo:run_ppo",
    "validate_config": "verl.utils.config:validate_config",
    "need_critic": "verl.trainer.ppo.utils:need_critic",
    "need_reference_policy": "verl.trainer.ppo.utils:need_reference_policy",
    "omega_conf_to_dataclass": "verl.utils.config:omega_conf_to_dataclass",
    # Trainer
    "PPOTrainer": "verl.trainer.ppo.v1.trainer_base:PPOTrainer",
    "PPOTrainerSync": "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync",
    "PPOTrainerColocateAsync": "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync",
    "PPOTrainerSeparateAsync": "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync",
    "register_trainer": "verl.trainer.ppo.v1.trainer_base:register_trainer",
    "ReplayBuffer": "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer",
    "Role": "verl.trainer.ppo.utils:Role",
    "marked_timer": "verl.utils.debug:marked_timer",
    "tq": "transfer_queue:",
    # Worker and loss
    "ActorRolloutRefWorker": "verl.workers.engine_workers:ActorRolloutRefWorker",
    "DetachActorWorker": "verl.experimental.separation.engine_workers:DetachActorWorker",
    "TrainingWorker": "verl.workers.engine_workers:TrainingWorker",
    "Dispatch": "verl.single_controller.base.decorator:Dispatch",
    "make_nd_compute_dataproto_dispatch_fn": (
        "verl.single_controller.base.decorator:make_nd_compute_dataproto_dispatch_fn"
    ),
    "register_worker_method": "verl.single_controller.base.decorator:register",
    "tensordict_utils": "verl.utils.tensordict_utils:",
    "ppo_loss": "verl.workers.utils.losses:ppo_loss",
    "agg_loss": "verl.trainer.ppo.core_algos:agg_loss",
    "kl_penalty": "verl.trainer.ppo.core_algos:kl_penalty",
    "Metric": "verl.utils.metric:Metric",
    "AggregationType": "verl.utils.metric:AggregationType",
    "no_padding_2_padding": "verl.workers.utils.padding:no_padding_2_padding",
    "response_from_nested": "verl.workers.utils.padding:response_from_nested",
    "response_to_nested": "verl.workers.utils.padding:response_to_nested",
    # Engine
    "EngineRegistry": "verl.workers.engine.base:EngineRegistry",
    "FSDPEngineWithLMHead": "verl.workers.engine.fsdp:FSDPEngineWithLMHead",
    # Rollout
    "BaseRollout": "verl.workers.rollout.base:BaseRollout",
    "RolloutReplica": "verl.workers.rollout.replica:RolloutReplica",
    "RolloutReplicaRegistry": "verl.workers.rollout.replica:RolloutReplicaRegistry",
    "TokenOutput": "verl.workers.rollout.replica:TokenOutput",
    # verl keeps this registry private and offers no register(): the one dict we write into.
    "ROLLOUT_ADAPTERS": "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "CheckpointEngine": "verl.checkpoint_engine.base:CheckpointEngine",
    "CheckpointEngineRegistry": "verl.checkpoint_engine.base:CheckpointEngineRegistry",
    "ensure_async_iterator": "verl.workers.rollout.utils:ensure_async_iterator",
    # Agent loop and dataset
    "AgentLoopBase": "verl.experimental.agent_loop.agent_loop:AgentLoopBase",
    "AgentLoopOutput": "verl.experimental.agent_loop.agent_loop:AgentLoopOutput",
    "register_agent_loop": "verl.experimental.agent_loop.agent_loop:register",
    "AGENT_LOOPS": "verl.experimental.agent_loop.agent_loop:_agent_loop_registry",
    "simple_timer": "verl.utils.profiler:simple_timer",
    "RLHFDataset": "verl.utils.dataset.rl_dataset:RLHFDataset",
    # Platform
    "PlatformBase": "verl.plugin.platform.platform_base:PlatformBase",
    "PlatformRegistry": "verl.plugin.platform.platform_manager:PlatformRegistry",
    "get_platform": "verl.plugin.platform:get_platform",
    "get_device_name": "verl.utils.device:get_device_name",
    "get_device_id": "verl.utils.device:get_device_id",
    "distributed": "verl.utils.distributed:",
}


class UnsupportedVerlError(ImportError):
    """verl is missing, of another series than this package was written for, or lacks a name we need."""


def check_version() -> None:
    """Raise ``UnsupportedVerlError`` unless a verl of the supported series is installed."""
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedVerlError("verl is not installed: pip install 'mapd-verl[cpu]' (or [gpu])") from error
    if not version.startswith(SUPPORTED):
        raise UnsupportedVerlError(f"mapd-verl works with verl {SUPPORTED}x, found {version}")


def __getattr__(name: str) -> Any:
    """Resolve a name of ``SEAMS`` (PEP 562).

    Raises ``AttributeError`` for a name that is not in the table, ``UnsupportedVerlError`` where verl lacks it.
    """
    if name not in SEAMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    module_name, _, attribute = SEAMS[name].partition(":")
    module = importlib.import_module(module_name)
    try:
        value = getattr(module, attribute) if attribute else module
    except AttributeError as error:
        raise UnsupportedVerlError(f"verl has no {SEAMS[name]} (needed as {name})") from error
    globals()[name] = value
    return value


def unwrap_actor_class(remote_class: Any) -> type:
    """The plain class behind a ``@ray.remote`` one."""
    return remote_class.__ray_metadata__.modified_class


def keep_trainer_mode(config: DictConfig, mode: str) -> None:
    """Call before ``__init__`` of a trainer that is registered under a name of its own; ``mode`` is verl's name.

    Upstream's bug: the base trainer compares ``trainer_mode`` with "sync" in six places, so that a
    synchronous trainer of another name silently gets asynchronous settings.
    """
    from omegaconf import open_dict

    with open_dict(config):
        config.trainer.v1.trainer_mode = mode


def set_poll_interval(trainer: Any, seconds: float) -> None:
    """How often the trainer looks for finished rollouts. Upstream fixes it at 2 s, outside its config.

    Raises ``ValueError`` unless ``seconds`` is positive, ``UnsupportedVerlError`` if the buffer has no such setting.
    """
    if seconds <= 0:
        raise ValueError(f"poll_interval must be positive, got {seconds}")
    if not hasattr(trainer.replay_buffer, "poll_interval"):
        raise UnsupportedVerlError("verl's ReplayBuffer has no poll_interval")
    trainer.replay_buffer.poll_interval = seconds
