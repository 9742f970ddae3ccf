"""Start one training run in a process of its own: the environment that verl and Ray read, the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mapd_verl import processes
from mapd_verl.config.recipe import check_files, find_recipe, load_recipe, normalise_overrides
from mapd_verl.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What a run without a GPU needs set before Ray starts; each worker process inherits it.
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # Ray hides GPUs from actors that ask for none; here there is none to hide.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray starts workers in advance, one a slot; verl's actors all need an environment of their own, so those
    # would only cost memory and start-up time.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Several processes share two cores: more threads only fight.
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # verl imports wandb whatever the recipe logs to.
    "WANDB_MODE": "disabled",
}


def environment(config: DictConfig, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a training process. What the caller's environment already sets is kept."""
    run = Path(config.trainer.default_local_dir).absolute()
    env = {**ENVIRONMENT, "TENSORBOARD_DIR": str(run / "tensorboard")}
    # verl truncates this file at start, so a resumed run writes to the next one.
    attempts = len(list((run / "metrics").glob("*.jsonl")))
    env["VERL_FILE_LOGGER_PATH"] = str(run / "metrics" / f"{attempts:03d}.jsonl")
    if config.trainer.device == "cpu":
        env |= CPU_ENVIRONMENT
    return {**env, **(os.environ if base is None else base)}


def prepare(recipe: str | Path, overrides: Sequence[str]) -> tuple[DictConfig, list[str], dict[str, str]]:
    """Check a recipe and its files; return config, command and environment.

    Raises:
        UserError: naming the key or file that is wrong.
    """
    path = find_recipe(recipe)
    config = load_recipe(path, overrides)
    check_files(config)
    (Path(config.trainer.default_local_dir) / "metrics").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mapd_verl.main", "--config-path", str(path.parent), "--config-name", path.stem]
    return config, [*command, *normalise_overrides(overrides)], environment(config)


def train(
    recipe: str | Path,
    overrides: Sequence[str],
    log: Path | None = None,
    watch: Callable[[], None] | None = None,
) -> DictConfig:
    """Train by a recipe; output to ``log`` (``watch`` is called meanwhile), or to the terminal.

    Raises:
        UserError: the recipe is wrong, or the run failed.
    """
    config, command, env = prepare(recipe, overrides)
    if log is not None:
        processes.run(command, log, env, what="training", watch=watch)
        return config
    with processes.nothing_left_behind():
        code = processes.start(command, None, env).wait()
    if code != 0:
        raise UserError(f"training failed (exit {code}); the reason stands above")
    return config
