"""The HTTP application: ``POST /retrieve``, ``GET /livez``, ``GET /readyz``."""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import AsyncIterator, Callable

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from .batching import Batcher
from .errors import ApiError
from .service import Service
from .wire import Limits, RetrieveRequest, encode_error, encode_result, parse_request

_JSON = "application/json"


def _error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return Response(encode_error(error), error.status, headers, _JSON)


async def _read_body(request: Request, limit: int) -> bytes:
    """The whole body, without ever holding more than ``limit`` bytes and one chunk of it."""
    too_large = ApiError(413, "body_too_large", f"the request body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def create_app(
    service: Service, limits: Limits | None = None, loaded: Callable[[Exception | None], None] | None = None
) -> FastAPI:
    """The application over ``service``; loading starts with the server, ``loaded`` hears how it ended.

    ``loaded`` is called in the event loop with None or with the error.
    """
    limits = limits or Limits()
    batcher: Batcher | None = None

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []

        def on_loaded(error: Exception | None) -> None:
            nonlocal batcher
            if service.retriever is not None:
                batcher = Batcher(service.retriever, limits.max_pending)
                tasks.append(loop.create_task(batcher.run()))
            if loaded is not None:
                loaded(error)

        def from_thread(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: the server stopped while loading
                loop.call_soon_threadsafe(on_loaded, error)

        service.start_loading(from_thread)
        yield
        service.stop_loading()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Retrieval sidecar", lifespan=lifespan)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        phrase = http.HTTPStatus(error.status_code).phrase
        response = _error_response(
            ApiError(
                error.status_code,
                phrase.lower().replace(" ", "_"),
                f"{request.method} {request.url.path}: {error.detail}",
            )
        )
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        # The server logs the traceback; the answer only says what kind it was.
        return _error_response(ApiError(500, "internal_error", f"the server failed: {type(error).__name__}"))

    def not_ready() -> ApiError:
        progress = f"{service.phase}, {service.share:.0%} read"
        details = [{"phase": service.phase, "progress": round(service.share, 4)}]
        return ApiError(503, "not_ready", f"the corpus is being loaded ({progress})", details, retry_after=1)

    @app.get("/livez")
    async def livez() -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)

    @app.get("/readyz")
    async def readyz() -> Response:
        if batcher is None:
            raise not_ready()
        body = {
            "status": "ready",
            "retriever": service.config.retriever,
            "passages": len(service.rows),
            "untitled_passages": service.untitled,
            "topk": service.config.topk,
            "load_seconds": service.load_seconds,
        }
        return Response(orjson.dumps(body), media_type=_JSON)

    request_body = {"content": {_JSON: {"schema": RetrieveRequest.model_json_schema()}}, "required": True}

    @app.post("/retrieve", openapi_extra={"requestBody": request_body})
    async def retrieve(request: Request) -> Response:
        wanted = parse_request(await _read_body(request, limits.max_body_bytes), limits)
        if batcher is None:
            raise not_ready()
        topk = min(wanted.topk or service.config.topk, len(service.rows))
        if topk * len(wanted.queries) > limits.max_results:
            raise ApiError(
                422,
                "too_many_results",
                f"{len(wanted.queries)} queries x topk {topk} is more than {limits.max_results} results",
            )
        hits = await batcher.search(wanted.queries, topk) if wanted.queries else []
        return Response(encode_result(service.rows, hits, wanted.return_scores), media_type=_JSON)

    return app
