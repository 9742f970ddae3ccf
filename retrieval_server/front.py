"""What stands before FastAPI: the bearer token, ``Connection: close`` while draining, and a short way for searches.

A search is most of the traffic and needs none of the framework's routing, which would cost more than the search itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError
from .wire import encode_error

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Answers without a token: whoever watches the process need not know it.
_OPEN = ("/livez", "/readyz")


class Front:
    """An ASGI application around another.

    Args:
        app: the framework's.
        retrieve: body -> answer of ``POST /retrieve``; raises ApiError.
        max_body_bytes: longest body that is read.
        token: what ``Authorization: Bearer`` must say; None asks for nothing.
    """

    def __init__(
        self,
        app: Any,
        retrieve: Callable[[bytes, float | None], Awaitable[bytes]],
        max_body_bytes: int,
        token: str | None = None,
        answered: Callable[[str, int], None] = lambda route, status: None,
    ) -> None:
        self.app = app
        self._retrieve = retrieve
        self._max_body_bytes = max_body_bytes
        self._token = None if token is None else token.encode()
        self._answered = answered
        self._draining = False

    def drain(self) -> None:
        """From now on every answer ends its connection."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if self._draining:
            send = _closing(send)
        if self._token is not None and path not in _OPEN and not self._admits(scope["headers"]):
            await self._send(send, path, _refusal())
            return
        if path != "/retrieve" or scope["method"] != "POST":
            if scope["method"] == "POST":
                try:
                    declared, _ = _facts(scope["headers"])
                    receive = _replay(await self._body(receive, declared), receive)
                except ApiError as error:
                    await self._send(send, path, error)
                    return
            await self.app(scope, receive, send)
            return
        try:
            declared, seconds = _facts(scope["headers"])
            body = await self._body(receive, declared)
            answer = await self._retrieve(body, seconds)
        except ApiError as error:
            await self._send(send, path, error)
            return
        self._answered(path, 200)
        await send({"type": "http.response.start", "status": 200, "headers": _headers(len(answer))})
        await send({"type": "http.response.body", "body": answer})

    def _admits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        assert self._token is not None
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return hmac.compare_digest(value[7:].strip(), self._token)
        return False

    async def _body(self, receive: Receive, declared: int) -> bytes:
        """The whole body, without ever holding more than the limit and one chunk of it."""
        too_large = ApiError(413, "body_too_large", f"the request body is larger than {self._max_body_bytes} bytes")
        if declared > self._max_body_bytes:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "disconnected", "the client went away")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body_bytes:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _send(self, send: Send, route: str, error: ApiError) -> None:
        body = encode_error(error)
        headers = _headers(len(body))
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        self._answered(route if route == "/retrieve" else "other", error.status)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, and then whatever else comes."""
    pending: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return again


def _closing(send: Send) -> Send:
    async def closing(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


def _headers(length: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]


def _facts(headers: list[tuple[bytes, bytes]]) -> tuple[int, float | None]:
    """The declared length (0 if none), and the seconds that the client gives the request.

    Raises:
        ApiError: 400 for a deadline that is no number.
    """
    declared, seconds = 0, None
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            declared = int(value)
        elif name == b"x-request-timeout":
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if not 0.0 < seconds < float("inf"):
                raise ApiError(400, "invalid_deadline", "X-Request-Timeout: wants seconds, a number above 0")
    return declared, seconds


def _refusal() -> ApiError:
    return ApiError(401, "unauthorized", "this service wants its bearer token")
