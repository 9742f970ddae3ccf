"""Ending with the parent process, so that a killed launcher leaves no server behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


async def _poll(parent: int, stop: Callable[[], None]) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(_POLL_SECONDS)
    stop()


def watch_parent(parent: int, stop: Callable[[], None]) -> asyncio.Task[None] | None:
    """Call ``stop`` once the process ``parent`` is no longer our parent. Call inside the event loop.

    On Linux the kernel tells us (prctl PR_SET_PDEATHSIG); elsewhere a returned task looks once a second.
    The kernel signals the end of the parent's *thread* that started us, so the signal alone proves
    nothing and the parent's id is compared again.
    """
    loop = asyncio.get_running_loop()
    if not sys.platform.startswith("linux"):
        return loop.create_task(_poll(parent, stop))

    def check() -> None:
        if os.getppid() != parent:
            stop()

    loop.add_signal_handler(signal.SIGUSR1, check)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0) != 0:
        return loop.create_task(_poll(parent, stop))
    check()  # the parent may have ended before the kernel was asked
    return None
