"""One request to a retrieval service and what can go wrong with it; the client builds on this."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
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

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


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


class Failure(Exception):
    """One failed attempt. ``retry``: whether the same URL may be asked again; ``wait``: its Retry-After in seconds."""

    def __init__(self, code: ErrorCode, detail: str, retry: bool = True, wait: float | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.retry = retry
        self.wait = wait


def retrieve_url(url: str) -> str:
    """The full ``.../retrieve`` of a service's base or full URL; raises ValueError if it can't be one."""
    parts = urlsplit(url)
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    base = url.rstrip("/")
    usable = parts.scheme in ("http", "https") and parts.hostname and port_fits and not (parts.query or parts.fragment)
    if not usable or any(character.isspace() for character in url):
        raise ValueError(f"RetrievalClient: not the http URL of a service: {url!r}")
    try:
        httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ValueError(f"RetrievalClient: not the http URL of a service: {url!r} ({error})") from error
    return base if parts.path.rstrip("/").endswith("/retrieve") else f"{base}/retrieve"


async def post_queries(
    http: httpx.AsyncClient, url: str, queries: Sequence[str], topk: int, timeout: float
) -> list[list[Passage]]:
    """The passages of each query, from one ``POST`` that may take ``timeout`` seconds in all; raises Failure."""
    payload = {"queries": list(queries), "topk": topk, "return_scores": True}
    # ASCII escapes carry every string that Python can hold, lone surrogates too.
    body = json.dumps(payload).encode("ascii")
    try:
        async with asyncio.timeout(timeout), http.stream("POST", url, content=body) as answer:
            content = bytearray()
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > _MAX_ANSWER_BYTES:
                    raise Failure("bad_response", f"{url}: answer larger than {_MAX_ANSWER_BYTES} bytes")
    except (TimeoutError, httpx.TimeoutException) as error:
        raise Failure("timeout", f"{url}: no complete answer within {timeout:g} s") from error
    except httpx.DecodingError as error:
        raise Failure("bad_response", f"{url}: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        raise Failure("unreachable", f"{url}: {type(error).__name__}: {error}") from error
    if answer.status_code != 200:
        raise _http_failure(url, answer.status_code, answer.headers, bytes(content))
    return _read_answer(url, bytes(content), len(queries))


def _http_failure(url: str, status: int, headers: httpx.Headers, content: bytes) -> Failure:
    detail = f"{url}: HTTP {status}: {content[:200].decode('utf-8', 'replace').strip()}"
    asked = headers.get("retry-after", "")
    wait = float(asked) if asked.isascii() and asked.isdecimal() else None
    if status == 429:
        return Failure("overloaded", detail, wait=wait)
    if status in (502, 503, 504):
        return Failure("unavailable", detail, wait=wait)
    if status >= 500:
        return Failure("server_error", detail, wait=wait)
    return Failure("bad_request", detail, retry=False)


def _read_answer(url: str, content: bytes, queries: int) -> list[list[Passage]]:
    """Passages for each of ``queries`` queries; raises Failure for any other shape."""
    try:
        result = json.loads(content)["result"]
        if not isinstance(result, list) or len(result) != queries:
            found = f"a list of {len(result)}" if isinstance(result, list) else type(result).__name__
            raise ValueError(f"'result' is {found}, asked were {queries} queries")
        return [_read_items(items) for items in result]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        excerpt = content[:120].decode("utf-8", "replace")
        raise Failure("bad_response", f"{url}: not a retrieval answer ({reason}): {excerpt!r}") from error


def _read_items(items: Any) -> list[Passage]:
    if not isinstance(items, list):
        raise ValueError(f"a query's result is {type(items).__name__}, not a list")
    return [_read_passage(item) for item in items]


def _read_passage(item: Any) -> Passage:
    """``{"document": row, "score": s}``, the same without a score, or the bare row."""
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
