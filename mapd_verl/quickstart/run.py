"""``mapd quickstart``: the stages in order, a table at the end, and nothing left running."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mapd_verl import processes
from mapd_verl.config.recipe import check_model, load_recipe
from mapd_verl.errors import UserError
from mapd_verl.quickstart import tables
from mapd_verl.quickstart.options import ARMS, Options, parse
from mapd_verl.quickstart.stages import Arm, Stages, metrics, service
from mapd_verl.quickstart.state import RunState
from retrieval_server.launch import start_sidecar

#: Bytes that a run may write: corpus, caches, checkpoints, Ray's own session folder.
_DISK_NEEDED = 2_000_000_000


def main(arguments: Sequence[str]) -> int:
    """Run it; see ``mapd quickstart --help``."""
    options = parse(arguments)
    begin = time.monotonic()
    with _folder(options), processes.nothing_left_behind(), processes.PeakMemory() as memory:
        result = _run(options)
    result["seconds"] = {**result["seconds"], "total": round(time.monotonic() - begin, 1)}
    result["seconds"]["install"] = float(os.environ.get("MAPD_INSTALL_SECONDS", "0"))
    result["peak_memory_bytes"] = memory.peak
    result["peak_memory_by_process"] = memory.parts
    _say_costs(options, result)
    _write(options.run / "summary.json", result)
    return 0


def _run(options: Options) -> dict[str, Any]:
    stages = Stages(options, RunState(options.run))
    layout = stages.layout
    arms = [Arm(name, ARMS[name], seed) for seed in options.seeds for name in options.arms]
    configs = {name: load_recipe(ARMS[name], options.overrides) for name in options.arms}
    first = configs[options.arms[0]]
    for config in configs.values():
        check_model(config)
    student = Path(first.actor_rollout_ref.model.path)
    seconds: dict[str, float] = {}

    def stage(title: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        print(f"{title} ...", flush=True)
        entry = work()
        seconds[title] = 0.0 if entry["resumed"] else entry["seconds"]
        print(f"{title}: {'done before' if entry['resumed'] else format(entry['seconds'], '.1f') + ' s'}", flush=True)
        return entry

    stage("world", lambda: stages.world(first))
    with service(start_sidecar, layout.data / "corpus.jsonl", log=layout.logs("retrieval")) as url:
        synthesis: dict[str, Any] = {"result": {}, "inputs": ""}
        if any(name != "grpo" for name in options.arms):
            synthesis = stage("protocols", lambda: stages.protocols(url))
        stage("evaluation before", lambda: stages.evaluate("before", student, first, url, layout.before))
        for arm in arms:
            train = partial(stages.train, arm, url, synthesis["inputs"])
            model = Path(stage(f"training {arm.label}", train)["result"]["checkpoint"])
            name, config = f"after-{arm.label}", configs[arm.name]
            stage(f"evaluation {arm.label}", partial(stages.evaluate, name, model, config, url, layout.after(arm)))
    stage("report", partial(stages.report, arms))
    outcome = tables.outcome(layout.before, {arm: layout.after(arm) for arm in arms})
    print("\n" + tables.text(outcome))
    _write(options.run / "outcome.json", outcome)
    (options.run / "outcome.md").write_text(tables.markdown(outcome))
    steps = {arm.label: len(metrics(layout.folder(arm))) for arm in arms}
    return {"seconds": seconds, "steps": steps, "protocols": synthesis["result"], "outcome": outcome}


@contextmanager
def _folder(options: Options) -> Iterator[None]:
    """The run's folder, ours alone while inside.

    Raises:
        UserError: another run is at work in it, it is not a run's folder, or the disk has no room.
    """
    run = options.run
    if options.fresh and run.exists():
        if any(run.iterdir()) and not (run / "state.json").exists() and not (run / ".lock").exists():
            raise UserError(f"{run}: not a folder that this command made; --fresh won't remove it")
        with _lock(run):
            for entry in run.iterdir():
                if entry.name != ".lock":
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    run.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run).free
    if free < _DISK_NEEDED:
        raise UserError(f"{run}: {free / 1e9:.1f} GB free on this disk, a run needs {_DISK_NEEDED / 1e9:.0f} GB")
    with _lock(run):
        yield


@contextmanager
def _lock(run: Path) -> Iterator[None]:
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{run}: another quickstart is at work in this folder (choose another with --run)"
            ) from error
        yield


def _say_costs(options: Options, result: dict[str, Any]) -> None:
    seconds = result["seconds"]
    install = f"install {seconds['install']:.0f} s, " if seconds["install"] else ""
    print(
        f"\n{install}run {seconds['total']:.0f} s, peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB; "
        f"report: {options.run / 'report.html'}"
    )


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)
