"""The quickstart as a user meets it: interrupted, taken up again, finished, and asked once more.

One run of two training steps on the shipped student; each test goes on from where the one before it left.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart") / "run"


def command(run: Path) -> list[str]:
    small = ["data.val_max_samples=8"]
    options = ["--steps", "2", "--test-questions", "16", "--set", *small]
    return [sys.executable, "-m", "mapd_verl.cli", "quickstart", "--run", str(run), *options]


def start(run: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command(run), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_ctrl_c_during_training_leaves_no_process(run):
    process = start(run)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("training"):
            break
    assert lines[-1].startswith("training mapd-seed0"), "".join(lines)
    # Wait for Ray's daemons: they are what escapes a careless launcher.
    below: dict[int, str] = {}
    deadline = time.monotonic() + 240
    while not any("raylet" in name for name in below.values()) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        below = {p.pid: p.name() for p in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(0.5)
    assert any("raylet" in name for name in below.values()), below
    time.sleep(5)  # and for some of its workers
    below |= {p.pid: p.name() for p in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130, rest
    assert "mapd: interrupted" in rest and "Traceback" not in rest
    left = [pid for pid in below if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not left, [(pid, below[pid]) for pid in left]


def test_the_next_run_takes_up_and_finishes(run):
    process = start(run)
    out = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, out
    assert "world: done before" in out and "protocols: done before" in out
    assert re.search(r"^training mapd-seed0: [\d.]+ s$", out, re.MULTILINE), out
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["before"]["all"]["em"]["n"] == 16
    assert outcome["runs"][0]["after"]["all"]["em"]["n"] == 16
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"]["mapd-seed0"] == 3  # the validation before training, and two steps
    assert summary["peak_memory_bytes"] > 1e9
    assert "<html" in (run / "report.html").read_text()[:500]
    assert list((run / "curves").glob("*.png"))
    assert list((run / "mapd-seed0" / "tensorboard").glob("**/events.out.tfevents.*"))


def test_the_checkpoint_loads_and_has_learned_something(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = run.glob("mapd-seed0/global_step_2/actor/huggingface")
    trained = AutoModelForCausalLM.from_pretrained(folder)
    student = AutoModelForCausalLM.from_pretrained(ROOT / "recipes/laptop/student")
    assert AutoTokenizer.from_pretrained(folder).encode("<search>") == AutoTokenizer.from_pretrained(
        ROOT / "recipes/laptop/student"
    ).encode("<search>")
    pairs = list(zip(student.parameters(), trained.parameters(), strict=True))
    assert all(torch.isfinite(after).all() for _, after in pairs)
    assert any(not torch.equal(before, after) for before, after in pairs)


def test_protocols_reached_the_teacher(run):
    rows = {}
    for file in (run / "mapd-seed0" / "metrics").glob("*.jsonl"):
        rows |= {row["step"]: row["data"] for row in map(json.loads, file.read_text().splitlines())}
    assert rows[1]["mapd/source/protocol"] > 0.5
    assert rows[1]["distillation/kl"] > 0


def test_a_finished_run_is_not_done_again(run):
    begin = time.monotonic()
    done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("done before$", done.stdout, re.MULTILINE)) == 6, done.stdout
    assert time.monotonic() - begin < 60
