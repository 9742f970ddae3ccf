"""Running the sidecar: command line, socket, signals, exit code."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from .errors import StartupError

_BACKLOG = 2048


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


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
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
    parser.add_argument("--corpus", "--corpus_path", help="JSON lines with id and contents (.gz too): BM25 in memory")
    parser.add_argument("--index", help="a folder that `build` or `import` made; mapped, not loaded")
    parser.add_argument("--verify", action="store_true", help="with --index: read every byte of it before serving")
    parser.add_argument("--encoder", "--retriever_model", help="with --index: where the dense encoder lies now")
    parser.add_argument("--gpu", "--faiss_gpu", action="store_true", help="with --index: dense search on all GPUs")
    parser.add_argument("--reranker", "--reranker_model", help="a cross-encoder for POST /rerank")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--topk", type=_positive, default=3, help="passages a query when it names none (default: 3)")
    parser.add_argument(
        "--retriever",
        "--retriever_name",
        choices=["bm25", "dense", "hybrid"],
        help="which of the index (default: all it holds; hybrid fuses both)",
    )
    parser.add_argument("--bm25-k1", type=_constant, default=0.9, help="term saturation (default: 0.9, Anserini's)")
    parser.add_argument("--bm25-b", type=_constant, default=0.4, help="length normalisation (default: 0.4, Anserini's)")
    parser.add_argument("--token-file", help="file with the bearer token that requests must carry")
    parser.add_argument("--open", action="store_true", help="listen beyond this machine without a token")
    parser.add_argument("--cache-size", type=_count, default=65536, help="answers kept, by query and topk (0: none)")
    parser.add_argument("--max-pending", type=_positive, default=8192, help="queries that may wait; more answer 429")
    parser.add_argument("--max-batch", type=_positive, default=64, help="queries searched together")
    parser.add_argument("--max-wait", type=_constant, default=0.0, help="seconds an idle index waits for company")
    parser.add_argument("--deadline", type=_constant, default=30.0, help="seconds until a request is answered 504")
    parser.add_argument("--grace", type=_constant, default=10.0, help="seconds that a stop gives requests under way")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="warning")
    parser.add_argument("--fd", type=int, help="serve on this inherited listening socket; host and port are not used")
    parser.add_argument("--parent", type=int, help="process id of the launcher; the server ends with it")
    arguments = parser.parse_args(argv)
    if (arguments.corpus is None) == (arguments.index is None):
        parser.error("name one of --corpus and --index")
    if arguments.corpus is not None and (arguments.retriever or "bm25") != "bm25":
        parser.error(f"--retriever {arguments.retriever} wants --index (python -m retrieval_server build)")
    for name in ("verify", "encoder", "gpu"):
        if arguments.corpus is not None and getattr(arguments, name):
            parser.error(f"--{name} goes with --index")
    return arguments


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


def read_token(path: str | None) -> str | None:
    """The token in a file, its ends stripped; raises StartupError."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--token-file {path}: can't be read ({error})") from error
    if len(token) < 16 or any(character.isspace() for character in token):
        raise StartupError(f"--token-file {path}: wants one word of at least 16 characters")
    return token


def check_exposure(listener: socket.socket, token: str | None, is_open: bool) -> None:
    """Loopback needs no token; anything wider needs one, or ``--open``. Raises StartupError."""
    host = listener.getsockname()[0]
    if token is None and not is_open and not host.startswith(("127.", "::1")):
        raise StartupError(f"{host} is reachable from other machines: give --token-file, or --open to do without")


async def _serve(arguments: argparse.Namespace, listener: socket.socket, token: str | None) -> int:
    import uvicorn

    from .app import Settings, create_app
    from .drain import DrainingServer
    from .parent import watch_parent
    from .service import Service, ServiceConfig
    from .wire import Limits

    failure: Exception | None = None

    def loaded(error: Exception | None) -> None:
        nonlocal failure
        if error is None:
            say(f"{len(service.rows)} passages ready in {service.load_seconds:.1f} s ({service.name})")
            if service.untitled:
                say(f"warning: {service.untitled} passages have no line break: all their text is title, none is body")
            return
        failure = error
        server.should_exit = True

    config = ServiceConfig(
        arguments.corpus,
        arguments.topk,
        k1=arguments.bm25_k1,
        b=arguments.bm25_b,
        index=arguments.index,
        backend=arguments.retriever,
        thorough=arguments.verify,
        encoder=arguments.encoder,
        gpu=arguments.gpu,
        reranker=arguments.reranker,
    )
    settings = Settings(
        Limits(max_pending=arguments.max_pending),
        token,
        arguments.cache_size,
        arguments.max_wait,
        arguments.max_batch,
        arguments.deadline,
    )
    service = Service(config)
    app = create_app(service, settings, loaded=loaded)
    server = DrainingServer(
        uvicorn.Config(
            app,
            log_level=arguments.log_level,
            # One line a request, with its path and query string: for looking at a wire, not for a log that is kept.
            access_log=arguments.log_level == "debug",
            loop="asyncio",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(arguments.grace) + 1,
        ),
        app.drain,
        arguments.grace,
    )

    def stop(number: int) -> None:
        server.handle_exit(number, None)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    watcher = None if arguments.parent is None else watch_parent(arguments.parent, lambda: stop(signal.SIGTERM))
    say(f"listening on {url_of(listener)}, loading {config.what}")
    await server.serve(sockets=[listener])
    if watcher is not None:
        watcher.cancel()
    if isinstance(failure, StartupError):
        raise failure
    if failure is not None:
        raise StartupError(f"loading {config.what} failed: {type(failure).__name__}: {failure}") from failure
    return 0


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C (exit code 0); 2 when it can't start, with one line that says why."""
    arguments = parse_arguments(argv)
    try:
        if arguments.corpus is not None:
            from .corpus import check_corpus_path

            check_corpus_path(arguments.corpus)
        else:
            from .index.manifest import Manifest

            Manifest.read(Path(arguments.index))
        token = read_token(arguments.token_file)
        listener = bind(arguments.host, arguments.port) if arguments.fd is None else _adopt(arguments.fd)
        check_exposure(listener, token, arguments.open)
        return asyncio.run(_serve(arguments, listener, token))
    except StartupError as error:
        say(f"error: {error}")
        return 2
    except ImportError as error:
        say(f"error: {error.name or error} is not installed; pip install 'mapd-verl[retrieval]'")
        return 2
