"""Serving the viewer on a loopback port until Ctrl-C."""

from __future__ import annotations

import socket
from pathlib import Path


def serve(cache: str | Path, port: int = 0, readonly: bool = False) -> None:
    """Print the page's address, then serve it.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: the file is no protocol cache.
        OSError: the port is taken.
    """
    import uvicorn

    from protocol_cache.viewer.app import make_app

    app = make_app(cache, readonly)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        # Whoever reads the address may ask at once: from here on a connection waits for the server to come up.
        listener.listen(128)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])
