"""The rule-based teacher behind an OpenAI-compatible HTTP server, for runs without a model provider.

    python -m mapd_verl.data.geonames.teacher --port 8100 --error-rate 0.1 --broken-json-rate 0.1 --seed 0
    python -m protocol_cache synthesize --model openai/geonames-rules --api-base http://127.0.0.1:8100/v1 ...

Served: ``POST /v1/chat/completions`` (not streamed), ``GET /v1/models``, ``GET /livez`` and ``/readyz``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from mapd_verl.data.geonames.teacher_rules import MODEL, RuleTeacher
from mapd_verl.errors import UserError, one_line_errors
from retrieval_server.errors import StartupError
from retrieval_server.launch import Sidecar
from retrieval_server.parent import watch_parent
from retrieval_server.serve import bind, url_of

_POLL_SECONDS = 0.05


def start_teacher(
    port: int = 0,
    error_rate: float = 0.1,
    broken_json_rate: float = 0.1,
    seed: int = 0,
    deadline: float = 60.0,
    log: str | os.PathLike[str] | None = None,
) -> Sidecar:
    """Start the teacher as a child process and return once it answers; ``.url`` is without ``/v1``.

    The child ends with this process, however that ends. Port 0 takes a free one. Use it in a ``with``
    block, or call ``stop``. Its output goes to ``log`` (default: a temporary file, removed after a clean
    stop).

    Raises:
        StartupError: the port is taken, or the child ended or did not answer within ``deadline`` seconds.
    """
    keep_log = log is not None
    if log is None:
        descriptor, log = tempfile.mkstemp(prefix="teacher-", suffix=".log")
        os.close(descriptor)
    path = Path(log)
    listener = bind("127.0.0.1", port)
    try:
        url = url_of(listener)
        command = [sys.executable, "-m", "mapd_verl.data.geonames.teacher", "--seed", str(seed)]
        command += ["--error-rate", str(error_rate), "--broken-json-rate", str(broken_json_rate)]
        command += ["--fd", str(listener.fileno()), "--parent", str(os.getpid())]
        root = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        with path.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
            )
    finally:
        listener.close()  # the child has its own copy; ours would keep the port open after it
    child = Sidecar(process, url, path, keep_log)
    try:
        _await_ready(child, deadline)
    except BaseException:
        child.stop()
        raise
    return child


def _await_ready(child: Sidecar, deadline: float) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + deadline
    while True:
        code = child.process.poll()
        if code is not None:
            lines = child.log.read_text(errors="replace").strip().splitlines()
            raise StartupError(f"the teacher ended with exit code {code}: {lines[-1] if lines else 'it wrote nothing'}")
        try:
            with direct.open(f"{child.url}/readyz", timeout=1.0):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise StartupError(f"the teacher does not answer after {deadline:g} s: {error}") from error
        time.sleep(_POLL_SECONDS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


async def _serve(teacher: RuleTeacher, listener: socket.socket, parent: int | None) -> None:
    import uvicorn

    from mapd_verl.data.geonames.teacher_app import create_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are below: uvicorn would raise the signal again after a clean stop

    server = Server(uvicorn.Config(create_app(teacher), log_level="warning", access_log=False))

    def stop(number: int) -> None:
        server.handle_exit(number, None)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    watcher = None if parent is None else watch_parent(parent, lambda: stop(signal.SIGTERM))
    print(f"teacher: model {MODEL} at {url_of(listener)}/v1", file=sys.stderr, flush=True)
    await server.serve(sockets=[listener])
    if watcher is not None:
        watcher.cancel()


@one_line_errors("teacher")
def main(arguments: Sequence[str] | None = None) -> int:
    """Serve on loopback until SIGTERM or Ctrl-C (exit code 0); 2 when it cannot start."""
    parser = _Parser(prog="python -m mapd_verl.data.geonames.teacher", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one (default: 8100)")
    parser.add_argument("--error-rate", type=float, default=0.1, help="share of replies that are wrong")
    parser.add_argument("--broken-json-rate", type=float, default=0.1, help="share of replies that are no clean JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port: must be 0 to 65535, got {options.port}")
    try:
        teacher = RuleTeacher(options.seed, options.error_rate, options.broken_json_rate)
        listener = socket.socket(fileno=options.fd) if options.fd is not None else bind("127.0.0.1", options.port)
    except (ValueError, StartupError) as error:
        raise UserError(str(error)) from error
    asyncio.run(_serve(teacher, listener, options.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
