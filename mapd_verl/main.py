"""``python -m mapd_verl.main --config-path DIR --config-name NAME [overrides]``: train by a recipe.

verl's own V1 task runner, started with three differences (docs/decisions/0001-own-main.md): it runs in this
process instead of an actor of its own, so Ctrl-C reaches the training loop; the plugin proves that it is
loaded; and on the CPU platform what can start early does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra

from mapd_verl.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, describe
from mapd_verl.processes import nothing_left_behind

if TYPE_CHECKING:
    from omegaconf import DictConfig


class _InThisProcess:
    """Stands where verl expects an actor class: ``.remote()``, then ``.run.remote(config)``, both on the spot."""

    def remote(self) -> _InThisProcess:
        return self

    def options(self, **options: Any) -> _InThisProcess:
        raise UserError(
            "global_profiler.tool=nsys profiles the controller as a Ray actor: run python -m verl.trainer.main_ppo"
        )

    @property
    def run(self) -> _Run:
        return _Run()


class _Run:
    def remote(self, config: DictConfig) -> Any:
        import ray

        from mapd_verl.verl_seams import TaskRunnerV1, unwrap_actor_class

        if _is_embedded(config):
            from mapd_verl.cpu.rollout import start_server

            # It loads while verl builds the trainer, which asks for it last.
            start_server(0, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path)
        unwrap_actor_class(TaskRunnerV1)().run(config)
        return ray.put(None)


def train(config: DictConfig) -> None:
    """Run the training that ``config`` (verl's ``ppo_trainer`` plus the ``mapd`` section) describes.

    Raises ``UserError`` for what this entry point does not run, and whatever verl raises.
    """
    from mapd_verl import plugin, verl_seams

    plugin.assert_loaded()
    if not config.trainer.use_v1:
        raise UserError("trainer.use_v1 must be true: the plugin builds on verl's V1 trainer")
    verl_seams.validate_config(
        config=config,
        use_reference_policy=verl_seams.need_reference_policy(config),
        use_critic=verl_seams.need_critic(config),
    )
    if verl_seams.get_device_name() == "cpu":
        _pretend_accelerators(config.ray_kwargs.ray_init.get("num_gpus", None) or config.trainer.n_gpus_per_node)
    if _is_embedded(config) and not config.actor_rollout_ref.rollout.get("router_config_path", None):
        _use_light_router(config)
    import ray

    try:
        verl_seams.run_ppo(config, task_runner_class=_InThisProcess())
    finally:
        ray.shutdown()  # orderly and at once; what is left then is ended the hard way


def _is_embedded(config: DictConfig) -> bool:
    return config.actor_rollout_ref.rollout.name == "mapd_cpu"


def _pretend_accelerators(count: int) -> None:
    """Let Ray hand out ``count`` "GPUs" that no CUDA runtime can open.

    verl asks for one accelerator a rank and looks for the names GPU and NPU only. Ray refuses more GPUs than
    CUDA_VISIBLE_DEVICES lists, so an empty list (a user hiding real ones) would not do.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(["-1"] * count)


def _use_light_router(config: DictConfig) -> None:
    from omegaconf import open_dict

    with open_dict(config):
        config.actor_rollout_ref.rollout.router_config_path = str(Path(__file__).parent / "cpu/router.yaml")


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra's entry point. Exit code 2 and one line for what the user can put right."""
    try:
        with nothing_left_behind():
            train(config)
    except KeyboardInterrupt:
        print("mapd_verl.main: interrupted", file=sys.stderr)
        # Nothing of ours runs any more. An interpreter that winds down from the middle of anything (an import, a
        # Ray call) may still crash in a native library's destructors, and the exit code would be the crash's.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    except Exception as error:
        # What a Ray actor raised arrives wrapped, with its traceback as the text.
        line = describe(getattr(error, "cause", error))
        if line is None or os.environ.get("MAPD_TRACEBACK") == "1":
            raise
        print(f"mapd_verl.main: error: {line}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
