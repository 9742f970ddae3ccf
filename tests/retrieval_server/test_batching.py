"""The queue and the application around it, in process, with retrievers that are slow or broken on purpose."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from retrieval_server.app import Settings, create_app
from retrieval_server.batching import Batcher
from retrieval_server.bm25 import BM25Retriever, Hit
from retrieval_server.errors import ApiError
from retrieval_server.service import Service, ServiceConfig
from retrieval_server.wire import Limits


class GatedRetriever(BM25Retriever):
    """Searches only while ``gate`` is open, and notes the batches."""

    def __init__(self, contents: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        super().__init__(contents, k1, b)
        self.gate = threading.Event()
        self.batches: list[int] = []

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        assert self.gate.wait(10)
        self.batches.append(len(queries))
        if "boom" in queries:
            raise MemoryError("on purpose")
        return super().search_batch(queries, topk)


@asynccontextmanager
async def running(batcher: Batcher) -> AsyncIterator[None]:
    task = asyncio.create_task(batcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_waiting_requests_are_searched_together_and_answered_apart() -> None:
    retriever = GatedRetriever(["paris", "lyon", "rome"])
    batcher = Batcher(retriever, max_pending=100, max_batch=8)
    async with running(batcher):
        first = asyncio.create_task(batcher.search(["paris"], 1))
        await settle()  # the first is being searched, the others wait for it
        others = [asyncio.create_task(batcher.search([word, "none"], 2)) for word in ("lyon", "rome", "paris", "lyon")]
        large = asyncio.create_task(batcher.search(["rome"] * 20, 1))
        await settle()
        retriever.gate.set()
        assert [row for row, _ in (await first)[0]] == [0]
        assert [[[row for row, _ in found] for found in await other] for other in others] == [
            [[1], []],
            [[2], []],
            [[0], []],
            [[1], []],
        ]
        assert len(await large) == 20
    assert retriever.batches == [1, 8, 20]


async def test_a_full_queue_is_429_and_drains() -> None:
    retriever = GatedRetriever(["paris"])
    batcher = Batcher(retriever, max_pending=4)
    async with running(batcher):
        # Larger than the bound, but nothing waits: it must get in or it never could.
        large = asyncio.create_task(batcher.search(["paris"] * 6, 1))
        await settle()
        with pytest.raises(ApiError) as caught:
            await batcher.search(["paris"], 1)
        assert caught.value.status == 429
        assert caught.value.retry_after is not None and 1 <= caught.value.retry_after <= 30
        retriever.gate.set()
        assert len(await large) == 6
        assert len(await batcher.search(["paris"], 1)) == 1


async def test_an_abandoned_request_is_not_searched_and_frees_its_place() -> None:
    retriever = GatedRetriever(["paris"])
    batcher = Batcher(retriever, max_pending=3)
    async with running(batcher):
        first = asyncio.create_task(batcher.search(["paris"], 1))
        await settle()
        abandoned = asyncio.create_task(batcher.search(["paris", "paris"], 1))
        await settle()
        abandoned.cancel()
        await settle()
        second = asyncio.create_task(batcher.search(["paris", "paris"], 1))
        await settle()
        retriever.gate.set()
        await asyncio.gather(first, second)
    assert retriever.batches == [1, 2]


async def test_a_failing_search_is_told_to_its_callers_and_the_worker_lives_on() -> None:
    retriever = GatedRetriever(["paris"])
    retriever.gate.set()
    batcher = Batcher(retriever, max_pending=10)
    async with running(batcher):
        with pytest.raises(MemoryError):
            await batcher.search(["boom"], 1)
        assert len(await batcher.search(["paris"], 1)) == 1


@asynccontextmanager
async def app_client(service: Service, limits: Limits | None = None) -> AsyncIterator[httpx.AsyncClient]:
    ready = asyncio.Event()
    app = create_app(service, Settings(limits or Limits()), loaded=lambda error: ready.set())
    async with app.app.router.lifespan_context(app.app):
        await asyncio.wait_for(ready.wait(), 10)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


async def test_500_and_429_on_the_wire(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_server.service.BM25Retriever", GatedRetriever)
    service = Service(ServiceConfig(str(corpus)))
    async with app_client(service, Limits(max_pending=1)) as client:
        assert isinstance(service.retriever, GatedRetriever)
        waiting = asyncio.create_task(client.post("/retrieve", json={"queries": ["Paris"]}))
        await settle()
        same = asyncio.create_task(client.post("/retrieve", json={"queries": ["Paris"]}))
        refused = await client.post("/retrieve", json={"queries": ["Lyon"]})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert (await client.get("/livez")).status_code == 200
        service.retriever.gate.set()
        # An equal query joins the one in flight and takes no place in the queue.
        assert (await waiting).content == (await same).content and service.retriever.batches == [1]
        failed = await client.post("/retrieve", json={"queries": ["boom"]})
        assert failed.status_code == 500
        assert failed.json()["error"] == {
            "code": "internal_error",
            "message": "the server failed: MemoryError",
            "details": [],
        }


async def test_too_many_results(corpus: Path) -> None:
    async with app_client(Service(ServiceConfig(str(corpus))), Limits(max_results=10)) as client:
        refused = await client.post("/retrieve", json={"queries": ["city"] * 4, "topk": 3})
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "too_many_results"
        assert (await client.post("/retrieve", json={"queries": ["city"] * 3, "topk": 3})).status_code == 200


async def test_not_ready_says_how_far_it_is(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def slow(contents: Sequence[str], k1: float, b: float) -> BM25Retriever:
        assert hold.wait(10)
        return BM25Retriever(["paris"])

    monkeypatch.setattr("retrieval_server.service.BM25Retriever", slow)
    app = create_app(Service(ServiceConfig(str(corpus))))
    async with app.app.router.lifespan_context(app.app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await settle()
            for answer in (await client.get("/readyz"), await client.post("/retrieve", json={"queries": ["x"]})):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "not_ready"
                assert answer.json()["error"]["details"] == [{"phase": "indexing", "progress": 1.0}]
            assert (await client.get("/livez")).status_code == 200
            hold.set()
            for _ in range(200):
                if (await client.get("/readyz")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
            assert (await client.post("/retrieve", json={"queries": ["paris"]})).status_code == 200
