"""Nothing outlives the launcher: not an orphan, not a process in a session of its own, not after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mapd_verl import processes
from mapd_verl.errors import UserError

linux = pytest.mark.skipif(sys.platform != "linux", reason="subreaper and parent-death signals are Linux's")

# Leaves a grandchild in a session of its own, then exits: what Ray's daemons do.
ORPHAN = "import subprocess, sys; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@linux
def test_orphans_in_other_sessions_are_ended(tmp_path):
    script = f"""
import subprocess, sys
from mapd_verl import processes
with processes.nothing_left_behind():
    subprocess.run([sys.executable, "-c", {ORPHAN!r}])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert wait_gone(int(done.stdout))


@linux
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_whole_tree(tmp_path, signum):
    script = f"""
import subprocess, sys
from mapd_verl import processes
with processes.nothing_left_behind():
    subprocess.run([sys.executable, "-c", {ORPHAN!r}])
    child = processes.start(["sleep", "300"], None)
    print(child.pid, flush=True)
    child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(alive, pids))
    parent.send_signal(signum)
    parent.wait(timeout=30)
    assert all(wait_gone(pid) for pid in pids)


@linux
def test_a_killed_launcher_takes_its_child_along():
    script = """
from mapd_verl import processes
child = processes.start(["sleep", "300"], None)
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_gone(pid)


def test_a_child_that_ignores_sigterm_is_killed():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    child.stdout.readline()
    processes.end([child.pid], grace_s=0.2)
    assert wait_gone(child.pid)


def test_failure_names_the_log_and_the_reason(tmp_path):
    log = tmp_path / "logs" / "x.log"
    command = [sys.executable, "-c", "import sys; print('mapd: error: no such key'); print('noise'); sys.exit(2)"]
    with pytest.raises(UserError, match=r"training failed \(exit 2\): mapd: error: no such key \(log: .*x\.log\)"):
        processes.run(command, log, what="training")


def test_failure_with_a_traceback_shows_its_last_line(tmp_path):
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        processes.run([sys.executable, "-c", "1/0"], tmp_path / "x.log")


def test_an_older_failure_in_the_log_is_not_blamed(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("mapd: error: yesterday\n")
    with pytest.raises(UserError, match="no output"):
        processes.run([sys.executable, "-c", "raise SystemExit(3)"], log)


def test_watch_is_called_while_running_and_at_the_end(tmp_path):
    calls = []
    processes.run([sys.executable, "-c", ""], tmp_path / "x.log", watch=lambda: calls.append(1))
    assert calls


def test_peak_memory_counts_children():
    hungry = "b = bytearray(200_000_000); import time; time.sleep(1.5)"
    with processes.PeakMemory(interval_s=0.1) as memory:
        subprocess.run([sys.executable, "-c", hungry])
    assert 200e6 < memory.peak < 2e9
    assert memory.peak == sum(size for _, size in memory.parts)
    assert any("bytearray" in name and size > 200e6 for name, size in memory.parts)


def test_the_command_line_reports_and_passes_the_exit_code(tmp_path):
    command = [sys.executable, "-m", "mapd_verl.processes", "a step", sys.executable, "-c", "raise SystemExit(7)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path.cwd(), env=dict(os.environ))
    assert done.returncode == 7
    assert "-- a step: " in done.stdout and "peak memory" in done.stdout
