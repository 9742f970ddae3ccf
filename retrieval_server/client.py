"""The asynchronous client of a Search-R1 retrieval service. Needs only httpx.

A failing service is an answer, not an exception: ``search`` returns ``SearchResult(ok=False, error=...)``
after bounded retries over all given URLs, so that a rollout can be marked failed and go on.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import httpx

from .coalesce import Coalescer
from .transport import ERROR_CODES, ErrorCode, Failure, Passage, post_queries, retrieve_url

__all__ = ["ERROR_CODES", "ErrorCode", "Passage", "RetrievalClient", "SearchResult"]

# One query of a batch may be what the service chokes on; its neighbours must not pay for it.
_ASK_ALONE = ("bad_request", "server_error", "bad_response")


@dataclass(frozen=True)
class SearchResult:
    """What a search gave: ``ok`` with passages (perhaps none: nothing matched), or an ``error`` code.

    ``error`` is one of ``ERROR_CODES``; ``detail`` says it for people and names the URL; ``attempts`` counts
    HTTP requests; ``seconds`` is the whole time, waiting and retries included.
    """

    ok: bool
    passages: list[Passage]
    error: ErrorCode | None = None
    detail: str = ""
    attempts: int = 0
    seconds: float = 0.0


class RetrievalClient:
    """Searches one passage service behind one or several URLs.

    ``urls``: ``http://host:port`` or the full ``.../retrieve``, tried in turn from a rotating start, those that
    failed within ``cooldown`` seconds last. ``timeout``: seconds for one attempt, from connecting to the
    last byte. ``retries``: further attempts after the first, over all URLs together; a URL that refuses the
    request (4xx) isn't asked again. Before it asks a URL again it waits ``backoff * 2^n`` seconds with
    jitter, or what Retry-After asks, never more than ``max_backoff``. So a search takes at most
    ``(retries + 1) * timeout + retries * max_backoff`` seconds once its request starts, twice that if its
    batch fails for a reason that lies in one query: then each is asked alone.

    Searches of one event loop that are made together share requests of up to ``max_batch`` queries (1 turns it
    off), waiting at most ``batch_window`` seconds for company. ``max_concurrency`` bounds the requests in
    flight on one loop. ``trust_env``: go through the environment's HTTP proxy.

    Usable from several event loops and threads (each loop gets its own connection pool, made when first
    needed), and picklable. Raises ValueError for URLs or settings that can't be right.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        topk: int = 3,
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.1,
        max_backoff: float = 2.0,
        cooldown: float = 5.0,
        max_concurrency: int = 64,
        max_batch: int = 64,
        batch_window: float = 0.002,
        trust_env: bool = False,
    ) -> None:
        self.urls = [retrieve_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise ValueError("RetrievalClient needs at least one URL")
        counts = {"topk": (topk, 1), "retries": (retries, 0), "max_batch": (max_batch, 1)}
        for name, (value, least) in {**counts, "max_concurrency": (max_concurrency, 1)}.items():
            if value < least:
                raise ValueError(f"RetrievalClient: {name} must be at least {least}, got {value}")
        seconds = {"backoff": backoff, "max_backoff": max_backoff, "cooldown": cooldown, "batch_window": batch_window}
        for name, duration in seconds.items():
            if not duration >= 0:
                raise ValueError(f"RetrievalClient: {name} must be at least 0 seconds, got {duration}")
        if not timeout > 0:
            raise ValueError(f"RetrievalClient: timeout must be above 0 seconds, got {timeout}")
        self.topk = topk
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.max_backoff = max_backoff
        self.cooldown = cooldown
        self.max_concurrency = max_concurrency
        self.max_batch = max_batch
        self.batch_window = batch_window
        self.trust_env = trust_env
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._turn = random.randrange(len(self.urls))
        self._cool_until: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    async def search(self, query: str, topk: int | None = None) -> SearchResult:
        """The best passages for ``query``; never raises for what a service does or doesn't do.

        A blank query gives ``error="empty_query"`` without a request. ``topk`` None takes the client's;
        below 1 is a ValueError. Cancelling the task abandons the search.
        """
        if topk is not None and topk < 1:
            raise ValueError(f"topk must be at least 1, got {topk}")
        started = time.monotonic()
        if not query.strip():
            return SearchResult(False, [], "empty_query", "the query is blank")
        result = await self._pool().coalescer.submit(query, topk or self.topk)
        return replace(result, seconds=time.monotonic() - started)

    async def search_many(self, queries: Iterable[str], topk: int | None = None) -> list[SearchResult]:
        """``search`` for each query, together, results in the order of the queries."""
        return list(await asyncio.gather(*(self.search(query, topk) for query in queries)))

    async def aclose(self) -> None:
        """Finish the running loop's searches and close its connections; the client can be used again."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.coalescer.drain()
            await pool.http.aclose()

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        with self._lock:
            pool = self._pools.get(loop)
            if pool is None:
                for ended in [known for known in self._pools if known.is_closed()]:
                    del self._pools[ended]  # a pool refers to its loop, so neither would go by itself
                pool = self._pools[loop] = _Pool(self)
            return pool

    async def _send(self, pool: _Pool, queries: Sequence[str], topk: int) -> list[SearchResult]:
        """A result for each query, from one request if all goes well."""
        attempts = 0
        tried: set[str] = set()
        refused: set[str] = set()
        failure: Failure | None = None
        for url in self._order():
            if url in refused:
                continue
            if failure is not None and url in tried:
                await asyncio.sleep(self._pause(attempts - 1, failure.wait))
            tried.add(url)
            attempts += 1
            try:
                async with pool.slots:
                    found = await post_queries(pool.http, url, queries, topk, self.timeout)
            except Failure as error:
                failure = error
                self._cool_until[url] = time.monotonic() + self.cooldown
                if not error.retry:
                    refused.add(url)
                if error.code in _ASK_ALONE and len(queries) > 1:
                    alone = await asyncio.gather(*(self._send(pool, [query], topk) for query in queries))
                    return [result for results in alone for result in results]
            else:
                self._cool_until.pop(url, None)
                return [SearchResult(True, passages, attempts=attempts) for passages in found]
        if failure is None:
            raise RuntimeError("a search made no attempt")  # the order of URLs is never empty
        return [SearchResult(False, [], failure.code, failure.detail, attempts) for _ in queries]

    def _order(self) -> list[str]:
        """The URL of each attempt."""
        with self._lock:
            self._turn = (self._turn + 1) % len(self.urls)
            rotated = self.urls[self._turn :] + self.urls[: self._turn]
        now = time.monotonic()
        rotated.sort(key=lambda url: self._cool_until.get(url, 0.0) > now)
        return [rotated[attempt % len(rotated)] for attempt in range(self.retries + 1)]

    def _pause(self, retry: int, wish: float | None) -> float:
        if wish is not None:
            # Not before the time asked for, and spread, so that all callers don't come back at once.
            return min(wish * random.uniform(1.0, 1.25), self.max_backoff)
        return min(self.backoff * 2**retry * random.uniform(0.5, 1.5), self.max_backoff)


class _Pool:
    """What belongs to one event loop: its connections and the searches that wait for company."""

    def __init__(self, client: RetrievalClient) -> None:
        async def send(queries: Sequence[str], topk: int) -> list[SearchResult]:
            return await client._send(self, queries, topk)

        self.slots = asyncio.Semaphore(client.max_concurrency)
        self.coalescer = Coalescer(send, client.batch_window, client.max_batch)
        self.http = httpx.AsyncClient(
            # One attempt's time is bounded as a whole; httpx would only bound each read.
            timeout=None,
            limits=httpx.Limits(
                max_connections=client.max_concurrency, max_keepalive_connections=client.max_concurrency
            ),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            follow_redirects=False,
            trust_env=client.trust_env,
        )
