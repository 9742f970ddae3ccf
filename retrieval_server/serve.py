"""Running the sidecar: command line, socket, signals, exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

from .errors import StartupError

_BACKLOG = 2048
_GRACE_SECONDS = 5


def say(message: str) -> None:
    """One line for people, on standard error."""
    print(f"retrieval_server: {message}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say(f"{message} (see --help)")
        raise SystemExit(2)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {value}")
    return value


def _constant(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one gives one line and SystemExit(2)."""
    parser = _Parser(prog="python -m retrieval_server", description="Search-R1 compatible retrieval service")
    parser.add_argument("--corpus", "--corpus_path", required=True, help="JSON lines with id and contents (.gz too)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--topk", type=_positive, default=3, help="passages a query when it names none (default: 3)")
    parser.add_argument("--retriever", "--retriever_name", choices=["bm25"], default="bm25")
    parser.add_argument("--bm25-k1", type=_constant, default=0.9, help="term saturation (default: 0.9, Anserini's)")
    parser.add_argument("--bm25-b", type=_constant, default=0.4, help="length normalisation (default: 0.4, Anserini's)")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="warning")
    parser.add_argument("--fd", type=int, help="serve on this inherited listening socket; host and port are not used")
    parser.add_argument("--parent", type=int, help="process id of the launcher; the server ends with it")
    return parser.parse_args(argv)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises StartupError naming address and reason. Port 0 takes a free one."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"can't listen on {where}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"can't listen on {where}: {error.strerror}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """``http://host:port`` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _adopt(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise StartupError(f"--fd {descriptor} is not a socket: {error.strerror}") from error


async def _serve(arguments: argparse.Namespace, listener: socket.socket) -> int:
    import uvicorn

    from .app import create_app
    from .parent import watch_parent
    from .service import Service, ServiceConfig

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn raises the signal again after its shutdown; a clean stop is to exit with 0.
            yield

    failure: Exception | None = None

    def loaded(error: Exception | None) -> None:
        nonlocal failure
        if error is None:
            say(f"{len(service.rows)} passages ready in {service.load_seconds:.1f} s")
            if service.untitled:
                say(f"warning: {service.untitled} passages have no line break: all their text is title, none is body")
            return
        failure = error
        server.should_exit = True

    config = ServiceConfig(
        arguments.corpus, arguments.topk, arguments.retriever, k1=arguments.bm25_k1, b=arguments.bm25_b
    )
    service = Service(config)
    server = Server(
        uvicorn.Config(
            create_app(service, loaded=loaded),
            log_level=arguments.log_level,
            access_log=arguments.log_level in ("debug", "info"),
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )

    def stop(number: int) -> None:
        server.handle_exit(number, None)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    watcher = None if arguments.parent is None else watch_parent(arguments.parent, lambda: stop(signal.SIGTERM))
    say(f"listening on {url_of(listener)}, loading {arguments.corpus}")
    await server.serve(sockets=[listener])
    if watcher is not None:
        watcher.cancel()
    if isinstance(failure, StartupError):
        raise failure
    if failure is not None:
        raise StartupError(f"loading {arguments.corpus} failed: {type(failure).__name__}: {failure}") from failure
    return 0


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C (exit code 0); 2 when it can't start, with one line that says why."""
    arguments = parse_arguments(argv)
    try:
        from .corpus import check_corpus_path

        check_corpus_path(arguments.corpus)
        listener = bind(arguments.host, arguments.port) if arguments.fd is None else _adopt(arguments.fd)
        if not listener.getsockname()[0].startswith(("127.", "::1")):
            say("warning: reachable from other machines, and there is no authentication")
        return asyncio.run(_serve(arguments, listener))
    except StartupError as error:
        say(f"error: {error}")
        return 2
    except ImportError as error:
        say(f"error: {error.name or error} is not installed; pip install 'mapd-verl[retrieval]'")
        return 2
