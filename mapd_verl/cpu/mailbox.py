"""A Ray actor that hands one set of weights from a sender to its receivers; imports neither verl nor torch."""

from __future__ import annotations

import asyncio
from typing import Any


class Mailbox:
    """Holds one set of weights until it is cleared; a Ray actor."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._weights: Any = None

    async def put(self, weights: list[Any]) -> None:
        """``weights`` is a one-element list with the object's reference: Ray would fetch a bare one."""
        self._weights = weights
        self._arrived.set()

    async def get(self) -> list[Any]:
        """Waits for :meth:`put`."""
        await self._arrived.wait()
        return self._weights

    async def clear(self) -> None:
        """Forget the weights; the next :meth:`get` waits for the next :meth:`put`."""
        self._arrived.clear()
        self._weights = None
