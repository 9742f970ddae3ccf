"""``python -m mapd_verl.main --config-path DIR --config-name NAME [overrides]``: train by a recipe.

verl's own V1 task runner, with two differences: it runs in this process instead of an actor of its own
(one import of verl less, and Ctrl-C reaches the training loop), and it proves that the plugin is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import hydra

if TYPE_CHECKING:
    from omegaconf import DictConfig


class _InThisProcess:
    """Stands in for an actor class: ``.remote()`` and ``.run.remote()`` work at once, on the spot."""

    def remote(self) -> _InThisProcess:
        return self

    @property
    def run(self) -> _Run:
        return _Run()


class _Run:
    def remote(self, config: DictConfig) -> Any:
        import ray

        from mapd_verl.verl_seams import TaskRunnerV1, unwrap_actor_class

        unwrap_actor_class(TaskRunnerV1)().run(config)
        return ray.put(None)


def train(config: DictConfig) -> None:
    """Run the training that ``config`` (verl's ``ppo_trainer`` plus the ``mapd`` section) describes."""
    from mapd_verl import plugin, verl_seams

    plugin.assert_loaded()
    if not config.trainer.use_v1:
        raise ValueError("trainer.use_v1 must be true: the plugin builds on verl's V1 trainer")
    verl_seams.validate_config(
        config=config,
        use_reference_policy=verl_seams.need_reference_policy(config),
        use_critic=verl_seams.need_critic(config),
    )
    if verl_seams.get_device_name() == "cpu":
        _pretend_accelerators(config.ray_kwargs.ray_init.get("num_gpus", None) or config.trainer.n_gpus_per_node)
    verl_seams.run_ppo(config, task_runner_class=_InThisProcess())


def _pretend_accelerators(count: int) -> None:
    """Let Ray hand out ``count`` "GPUs" that no CUDA runtime can open.

    verl asks for one accelerator a rank and looks for the names GPU and NPU only. Ray refuses more GPUs than
    CUDA_VISIBLE_DEVICES lists, so an empty list (a user hiding real ones) would not do.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(["-1"] * count)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra's entry point."""
    train(config)


if __name__ == "__main__":
    main()
