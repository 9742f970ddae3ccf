"""Child processes that never outlive us, and what they cost in memory.

Ray starts a dozen daemons, some in sessions of their own, which a signal to the process group misses.
On Linux we declare ourselves the *subreaper*: whatever our children leave behind becomes our child
and is ended with the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mapd_verl.errors import UserError

# prctl(2) options, from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _end_with_parent() -> None:
    """Runs in the child before exec: the kernel ends it when its parent dies, even by SIGKILL."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    command: Sequence[str], log: IO[bytes] | int | None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a process group of its own, output to ``log``, no standard input."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(env) if env is not None else None,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def run(
    command: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
    what: str = "",
    watch: Callable[[], None] | None = None,
) -> None:
    """Run ``command`` to its end with its output in ``log_path``; call ``watch`` every two seconds meanwhile.

    Raises:
        UserError: it failed; the line names the log and repeats the command's own error line.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        begin = log.tell()
        child = start(command, log, env)
        try:
            code = _wait(child, watch)
        except BaseException:
            end([child.pid])
            raise
    if code != 0:
        raise UserError(f"{what or command[0]} failed (exit {code}): {_last_error(log_path, begin)} (log: {log_path})")


def _wait(child: subprocess.Popen[bytes], watch: Callable[[], None] | None) -> int:
    while True:
        try:
            return child.wait(timeout=2.0 if watch else None)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if watch:
                watch()


def _last_error(path: Path, begin: int) -> str:
    """The line of a log that says why: our own ``error:`` line, else the exception, else the last one."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    for wanted in (": error: ", "Error: ", "error: "):
        for line in reversed(lines):
            if wanted in line:
                return line[-300:]
    return lines[-1][-300:] if lines else "no output"


def end(pids: Sequence[int], grace_s: float = 5.0) -> None:
    """End these processes and all their descendants: SIGTERM, then SIGKILL after ``grace_s`` seconds."""
    import psutil

    victims: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                victims[one.pid] = one
    _finish(list(victims.values()), grace_s)


def end_descendants(grace_s: float = 5.0) -> None:
    """End everything below this process, adopted orphans included, and reap it."""
    import psutil

    # What dies hands its children to us, so look again until nothing is left.
    for _ in range(5):
        children = psutil.Process().children(recursive=True)
        if not children:
            break
        _finish(children, grace_s)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _finish(processes: list, grace_s: float) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """While inside, orphans below us become ours; on the way out, by whatever way, all of them are ended.

    SIGTERM and SIGHUP leave the same way as Ctrl-C.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        # A second Ctrl-C must not stop the cleaning.
        for s in previous:
            signal.signal(s, signal.SIG_IGN)
        end_descendants()
        for s, handler in previous.items():
            signal.signal(s, handler)


class PeakMemory:
    """Samples the memory of this process and everything below it, in a thread.

    Counts the proportional set size where the kernel tells it (pages shared by n processes count 1/n
    each), else the resident set size. Bytes.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self.peak = 0
        #: Bytes by process at the peak, largest first: what to look at when it is too much.
        self.parts: list[tuple[str, int]] = []
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        me = psutil.Process()
        while True:
            sizes: list[tuple[str, int]] = []
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error, OSError):
                    sizes.append((" ".join(process.cmdline())[:80], _set_size(process.pid)))
            total = sum(size for _, size in sizes)
            if total > self.peak:
                self.peak, self.parts = total, sorted(sizes, key=lambda part: -part[1])
            if self._stop.wait(self._interval_s):
                return


def _set_size(pid: int) -> int:
    import psutil

    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return psutil.Process(pid).memory_info().rss


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m mapd_verl.processes LABEL COMMAND...``: run it, then say its seconds and peak memory."""
    label, *command = list(arguments if arguments is not None else sys.argv[1:])
    begin = time.monotonic()
    with nothing_left_behind(), PeakMemory() as memory:
        try:
            code = subprocess.Popen(command).wait()
        except KeyboardInterrupt:
            code = 130
    print(f"-- {label}: {time.monotonic() - begin:.1f} s, peak memory {memory.peak / 1e9:.2f} GB", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
