"""Stopping without losing a request: a uvicorn server that answers what has reached this machine before it goes.

On SIGTERM (1) every answer says ``Connection: close`` while new connections are still taken, until no request has come
for a moment; (2) what the kernel had already connected for us is accepted, and only then the port closes; (3) idle
connections are closed once nothing can be read from them. uvicorn alone closes listeners and idle connections at once,
which resets both what waits in the backlog and what is just arriving.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

#: Seconds without a request that count as quiet, and the most that is waited for quiet before the port closes.
QUIET, LINGER = 0.25, 2.0
_TICK = 0.02


class DrainingServer(uvicorn.Server):
    """``draining`` is called when the stop begins: from then on answers should close their connections."""

    def __init__(self, config: uvicorn.Config, draining: Callable[[], None], grace: float) -> None:
        super().__init__(config)
        self._draining = draining
        self._grace = grace

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again after its shutdown; a clean stop is to exit with 0.
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining()
        end = time.monotonic() + self._grace
        await self._quiet(min(end, time.monotonic() + LINGER))
        await self._close_listeners()
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await self._quiet(end)
            for connection in list(self.server_state.connections):
                if _idle(connection):
                    connection.transport.close()
            await asyncio.sleep(_TICK)
        await super().shutdown(sockets=sockets)

    async def _quiet(self, end: float) -> None:
        """Until no request has come for :data:`QUIET` seconds, or ``end``."""
        seen, since = -1, time.monotonic()
        while time.monotonic() < end and time.monotonic() - since < QUIET and not self.force_exit:
            if self.server_state.total_requests != seen:
                seen, since = self.server_state.total_requests, time.monotonic()
            await asyncio.sleep(_TICK)

    async def _close_listeners(self) -> None:
        loop = asyncio.get_running_loop()
        protocol_class: Any = self.config.http_protocol_class
        protocol: Callable[[], Any] = functools.partial(
            protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        waiting: list[socket.socket] = []
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
                accepting = socket.socket(fileno=socket.dup(listener.fileno()))
                accepting.setblocking(False)
                # Nothing is answered meanwhile, so that clients which ask again and again can't keep this going.
                with accepting, contextlib.suppress(BlockingIOError):
                    while True:
                        waiting.append(accepting.accept()[0])
            server.close()
        for connection in waiting:
            connection.setblocking(False)
            await loop.connect_accepted_socket(protocol, connection)


def _idle(connection: Any) -> bool:
    """Whether no answer is under way on this connection and nothing has arrived on it."""
    cycle = getattr(connection, "cycle", None)
    if cycle is not None and not cycle.response_complete:
        return False
    descriptor = connection.transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)
