"""The last answers, by query and topk; equal queries in flight are searched once.

Rollouts of one question often begin with the same search (a GRPO group of eight asks it eight times), and epochs repeat
questions.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bm25 import Hit

if TYPE_CHECKING:
    from .telemetry import Telemetry

#: Answers with more passages than this aren't kept: the number of entries is to bound the memory.
MOST_KEPT = 100

#: Starts a search; may raise at once.
Submit = Callable[[list[str], int], "asyncio.Future[list[list[Hit]]]"]


@dataclass(eq=False)
class _Flight:
    """A search under way, and how many wait for it: with nobody left (deadlines, lost clients) it is called off."""

    future: asyncio.Future[list[list[Hit]]]
    waiting: int = 0

    async def land(self) -> list[list[Hit]]:
        self.waiting += 1
        try:
            # Shielded: others wait for the same search, and whoever began it may be cancelled.
            return await asyncio.shield(self.future)
        finally:
            self.waiting -= 1
            if not self.waiting and not self.future.done():
                self.future.cancel()


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
        self._flying: dict[tuple[str, int], tuple[_Flight, int]] = {}

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """Hits for each query, as ``submit`` gives them."""
        found: dict[str, list[Hit]] = {}
        awaited: dict[str, tuple[_Flight, int]] = {}
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
        flights = dict.fromkeys(flight for flight, _ in awaited.values())
        if flights:
            if len(flights) == 1:
                results = [await next(iter(flights)).land()]
            else:  # all at once: each must know that it is waited for before any of them ends
                results = await asyncio.gather(*(flight.land() for flight in flights))
            landed = dict(zip(flights, results, strict=True))
            found |= {query: landed[flight][place] for query, (flight, place) in awaited.items()}
        return [found[query] for query in queries]

    def _ask(self, queries: list[str], topk: int) -> dict[str, tuple[_Flight, int]]:
        future = self._submit(queries, topk)
        one = _Flight(future)
        flights = {query: (one, place) for place, query in enumerate(queries)}
        for query, flight in flights.items():
            self._flying[query, topk] = flight

        def landed(done: asyncio.Future[list[list[Hit]]]) -> None:
            for query in queries:
                del self._flying[query, topk]
            # exception() also marks it as seen: nobody has to be waiting.
            if not done.cancelled() and done.exception() is None and self._size and topk <= MOST_KEPT:
                for query, hits in zip(queries, done.result(), strict=True):
                    self._kept[query, topk] = hits
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)

        future.add_done_callback(landed)
        return flights
