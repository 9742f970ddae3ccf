"""verl's stock synchronous trainer on our platform, engine and rollout; and what is left when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from .base_run import start, step_metrics, write_assets

pytestmark = pytest.mark.e2e
TIMEOUT_S = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_assets(folder)
    return folder


@pytest.fixture(autouse=True)
def alone():
    """One heavy run at a time on this machine."""
    with open(Path(os.environ.get("TMPDIR", "/tmp")) / "mapd-e2e.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Run:
    """A run under watch: its process tree is recorded, so that leftovers are found wherever they moved."""

    def __init__(self, folder: Path, steps: int, module: str = "mapd_verl.main"):
        self.log_path = folder / f"{module}-{time.time_ns()}.log"
        self.process = start(folder, steps, module, self.log_path)
        self.tree: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, until: str | None = None) -> int | None:
        """Until the log holds ``until``, or the end; returns the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    self.tree.setdefault(child.pid, child)
            if self.process.poll() is not None or (until is not None and until in self.log):
                return self.process.returncode
            time.sleep(0.5)
        raise AssertionError(f"no end after {TIMEOUT_S} s: {self.log[-2000:]}")

    def leftovers(self) -> list[str]:
        """Names of the run's processes that still live."""
        _, alive = psutil.wait_procs(list(self.tree.values()), timeout=20)
        return [p.name() for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        for process in [*self.tree.values(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def launch(folder):
    runs: list[Run] = []

    def launch(**arguments) -> Run:
        runs.append(Run(folder, **arguments))
        return runs[-1]

    yield launch
    for run in runs:
        with contextlib.suppress(psutil.NoSuchProcess):
            run.end()


# The plugin must do without our main too: verl's own finds trainer, rollout and engine through it.
@pytest.mark.parametrize("module", ["mapd_verl.main", "verl.trainer.main_ppo"])
def test_two_steps(launch, module):
    run = launch(steps=2, module=module)
    assert run.wait() == 0, run.log[-3000:]
    steps = step_metrics(run.log)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        # The rollout's probabilities are the actor's: same weights (also after an update), same arithmetic.
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.9999
        assert step["actor/grad_norm"] > 0 and math.isfinite(step["actor/grad_norm"])
    # At the first step policy and reference are the same weights; after an update they are not.
    assert abs(steps[0]["actor/kl_loss"]) < 1e-9
    assert steps[1]["actor/kl_loss"] > 1e-9
    assert run.leftovers() == []


@pytest.mark.parametrize("moment", ["Started a local Ray instance", "step:1 - "])
def test_ctrl_c_leaves_no_process(launch, moment):
    run = launch(steps=1000)
    assert run.wait(until=moment) is None, run.log[-3000:]
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.log[-3000:]
    assert run.tree
    assert run.leftovers() == []
