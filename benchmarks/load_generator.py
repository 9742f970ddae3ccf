"""A cheap HTTP/1.1 load generator on loopback: asyncio protocols, requests built before the clock starts.

Closed loop: each of N connections asks again when it has its answer. Open loop: requests come at a rate, whatever the
server does, on connections from a pool; latency counts from when a request was due.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools


@dataclass
class Outcome:
    """Latencies in seconds of 200s and of 429s, and the count of anything else; ``seconds`` is the whole run."""

    seconds: float = 0.0
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def rate(self) -> float:
        """Accepted answers a second."""
        return len(self.accepted) / self.seconds if self.seconds else 0.0

    def quantile(self, share: float) -> float:
        """Of the accepted latencies, milliseconds."""
        ordered = sorted(self.accepted)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def requests_of(queries: Sequence[str], topk: int = 3) -> list[bytes]:
    """One request a query, as bytes."""
    made = []
    for query in queries:
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        made.append(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return made


class _Connection(asyncio.Protocol):
    def __init__(self, done) -> None:
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.since = 0.0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._done(self, self._parser.get_status_code())

    def connection_lost(self, error) -> None:
        self.transport = None

    def ask(self, request: bytes, since: float) -> None:
        self.since = since
        assert self.transport is not None
        self.transport.write(request)


async def _connect(url: str, count: int, done) -> list[_Connection]:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(count):
        _, connection = await loop.create_connection(lambda: _Connection(done), parts.hostname, parts.port)
        made.append(connection)
    return made


def _note(outcome: Outcome, connection: _Connection, status: int) -> None:
    took = time.perf_counter() - connection.since
    if status == 200:
        outcome.accepted.append(took)
    elif status == 429:
        outcome.refused.append(took)
    else:
        outcome.failed += 1


async def _closed(url: str, requests: Sequence[bytes], clients: int, seconds: float) -> Outcome:
    outcome, end = Outcome(), 0.0
    upcoming = itertools.cycle(requests)
    left, over = clients, asyncio.Event()

    def done(connection: _Connection, status: int) -> None:
        nonlocal left
        _note(outcome, connection, status)
        now = time.perf_counter()
        if now < end:
            connection.ask(next(upcoming), now)
        else:
            left -= 1
            if left == 0:
                over.set()

    connections = await _connect(url, clients, done)
    started = time.perf_counter()
    end = started + seconds
    for connection in connections:
        connection.ask(next(upcoming), time.perf_counter())
    await asyncio.wait_for(over.wait(), seconds + 60)
    outcome.seconds = time.perf_counter() - started
    for connection in connections:
        if connection.transport is not None:
            connection.transport.close()
    return outcome


async def _open(url: str, requests: Sequence[bytes], rate: float, seconds: float, connections: int) -> Outcome:
    outcome = Outcome()
    idle: deque[_Connection] = deque()
    waiting: deque[tuple[bytes, float]] = deque()
    under_way = 0

    def done(connection: _Connection, status: int) -> None:
        nonlocal under_way
        _note(outcome, connection, status)
        under_way -= 1
        if waiting:
            under_way += 1
            connection.ask(*waiting.popleft())
        else:
            idle.append(connection)

    made = await _connect(url, connections, done)
    idle.extend(made)
    started = time.perf_counter()
    upcoming = itertools.cycle(requests)
    sent = 0
    while (now := time.perf_counter()) < started + seconds:
        due = int((now - started) * rate)
        while sent < due:
            moment = started + sent / rate
            sent += 1
            if idle:
                under_way += 1
                idle.popleft().ask(next(upcoming), moment)
            else:
                waiting.append((next(upcoming), moment))
        await asyncio.sleep(0.001)
    waiting.clear()
    limit = time.perf_counter() + 30
    while under_way and time.perf_counter() < limit:
        await asyncio.sleep(0.01)
    outcome.seconds = seconds
    for connection in made:
        if connection.transport is not None:
            connection.transport.close()
    return outcome


def closed_loop(url: str, requests: Sequence[bytes], clients: int, seconds: float) -> Outcome:
    """``clients`` connections for ``seconds``."""
    return asyncio.run(_closed(url, requests, clients, seconds))


def open_loop(url: str, requests: Sequence[bytes], rate: float, seconds: float, connections: int = 256) -> Outcome:
    """``rate`` requests a second for ``seconds``."""
    return asyncio.run(_open(url, requests, rate, seconds, connections))
