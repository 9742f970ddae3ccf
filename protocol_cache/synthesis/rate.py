"""Keeping under a provider's rate limits ahead of time, instead of collecting its refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Requests are spaced this much wider than the limit says: a request that is delayed on its way arrives in a later
#: minute than it was sent in.
_MARGIN = 1.03


class RateLimit:
    """Spaces requests evenly, so that no window of a minute, wherever it begins, holds more than the limit.

    Args:
        rpm: requests a minute, or None.
        tpm: tokens a minute, or None; a request counts with its bound until it is known what it took.
        clock: seconds.
    """

    def __init__(
        self, rpm: float | None = None, tpm: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gap = 0.0 if rpm is None else 60.0 * _MARGIN / rpm
        self._per_token = 0.0 if tpm is None else 60.0 * _MARGIN / tpm
        self._clock = clock
        self._next_request = self._next_tokens = clock()

    async def wait(self, tokens: int) -> None:
        """Until a request of ``tokens`` may be sent; in the order of asking."""
        now = self._clock()
        at = max(now, self._next_request, self._next_tokens)
        self._next_request = at + self._gap
        self._next_tokens = max(now, self._next_tokens) + tokens * self._per_token
        if at > now:
            await asyncio.sleep(at - now)

    def correct(self, expected: int, used: int) -> None:
        """Give back what a request did not use of its bound."""
        self._next_tokens -= (expected - used) * self._per_token
