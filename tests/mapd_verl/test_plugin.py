"""The plugin registers everything, costs nothing where it isn't used, and a broken one is loud."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Makes the plugin fail the way a wrong verl does; verl itself goes on without a word.
BREAK = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "0.8.0" if name == "verl" else real(name)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**base, **env}, capture_output=True, text=True, timeout=300, check=False
    )


def test_verl_loads_the_plugin_and_it_imports_nothing_heavy():
    code = "import sys, verl; print('\\n'.join(sorted(sys.modules)))"
    plain = set(python(code, VERL_USE_EXTERNAL_PLUGINS="none").stdout.split())
    ours = set(python(code).stdout.split())
    assert "mapd_verl.plugin" in ours and "verl" in plain
    assert {name for name in ours - plain if not name.startswith("mapd_verl")} == set()


def test_every_registry_holds_ours():
    code = """
import verl
from mapd_verl import plugin, verl_seams
plugin.assert_loaded()
from verl.plugin.platform import get_platform
assert type(get_platform()).__module__ == "mapd_verl.cpu.platform", get_platform()
assert verl_seams.RolloutReplicaRegistry.get("mapd_cpu").__module__ == "mapd_verl.cpu.rollout"
from verl.workers.rollout.base import get_rollout_class
assert get_rollout_class("mapd_cpu").__module__ == "mapd_verl.cpu.rollout"
assert verl_seams.EngineRegistry.get_engine_cls("language_model", "fsdp2").__module__ == "mapd_verl.cpu.engine"
from verl.trainer.ppo.v1 import get_trainer_cls
assert get_trainer_cls("mapd_sync").__module__ == "mapd_verl.trainer"
assert "mapd_search" in verl_seams.AGENT_LOOPS
import torch.distributed as dist, os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
from verl.utils.distributed import initialize_global_process_group_ray as initialise
initialise()
assert dist.get_backend_config() == "cpu:gloo", dist.get_backend_config()
plugin.register()  # again: changes nothing, raises nothing
print("all there")
"""
    done = python(code, VERL_PLATFORM="cpu")
    assert done.stdout.strip().endswith("all there"), done.stderr[-2000:]


@pytest.mark.parametrize("module", ["cpu.platform", "cpu.process_group", "cpu.engine", "cpu.rollout", "trainer"])
def test_any_of_our_modules_may_be_imported_before_verl(module):
    code = f"import mapd_verl.{module}, verl; from mapd_verl.plugin import assert_loaded; assert_loaded(); print('yes')"
    done = python(code, VERL_PLATFORM="cpu")
    assert done.stdout.strip() == "yes", done.stderr[-2000:]


def test_the_cpu_platform_never_wins_by_itself():
    code = "import verl; from verl.plugin.platform import get_platform; print(type(get_platform()).__name__)"
    assert "PlatformCPU" not in python(code).stdout


def test_a_broken_plugin_is_silent_in_verl_and_loud_in_ours():
    assert python(BREAK + "import verl; print('verl is happy')").stdout.strip() == "verl is happy"
    done = python(BREAK + "import verl; from mapd_verl import plugin; plugin.assert_loaded()")
    assert done.returncode != 0
    assert "the mapd_verl plugin failed to load" in done.stderr
    assert "mapd-verl works with verl 0.9.x, found 0.8.0" in done.stderr


@pytest.mark.parametrize(
    "use",
    [
        "from mapd_verl.main import train; train(None)",
        "from mapd_verl.trainer import MapdTrainer; MapdTrainer(None)",
        "from mapd_verl.worker import MapdTrainingWorker; MapdTrainingWorker(None)",
    ],
)
def test_a_broken_plugin_stops_each_part_of_ours(use):
    # Only registering fails here; what the parts import is fine.
    code = "import mapd_verl.import_hooks as h\ndef broken(*a): raise OSError('no hooks today')\n"
    code += "real, h.when_imported = h.when_imported, broken\nimport verl, mapd_verl.plugin\nh.when_imported = real\n"
    done = python(code + use, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "failed to load" in done.stderr and "OSError: no hooks today" in done.stderr, done.stderr[-1500:]


def test_what_fails_in_a_late_registration_fails_the_import():
    code = """
import verl, mapd_verl.cpu.process_group as group
print("loaded", flush=True)
def broken(): raise LookupError("cannot repair")
from mapd_verl import plugin
plugin.when_imported("verl.workers.rollout.base", broken)
import verl.workers.rollout.base
"""
    done = python(code, VERL_PLATFORM="cpu")
    assert done.stdout.strip() == "loaded" and done.returncode != 0
    assert "LookupError: cannot repair" in done.stderr
