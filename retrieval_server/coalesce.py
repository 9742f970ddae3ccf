"""Joining searches that are made at the same time into one request.

Rollouts that decode in step also search in step. An HTTP request costs more than searching does, for both
ends, so what one event loop asks at once travels together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Coalescer(Generic[T]):
    """Belongs to one event loop. ``send(queries, topk)`` answers for each query, in order.

    With nothing in flight the queries of the running loop iteration are sent at its end, so that a lone
    search waits for nobody; otherwise they wait up to ``window`` seconds, or until ``max_batch`` are together.
    """

    def __init__(
        self, send: Callable[[Sequence[str], int], Awaitable[Sequence[T]]], window: float, max_batch: int
    ) -> None:
        self._send = send
        self._window = window
        self._max_batch = max_batch
        self._waiting: dict[int, list[tuple[str, asyncio.Future[T]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0

    async def submit(self, query: str, topk: int) -> T:
        """The answer to one query; what ``send`` raises is raised to each caller of its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiting = self._waiting.setdefault(topk, [])
        waiting.append((query, future))
        if len(waiting) >= self._max_batch:
            self._flush(topk)
        elif len(waiting) == 1:
            loop.call_later(self._window if self._in_flight else 0, self._flush, topk)
        return await future

    async def drain(self) -> None:
        """Wait until what was submitted is answered."""
        for topk in list(self._waiting):
            self._flush(topk)
        await asyncio.gather(*self._tasks)

    def _flush(self, topk: int) -> None:
        waiting = [(query, future) for query, future in self._waiting.pop(topk, []) if not future.done()]
        if waiting:
            task = asyncio.get_running_loop().create_task(self._run(waiting, topk))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, waiting: list[tuple[str, asyncio.Future[T]]], topk: int) -> None:
        futures = [future for _, future in waiting]
        self._in_flight += 1
        try:
            try:
                answers = await self._send([query for query, _ in waiting], topk)
            finally:
                # Before anyone hears the answer: who searches again at once then finds nothing in flight.
                self._in_flight -= 1
            for future, answer in zip(futures, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in futures:  # only when this task is cancelled: nobody may be left waiting
                future.cancel()
