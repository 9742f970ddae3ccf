"""What setup.py promises: extras that don't mix CPU and GPU, a light core, exact versions for all of it."""

import re
import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
GPU_ONLY = {"flash-attn", "faiss-gpu", "faiss-gpu-cu12", "vllm", "cupy-cuda13x", "triton", "nvtx"}


def extra(name):
    found = [Requirement(text) for text in requires("mapd-verl") or []]
    return [r for r in found if r.marker is not None and r.marker.evaluate({"extra": name})]


def test_the_plugin_and_the_command_are_entry_points():
    plugins = {point.name: point.value for point in entry_points(group="verl.plugins")}
    scripts = {point.name: point.value for point in entry_points(group="console_scripts")}
    assert plugins["mapd_verl"] == "mapd_verl.plugin"
    assert scripts["mapd"] == "mapd_verl.cli:main"


def test_no_extra_names_torch():
    assert not [text for text in requires("mapd-verl") or [] if Requirement(text).name == "torch"]


@pytest.mark.parametrize("name", ["cpu", "retrieval", "synthesis", "dev"])
def test_what_the_cpu_path_installs_is_not_gpu_only(name):
    assert not {canonicalize_name(r.name) for r in extra(name)} & GPU_ONLY
    assert all(r.extras == set() for r in extra(name))  # verl's own extras pin another torch


def test_stolen_litellm_releases_are_excluded():
    (litellm,) = [r for r in extra("synthesis") if r.name == "litellm"]
    for bad in ("1.82.7", "1.82.8"):
        assert bad not in litellm.specifier
    assert "1.110.2" in litellm.specifier


def test_every_direct_requirement_has_an_exact_version_that_satisfies_it():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([^;\s]+)", line).groups()
            pins[canonicalize_name(name)] = version
    assert pins["torch"] == "2.13.0"
    core = [Requirement(text) for text in requires("mapd-verl") or [] if "extra" not in text]
    for requirement in [*core, *(r for name in ("cpu", "retrieval", "synthesis", "dev") for r in extra(name))]:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_core_is_light():
    """The sidecar's client, the protocol cache and the command line pay for neither torch nor verl."""
    script = (
        "import sys, mapd_verl.cli, mapd_verl.processes, protocol_cache.store, protocol_cache.render\n"
        "heavy = {'torch', 'verl', 'ray', 'transformers', 'litellm', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("script", ["quickstart", "test", ".ci/run", "scripts/environment.sh"])
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_committed_files_name_no_host_of_a_package_index():
    for path in [ROOT / "constraints.txt", ROOT / "setup.py", ROOT / "scripts/environment.sh", ROOT / "quickstart"]:
        assert "://" not in path.read_text()
