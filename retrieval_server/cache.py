"""The last answers, by query and topk; equal queries in flight are searched once.

Rollouts of one question often begin with the same search (a GRPO group of eight asks it eight times), and epochs repeat
questions.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from .bm25 import Hit

if TYPE_CHECKING:
    from .telemetry import Telemetry

#: Starts a search; may raise at once.
Submit = Callable[[list[str], int], "asyncio.Future[list[list[Hit]]]"]


class QueryCache:
    """Belongs to one event loop.

    Args:
        submit: answers what isn't here; its errors go to everyone who waits for them and are not kept.
        size: entries kept, least recently asked dropped first; 0 keeps none.
    """

    def __init__(self, submit: Submit, size: int, telemetry: Telemetry | None = None) -> None:
        self._submit = submit
        self._size = size
        self._telemetry = telemetry
        self._kept: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        #: Query and topk -> the search that is under way, and the query's place in it.
        self._flying: dict[tuple[str, int], tuple[asyncio.Future[list[list[Hit]]], int]] = {}

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """Hits for each query, as ``submit`` gives them."""
        found: dict[str, list[Hit]] = {}
        awaited: dict[str, tuple[asyncio.Future[list[list[Hit]]], int]] = {}
        asked: list[str] = []
        for query in dict.fromkeys(queries):
            key = (query, topk)
            hits = self._kept.get(key)
            if hits is not None:
                self._kept.move_to_end(key)
                found[query] = hits
            elif key in self._flying:
                awaited[query] = self._flying[key]
            else:
                asked.append(query)
        if self._telemetry is not None:
            self._telemetry.queries.inc(len(queries))
            self._telemetry.cache_hits.inc(len(found))
            self._telemetry.shared.inc(len(queries) - len(found) - len(asked))
        if asked:
            awaited |= self._ask(asked, topk)
        for query, (future, place) in awaited.items():
            # Shielded: others wait for the same search, and whoever began it may be cancelled.
            found[query] = (await asyncio.shield(future))[place]
        return [found[query] for query in queries]

    def _ask(self, queries: list[str], topk: int) -> dict[str, tuple[asyncio.Future[list[list[Hit]]], int]]:
        future = self._submit(queries, topk)
        flights = {query: (future, place) for place, query in enumerate(queries)}
        for query, flight in flights.items():
            self._flying[query, topk] = flight

        def landed(done: asyncio.Future[list[list[Hit]]]) -> None:
            for query in queries:
                del self._flying[query, topk]
            # exception() also marks it as seen: nobody has to be waiting.
            if not done.cancelled() and done.exception() is None and self._size:
                for query, hits in zip(queries, done.result(), strict=True):
                    self._kept[query, topk] = hits
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)

        future.add_done_callback(landed)
        return flights
