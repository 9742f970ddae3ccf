"""The last answers, by query and topk; equal queries in flight are searched once.

Rollouts of one question often begin with the same search (a GRPO group of eight asks it eight times), and epochs repeat
questions.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from .bm25 import Hit

if TYPE_CHECKING:
    from .telemetry import Telemetry

Search = Callable[[list[str], int], Coroutine[Any, Any, list[list[Hit]]]]


class QueryCache:
    """Belongs to one event loop.

    Args:
        search: answers what isn't here; its errors go to everyone who waits for them and are not kept.
        size: entries kept, least recently asked dropped first; 0 keeps none.
    """

    def __init__(self, search: Search, size: int, telemetry: Telemetry | None = None) -> None:
        self._search = search
        self._size = size
        self._telemetry = telemetry
        self._kept: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._flying: dict[tuple[str, int], asyncio.Future[list[Hit]]] = {}

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """Hits for each query, as ``search`` gives them."""
        found: dict[str, list[Hit]] = {}
        joined: dict[str, asyncio.Future[list[Hit]]] = {}
        asked: list[str] = []
        hits = 0
        for query in dict.fromkeys(queries):
            key = (query, topk)
            if key in self._kept:
                self._kept.move_to_end(key)
                found[query] = self._kept[key]
                hits += 1
            elif key in self._flying:
                joined[query] = self._flying[key]
            else:
                asked.append(query)
        if self._telemetry is not None:
            self._telemetry.queries.inc(len(queries))
            self._telemetry.cache_hits.inc(hits)
            self._telemetry.shared.inc(len(queries) - hits - len(asked))
        if asked:
            found |= await self._ask(asked, topk)
        for query, future in joined.items():
            # Shielded: the one who asked first may be cancelled, and so may we.
            found[query] = await asyncio.shield(future)
        return [found[query] for query in queries]

    async def _ask(self, queries: list[str], topk: int) -> dict[str, list[Hit]]:
        loop = asyncio.get_running_loop()
        futures = {query: loop.create_future() for query in queries}
        self._flying |= {(query, topk): future for query, future in futures.items()}
        task: asyncio.Task[list[list[Hit]]] = loop.create_task(self._search(queries, topk))

        def settle(done: asyncio.Task[list[list[Hit]]]) -> None:
            for place, (query, future) in enumerate(futures.items()):
                del self._flying[query, topk]
                if done.cancelled():
                    future.cancel()
                elif done.exception() is not None:
                    future.set_exception(done.exception())  # type: ignore[arg-type]  # it is not None
                    future.exception()  # nobody has to be waiting
                else:
                    future.set_result(done.result()[place])
                    self._keep((query, topk), done.result()[place])

        task.add_done_callback(settle)
        answers = await asyncio.shield(task)
        return dict(zip(queries, answers, strict=True))

    def _keep(self, key: tuple[str, int], hits: list[Hit]) -> None:
        if self._size:
            self._kept[key] = hits
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
