"""What verl loads in every process (entry point group ``verl.plugins``): it registers all that is ours.

Importing this module costs milliseconds: registries that live in heavy modules get their entries when,
and if, a process imports those modules. With another platform, rollout name, trainer mode and agent name
nothing of ours runs.

verl logs a plugin's failure at debug level and goes on, so a broken plugin would show up as some unknown
name minutes later. Hence ``assert_loaded``: our main, trainer, workers and agent loop call it, and it
raises the failure with its cause.
"""

from __future__ import annotations

import logging
import os

from mapd_verl.import_hooks import when_imported

logger = logging.getLogger(__name__)

_failure: Exception | None = None
_loaded = False


class PluginNotLoadedError(RuntimeError):
    """The plugin failed to register; ``__cause__`` says why."""


def register() -> None:
    """Register platform, engine, rollout, trainer and agent loop with verl. Calling it again changes nothing.

    Raises what any part raises.
    """
    global _loaded
    if _loaded:
        return
    from mapd_verl.verl_seams import check_version

    check_version()
    when_imported("verl.plugin.platform.platform_manager", _register_platform)
    when_imported("verl.utils.distributed", _repair_process_group)
    when_imported("verl.workers.engine", _register_engine)
    when_imported("verl.workers.rollout.replica", _register_replica)
    when_imported("verl.workers.rollout.base", _register_adapter)
    when_imported("verl.checkpoint_engine.base", _register_checkpoint_engine)
    when_imported("verl.trainer.ppo.v1", _register_trainer)
    when_imported("verl.experimental.agent_loop.agent_loop", _register_agent_loop)
    _loaded = True


def assert_loaded() -> None:
    """Raise ``PluginNotLoadedError`` if registering failed in this process, naming the cause."""
    if _failure is not None:
        raise PluginNotLoadedError(
            f"the mapd_verl plugin failed to load in process {os.getpid()}: {type(_failure).__name__}: {_failure}"
        ) from _failure


def _register_platform() -> None:
    from mapd_verl.verl_seams import PlatformRegistry

    if PlatformRegistry.get("cpu") is None:  # a later verl may bring its own
        from mapd_verl.cpu.platform import platform_class

        PlatformRegistry.register(platform="cpu")(platform_class())


def _repair_process_group() -> None:
    from mapd_verl.cpu.process_group import use_one_gloo_backend

    use_one_gloo_backend()


def _register_engine() -> None:
    import mapd_verl.cpu.engine  # noqa: F401  it registers itself


def _register_replica() -> None:
    from mapd_verl.verl_seams import RolloutReplicaRegistry

    def load() -> type:
        from mapd_verl.cpu.rollout import CPURolloutReplica

        return CPURolloutReplica

    RolloutReplicaRegistry.register("mapd_cpu", load)


def _register_adapter() -> None:
    from mapd_verl.verl_seams import ROLLOUT_ADAPTERS

    ROLLOUT_ADAPTERS["mapd_cpu", "async"] = "mapd_verl.cpu.rollout.CPUServerAdapter"


def _register_checkpoint_engine() -> None:
    import mapd_verl.cpu.weights  # noqa: F401  its decorator registers it


def _register_trainer() -> None:
    import mapd_verl.trainer  # noqa: F401  its decorator registers it


def _register_agent_loop() -> None:
    from mapd_verl.verl_seams import AGENT_LOOPS

    # verl imports the target when the first trajectory starts.
    AGENT_LOOPS["mapd_search"] = {"_target_": "mapd_verl.agent.verl_loop.SearchAgentLoop"}


try:
    register()
except Exception as error:
    _failure = error
    logger.warning("mapd_verl plugin failed to load: %s: %s", type(error).__name__, error)
