"""Running the sidecar as a child process; only the standard library.

with start_sidecar("corpus.jsonl") as sidecar:
    client = RetrievalClient(sidecar.url)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import StartupError
from .serve import bind, url_of

_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0
# A proxy of the environment must not stand between a process and its own child.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Sidecar:
    """A running server: ``url`` (``http://host:port``), ``log`` (its output), ``stop()``; also a context manager."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, keep_log: bool = True) -> None:
        self.process = process
        self.url = url
        self.log = log
        self._keep_log = keep_log
        self._owner = os.getpid()
        atexit.register(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked copy of this process must not end the server
            self.stop()

    def stop(self, timeout: float = _STOP_SECONDS) -> int:
        """End the server and return its exit code; safe to call again. Killed if it outlives ``timeout`` seconds."""
        atexit.unregister(self._stop_at_exit)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        if code == 0 and not self._keep_log:
            self.log.unlink(missing_ok=True)
        return code

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """The child's environment: it finds this package also when run from a source tree elsewhere."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    installed = [os.path.realpath(folder) for folder in [*site.getsitepackages(), site.getusersitepackages()]]
    if root not in installed:
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _ready(url: str) -> tuple[bool, str]:
    """Whether ``/readyz`` says yes, and what it says otherwise."""
    try:
        with _direct.open(f"{url}/readyz", timeout=1.0) as answer:
            return answer.status == 200, ""
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return False, json.loads(error.read())["error"]["message"]
        return False, f"HTTP {error.code}"
    except OSError as error:
        return False, str(error)


def start_sidecar(
    corpus: str | os.PathLike[str],
    port: int = 0,
    host: str = "127.0.0.1",
    topk: int = 3,
    deadline: float = 60.0,
    log: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
) -> Sidecar:
    """Start ``python -m retrieval_server`` and return once it is ready to search.

    Port 0 takes a free one, without a race: the socket is bound here and inherited. The child ends
    with this process, however that ends. Its output goes to ``log`` (default: a temporary file, removed
    after a clean stop); ``arguments`` are passed on. Raises StartupError with the server's own message when
    the port is taken, when the server exits, or when it isn't ready within ``deadline`` seconds.
    """
    keep_log = log is not None
    if log is None:
        descriptor, name = tempfile.mkstemp(prefix="retrieval-server-", suffix=".log")
        os.close(descriptor)
        log = name
    log = Path(log)
    listener = bind(host, port)
    try:
        url = url_of(listener)
        command = [sys.executable, "-m", "retrieval_server", "--corpus", os.path.abspath(corpus)]
        command += ["--topk", str(topk), "--fd", str(listener.fileno()), "--parent", str(os.getpid()), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
            )
    finally:
        listener.close()  # the child has its own copy; ours would keep the port open after it
    sidecar = Sidecar(process, url, log, keep_log)
    try:
        _await_ready(sidecar, deadline)
    except BaseException:
        sidecar.stop()
        raise
    return sidecar


def _await_ready(sidecar: Sidecar, deadline: float) -> None:
    end = time.monotonic() + deadline
    while True:
        code = sidecar.process.poll()
        if code is not None:
            raise StartupError(
                f"the retrieval server ended with exit code {code}: {_last_line(sidecar.log)} (log: {sidecar.log})"
            )
        ready, reason = _ready(sidecar.url)
        if ready:
            return
        if time.monotonic() > end:
            raise StartupError(f"the retrieval server is not ready after {deadline:g} s: {reason} (log: {sidecar.log})")
        time.sleep(_POLL_SECONDS)
