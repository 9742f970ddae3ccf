"""One worker thread that serves all waiting requests in batches, behind a bounded queue.

Scoring runs outside the event loop, so health checks answer while a large batch is scored, and in one
thread only, so that concurrent requests neither fight for the interpreter nor share an index.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .bm25 import Hit
from .errors import ApiError

if TYPE_CHECKING:
    from .telemetry import Telemetry


class Retriever(Protocol):
    """What the service needs of an index: hits (row, score), best first, for each query."""

    def __len__(self) -> int: ...

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]: ...


@dataclass(eq=False)
class _Job:
    queries: list[str]
    topk: int
    done: asyncio.Future[list[list[Hit]]]


class Batcher:
    """Collects the queries of concurrent requests and searches them together.

    ``max_batch`` is the number of queries at which a batch stops taking in further requests (a
    request is never split); ``max_pending`` bounds the queries that wait; ``max_wait`` seconds an idle index
    waits for more to come (while it searches, what arrives shares the next batch anyway).
    """

    def __init__(
        self,
        retriever: Retriever,
        max_pending: int,
        max_batch: int = 64,
        max_wait: float = 0.0,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._retriever = retriever
        self._max_pending = max_pending
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._telemetry = telemetry
        self._jobs: deque[_Job] = deque()
        self._pending = 0
        self._queries_per_second = 1000.0
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retriever")

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """Hits for each query; raises ApiError 429 with ``Retry-After`` when too much waits already."""
        if self._pending and self._pending + len(queries) > self._max_pending:
            wait = math.ceil(self._pending / self._queries_per_second)
            raise ApiError(
                429,
                "overloaded",
                f"{self._pending} queries wait already, at most {self._max_pending} may",
                retry_after=min(max(wait, 1), 30),
            )
        job = _Job(queries, topk, asyncio.get_running_loop().create_future())
        self._count(len(queries))
        self._jobs.append(job)
        self._arrived.set()
        try:
            return await job.done
        finally:
            self._count(-len(queries))

    def _count(self, queries: int) -> None:
        self._pending += queries
        if self._telemetry is not None:
            self._telemetry.queue.set(self._pending)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._arrived.wait()
                if self._max_wait and self._pending < self._max_batch:
                    await asyncio.sleep(self._max_wait)
                batch = self._next_batch()
                if not batch:
                    self._arrived.clear()
                    continue
                queries = [query for job in batch for query in job.queries]
                topk = [job.topk for job in batch for _ in job.queries]
                started = time.perf_counter()
                try:
                    hits = await loop.run_in_executor(self._thread, self._retriever.search_batch, queries, topk)
                except Exception as error:  # answered to every request of the batch; the worker lives on
                    for job in batch:
                        if not job.done.done():
                            job.done.set_exception(error)
                    continue
                took = max(time.perf_counter() - started, 1e-6)
                if self._telemetry is not None:
                    self._telemetry.batch_size.observe(len(queries))
                    self._telemetry.search_seconds.observe(took)
                    encoding = getattr(self._retriever, "encode_seconds", None)
                    if encoding is not None:
                        self._telemetry.encode_seconds.observe(encoding)
                self._queries_per_second += 0.1 * (len(queries) / took - self._queries_per_second)
                first = 0
                for job in batch:
                    if not job.done.done():
                        job.done.set_result(hits[first : first + len(job.queries)])
                    first += len(job.queries)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        size = 0
        while self._jobs and (not batch or size + len(self._jobs[0].queries) <= self._max_batch):
            job = self._jobs.popleft()
            if not job.done.done():
                batch.append(job)
                size += len(job.queries)
        return batch
