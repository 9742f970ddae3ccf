"""The HTTP application: ``/retrieve``, ``/rerank``, ``/info``, ``/livez``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import http
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from .batching import Batcher
from .cache import QueryCache
from .errors import ApiError
from .front import Front
from .service import Service
from .telemetry import Telemetry
from .wire import (
    Limits,
    RerankRequest,
    RetrieveRequest,
    encode_any,
    encode_error,
    encode_result,
    parse_request,
    parse_rerank,
)

_JSON = "application/json"


@dataclass(frozen=True)
class Settings:
    """How the service answers.

    Attributes:
        limits: what requests may ask for.
        token: bearer token, or None.
        cache_size: answers kept, by query and topk; 0 keeps none.
        max_wait: seconds that a search may wait for others to share its batch while the index is idle.
        max_batch: queries a batch.
        deadline: seconds after which a request is answered 504; ``X-Request-Timeout`` may ask for less.
    """

    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    cache_size: int = 65536
    max_wait: float = 0.0
    max_batch: int = 64
    deadline: float = 30.0


class Searches:
    """``POST /retrieve`` once the index is there."""

    def __init__(self, service: Service, settings: Settings, telemetry: Telemetry) -> None:
        self._service, self._settings, self._telemetry = service, settings, telemetry
        self._cache: QueryCache | None = None

    @property
    def ready(self) -> bool:
        """Whether searches are answered."""
        return self._cache is not None

    def open(self, batcher: Batcher) -> None:
        """Answer from now on."""
        self._cache = QueryCache(batcher.submit, self._settings.cache_size, self._telemetry)
        self._telemetry.ready.set(1)
        self._telemetry.passages.set(len(self._service.rows))

    async def retrieve(self, body: bytes, seconds: float | None) -> bytes:
        """The answer's body; raises ApiError."""
        started = time.perf_counter()
        limits = self._settings.limits
        wanted = parse_request(body, limits)
        if self._cache is None:
            raise self.not_ready()
        topk = min(wanted.topk or self._service.config.topk, len(self._service.rows))
        if topk * len(wanted.queries) > limits.max_results:
            raise ApiError(
                422,
                "too_many_results",
                f"{len(wanted.queries)} queries x topk {topk} is more than {limits.max_results} results",
            )
        allowed = min(seconds or self._settings.deadline, self._settings.deadline)
        try:
            async with asyncio.timeout(allowed):
                hits = await self._cache.search(wanted.queries, topk) if wanted.queries else []
        except TimeoutError:
            raise ApiError(504, "deadline_exceeded", f"no answer within {allowed:g} s", retry_after=1) from None
        answer = encode_result(self._service.rows, hits, wanted.return_scores)
        self._telemetry.request_seconds.observe(time.perf_counter() - started)
        return answer

    def not_ready(self) -> ApiError:
        """503 with how far the loading has come."""
        service = self._service
        progress = f"{service.phase}, {service.share:.0%} read"
        details = [{"phase": service.phase, "progress": round(service.share, 4)}]
        return ApiError(503, "not_ready", f"the index is being loaded ({progress})", details, retry_after=1)


def create_app(
    service: Service,
    settings: Settings | None = None,
    loaded: Callable[[Exception | None], None] | None = None,
) -> Front:
    """The application over ``service``; loading starts with the server, ``loaded`` hears how it ended.

    ``loaded`` is called in the event loop with None or with the error.
    """
    settings = settings or Settings()
    telemetry = Telemetry()
    searches = Searches(service, settings, telemetry)
    reranking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reranker")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []

        def on_loaded(error: Exception | None) -> None:
            if service.retriever is not None:
                batcher = Batcher(
                    service.retriever,
                    settings.limits.max_pending,
                    settings.max_batch,
                    settings.max_wait,
                    telemetry,
                )
                tasks.append(loop.create_task(batcher.run()))
                searches.open(batcher)
            if loaded is not None:
                loaded(error)

        def from_thread(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: the server stopped while loading
                loop.call_soon_threadsafe(on_loaded, error)

        service.start_loading(from_thread)
        yield
        service.stop_loading()
        reranking.shutdown(wait=False, cancel_futures=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Retrieval sidecar", lifespan=lifespan)

    def respond(error: ApiError) -> Response:
        telemetry.errors.labels(error.code).inc()
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return Response(encode_error(error), error.status, headers, _JSON)

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        phrase = http.HTTPStatus(error.status_code).phrase
        where = f"{request.method} {request.url.path}: {error.detail}"
        response = respond(ApiError(error.status_code, phrase.lower().replace(" ", "_"), where))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        # The server logs the traceback; the answer only says what kind it was.
        return respond(ApiError(500, "internal_error", f"the server failed: {type(error).__name__}"))

    @app.get("/livez")
    async def livez() -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)

    @app.get("/readyz")
    async def readyz() -> Response:
        if not searches.ready:
            raise searches.not_ready()
        body = {
            "status": "ready",
            "retriever": service.name,
            "passages": len(service.rows),
            "untitled_passages": service.untitled,
            "topk": service.config.topk,
            "load_seconds": service.load_seconds,
        }
        return Response(orjson.dumps(body), media_type=_JSON)

    @app.get("/info")
    async def info() -> Response:
        if not searches.ready:
            raise searches.not_ready()
        return Response(orjson.dumps({"topk": service.config.topk, **service.info()}), media_type=_JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(telemetry.text(), headers={"Content-Type": telemetry.content_type})

    @app.post("/retrieve", openapi_extra=_body_of(RetrieveRequest))
    async def retrieve(request: Request) -> Response:
        # Named here for OpenAPI and for applications without the front; the front answers before this does.
        return Response(await searches.retrieve(await request.body(), None), media_type=_JSON)

    @app.post("/rerank", openapi_extra=_body_of(RerankRequest))
    async def rerank(request: Request) -> Response:
        wanted = parse_rerank(await request.body(), settings.limits)
        if service.reranker is None:
            raise ApiError(501, "no_reranker", "this service was started without --reranker")
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        ranked = [
            await loop.run_in_executor(reranking, service.reranker.rank, query, [text for text, _ in documents])
            for query, documents in zip(wanted.queries, wanted.texts(), strict=True)
        ]
        telemetry.rerank_seconds.observe(time.perf_counter() - started)
        result = [
            [
                {"document": documents[place][1], "score": score} if wanted.return_scores else documents[place][1]
                for place, score in found[: wanted.rerank_topk or None]
            ]
            for found, documents in zip(ranked, wanted.texts(), strict=True)
        ]
        return Response(encode_any({"result": result}), media_type=_JSON)

    fine = telemetry.requests.labels("/retrieve", "200")

    def answered(route: str, status: int) -> None:
        (fine if status == 200 else telemetry.requests.labels(route, str(status))).inc()

    async def short_way(body: bytes, seconds: float | None) -> bytes:
        try:
            return await searches.retrieve(body, seconds)
        except ApiError as error:
            telemetry.errors.labels(error.code).inc()
            raise
        except Exception as error:
            telemetry.errors.labels("internal_error").inc()
            from .errors import log_fault

            log_fault(error)
            raise ApiError(500, "internal_error", f"the server failed: {type(error).__name__}") from error

    return Front(app, short_way, settings.limits.max_body_bytes, settings.token, answered)


def _body_of(model: type[RetrieveRequest] | type[RerankRequest]) -> dict[str, object]:
    return {"requestBody": {"content": {_JSON: {"schema": model.model_json_schema()}}, "required": True}}
