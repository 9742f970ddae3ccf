"""The asynchronous client of a Search-R1 retrieval service. Needs only httpx.

A failing service is an answer, not an exception: ``search`` returns ``SearchResult(ok=False, error=...)``
after bounded retries over all given URLs, so that a rollout can be marked failed and go on.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import httpx

ErrorCode = Literal[
    "empty_query",  # nothing to search for; no request was made
    "unreachable",  # no connection, or it broke
    "timeout",  # no complete answer in time
    "overloaded",  # 429
    "unavailable",  # 502, 503, 504: starting, stopping or behind a failing proxy
    "server_error",  # any other 5xx
    "bad_request",  # 3xx, 4xx: the service refuses this request
    "bad_response",  # 200 with something else than a retrieval answer
]
ERROR_CODES: tuple[str, ...] = get_args(ErrorCode)

_MAX_ANSWER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Passage:
    """One retrieved passage. ``id`` is "" and ``score`` None where a service sends none.

    As in Search-R1 the title is the first line of ``contents``, its quotes kept, and the text is the
    rest; contents of one line are all title and no text.
    """

    id: str
    contents: str
    score: float | None

    @property
    def title(self) -> str:
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2]


@dataclass(frozen=True)
class SearchResult:
    """What a search gave: ``ok`` with passages (perhaps none: nothing matched), or an ``error`` code.

    ``error`` is one of ``ERROR_CODES``; ``detail`` says it for people and names the URL; ``attempts`` counts
    HTTP requests; ``seconds`` is the whole time, waiting and retries included.
    """

    ok: bool
    passages: list[Passage]
    error: str | None = None
    detail: str = ""
    attempts: int = 0
    seconds: float = 0.0


class _Failure(Exception):
    """One failed attempt; ``wait`` is the service's own wish in seconds (Retry-After)."""

    def __init__(self, code: ErrorCode, detail: str, retry: bool = True, wait: float | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.retry = retry
        self.wait = wait


class RetrievalClient:
    """Searches one passage service behind one or several URLs.

    ``urls``: ``http://host:port`` or the full ``.../retrieve``, tried in turn from a rotating start, those that
    failed within ``cooldown`` seconds last. ``timeout``: seconds for one attempt, from connecting to the
    last byte. ``retries``: further attempts after the first, over all URLs together; a URL that refuses the
    request (4xx) isn't asked again. Before it asks a URL again it waits ``backoff * 2^n`` seconds with
    jitter, or what Retry-After asks, never more than ``max_backoff``. So a
    search takes at most ``(retries + 1) * timeout + retries * max_backoff`` seconds once its request starts;
    ``max_concurrency`` bounds the requests in flight on one event loop, and further searches queue.

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
        trust_env: bool = False,
    ) -> None:
        self.urls = [_retrieve_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise ValueError("RetrievalClient needs at least one URL")
        for name, value, least in (("topk", topk, 1), ("retries", retries, 0), ("max_concurrency", max_concurrency, 1)):
            if value < least:
                raise ValueError(f"RetrievalClient: {name} must be at least {least}, got {value}")
        if timeout <= 0:
            raise ValueError(f"RetrievalClient: timeout must be above 0 seconds, got {timeout}")
        self.topk = topk
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.max_backoff = max_backoff
        self.cooldown = cooldown
        self.max_concurrency = max_concurrency
        self.trust_env = trust_env
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = weakref.WeakKeyDictionary()
        self._turn = random.randrange(len(self.urls))
        self._cool_until: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    async def search(self, query: str, topk: int | None = None) -> SearchResult:
        """The best passages for ``query``; never raises for what a service does or doesn't do.

        A blank query gives ``error="empty_query"`` without a request. Cancelling the task cancels the search.
        """
        started = time.monotonic()
        if not query.strip():
            return SearchResult(False, [], "empty_query", "the query is blank")
        payload = {"queries": [query], "topk": topk or self.topk, "return_scores": True}
        # ASCII escapes carry every string that Python can hold, lone surrogates too.
        body = json.dumps(payload).encode("ascii")
        failure: _Failure | None = None
        attempts = 0
        tried: set[str] = set()
        refused: set[str] = set()
        pool = self._pool()
        for url in self._order():
            if url in refused:
                continue
            if failure is not None and url in tried:
                await asyncio.sleep(self._pause(attempts - 1, failure.wait))
            tried.add(url)
            attempts += 1
            try:
                async with pool.slots:
                    passages = await self._attempt(pool.http, url, body)
            except _Failure as error:
                failure = error
                self._cool_until[url] = time.monotonic() + self.cooldown
                if not error.retry:
                    refused.add(url)
            else:
                self._cool_until.pop(url, None)
                return SearchResult(True, passages, attempts=attempts, seconds=time.monotonic() - started)
        assert failure is not None
        return SearchResult(False, [], failure.code, failure.detail, attempts, time.monotonic() - started)

    async def search_many(self, queries: Iterable[str], topk: int | None = None) -> list[SearchResult]:
        """``search`` for each query, concurrently, results in the order of the queries."""
        return list(await asyncio.gather(*(self.search(query, topk) for query in queries)))

    async def aclose(self) -> None:
        """Close the running loop's connections; the client can be used again afterwards."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
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
                pool = self._pools[loop] = _Pool(self.max_concurrency, self.trust_env)
            return pool

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

    async def _attempt(self, http: httpx.AsyncClient, url: str, body: bytes) -> list[Passage]:
        try:
            async with asyncio.timeout(self.timeout):
                async with http.stream("POST", url, content=body) as answer:
                    status, headers = answer.status_code, answer.headers
                    content = bytearray()
                    async for chunk in answer.aiter_bytes():
                        content += chunk
                        if len(content) > _MAX_ANSWER_BYTES:
                            raise _Failure("bad_response", f"{url}: answer larger than {_MAX_ANSWER_BYTES} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Failure("timeout", f"{url}: no answer within {self.timeout:g} s") from error
        except httpx.DecodingError as error:
            raise _Failure("bad_response", f"{url}: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            raise _Failure("unreachable", f"{url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise _http_failure(url, status, headers, bytes(content))
        return _read_passages(url, bytes(content))


class _Pool:
    """What belongs to one event loop."""

    def __init__(self, max_concurrency: int, trust_env: bool) -> None:
        self.slots = asyncio.Semaphore(max_concurrency)
        self.http = httpx.AsyncClient(
            # One attempt's time is bounded as a whole by the caller; httpx would only bound each read.
            timeout=None,
            limits=httpx.Limits(max_connections=max_concurrency, max_keepalive_connections=max_concurrency),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            follow_redirects=False,
            trust_env=trust_env,
        )


def _retrieve_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits or parts.query or parts.fragment:
        raise ValueError(f"RetrievalClient: not the http URL of a service: {url!r}")
    base = url.rstrip("/")
    try:
        httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ValueError(f"RetrievalClient: not the http URL of a service: {url!r} ({error})") from error
    return base if parts.path.rstrip("/").endswith("/retrieve") else f"{base}/retrieve"


def _http_failure(url: str, status: int, headers: httpx.Headers, content: bytes) -> _Failure:
    excerpt = content[:200].decode("utf-8", "replace").strip()
    detail = f"{url}: HTTP {status}: {excerpt}"
    wait: float | None = None
    asked = headers.get("retry-after", "")
    if asked.isdecimal():
        wait = float(asked)
    if status == 429:
        return _Failure("overloaded", detail, wait=wait)
    if status in (502, 503, 504):
        return _Failure("unavailable", detail, wait=wait)
    if status >= 500:
        return _Failure("server_error", detail, wait=wait)
    return _Failure("bad_request", detail, retry=False)


def _read_passages(url: str, content: bytes) -> list[Passage]:
    """Passages of the one query of an answer; raises _Failure for any other shape."""
    try:
        result = json.loads(content)["result"]
        if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
            raise ValueError("'result' is not a list of one list")
        return [_read_passage(item) for item in result[0]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        excerpt = content[:120].decode("utf-8", "replace")
        raise _Failure("bad_response", f"{url}: not a retrieval answer ({reason}): {excerpt!r}") from error


def _read_passage(item: Any) -> Passage:
    if not isinstance(item, dict):
        raise ValueError(f"a result is {type(item).__name__}, not an object")
    document = item.get("document", item)
    if not isinstance(document, dict):
        raise ValueError(f"'document' is {type(document).__name__}, not an object")
    contents, score, identifier = document["contents"], item.get("score"), document.get("id", "")
    if not isinstance(contents, str):
        raise ValueError(f"'contents' is {type(contents).__name__}, not a string")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise ValueError(f"'score' is {type(score).__name__}, not a number")
    return Passage(str(identifier), contents, None if score is None else float(score))
