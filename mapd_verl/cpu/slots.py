"""Who owns which cache slot: active requests in front, finished ones kept behind them for reuse.

Decode reads slots ``0 .. active-1`` as one contiguous block, so a request that ends swaps places with
the last active one. A finished slot keeps its keys and values: the next turn of the same trajectory
extends it in place, and another rollout of the same prompt copies the part they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

#: A request waits one prefill for a batch-mate's keys only if that saves it this many tokens.
WORTH_WAITING = 16


@dataclass(frozen=True)
class Placement:
    """``slot`` holds the first ``cached`` tokens of the prompt already."""

    slot: int
    cached: int


class SlotTable:
    """Bookkeeping over ``cache [layer, k|v, S, L, Hk, D]``; copies rows of it when slots move.

    ``tokens[s, :length[s]]`` are the ids whose keys and values slot ``s`` holds (or will hold after the
    prefill under way, when ``pending[s]``).
    """

    def __init__(self, cache: torch.Tensor):
        self.cache = cache
        slots, capacity = cache.shape[2], cache.shape[3]
        self.slots, self.capacity, self.active = slots, capacity, 0
        self.tokens = np.zeros((slots, capacity), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.pending = np.zeros(slots, dtype=bool)
        self.stale = np.zeros(slots, dtype=bool)  # made by older weights: never reused
        self._used = np.zeros(slots, dtype=np.int64)
        self._clock = 0

    def shared_prefix(self, prompt: np.ndarray) -> np.ndarray:
        """For every slot, how many leading tokens of ``prompt`` it holds, ``[S]``."""
        width = min(len(prompt), self.capacity)
        if width == 0:
            return np.zeros(self.slots, dtype=np.int64)
        different = self.tokens[:, :width] != prompt[:width]
        first = np.where(different.any(axis=1), different.argmax(axis=1), width)
        return np.where(self.stale, 0, np.minimum(first, self.length))

    def place(self, prompt: Sequence[int]) -> Placement | None:
        """Make slot ``active`` hold as much of the prompt as any slot does, and count it as active and pending.

        At least one token is left to compute, since its logits are needed. Returns None, changing nothing,
        if waiting for the prefill under way would save ``WORTH_WAITING`` tokens or more. The caller makes
        sure that ``active < S``.
        """
        ids = np.asarray(prompt, dtype=np.int64)
        shared = self.shared_prefix(ids[:-1])
        ready = np.where(self.pending, 0, shared)
        source = int(ready.argmax())
        if self.pending.any() and int(shared.max()) - int(ready[source]) >= WORTH_WAITING:
            return None
        target, cached = self.active, int(ready[source])
        free = np.arange(self.active, self.slots)
        if cached and source >= self.active and (cached == self.length[source] or len(free) == 1):
            self._swap(source, target)  # it extends what that slot holds
        else:
            candidates = free[free != source] if cached else free
            victim = int(candidates[np.lexsort((self._used[candidates], self.length[candidates] > 0))[0]])
            self.length[victim] = 0
            self._swap(victim, target)
            # What the target itself held has moved to the emptied victim, and its rows are still here.
            if cached and source != target:
                self.cache[:, :, target, :cached] = self.cache[:, :, source, :cached]
            if cached:
                self._touch(victim if source == target else source)
        self.tokens[target, : len(ids)] = ids
        self.length[target] = len(ids)
        self.stale[target], self.pending[target] = False, True
        self._touch(target)
        self.active += 1
        return Placement(target, cached)

    def prefilled(self) -> None:
        """The prefill under way is done: its slots can be copied from."""
        self.pending[:] = False

    def append(self, tokens: np.ndarray) -> None:
        """Record the decode step's input tokens ``[active]``, whose keys and values were just written."""
        rows = np.arange(self.active)
        self.tokens[rows, self.length[: self.active]] = tokens
        self.length[: self.active] += 1

    def finish(self, slot: int) -> int:
        """Keep an active slot for reuse; returns the slot whose request now sits at ``slot``."""
        last = self.active - 1
        self._touch(slot)
        self._swap(slot, last)
        self.active = last
        return last

    def invalidate(self) -> None:
        """New weights: forget kept slots, and never copy from the active ones."""
        self.length[self.active :] = 0
        self.stale[: self.active] = True
        self.stale[self.active :] = False

    def clear(self) -> None:
        """Forget everything and zero the cache (after a failure that may have left NaNs in it)."""
        self.active = 0
        self.length[:] = 0
        self.pending[:] = False
        self.stale[:] = False
        self.cache.zero_()

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        cache, pair, length_a, length_b = self.cache, [a, b], int(self.length[a]), int(self.length[b])
        kept = cache[:, :, a, :length_a].clone() if length_a else None
        if length_b:
            cache[:, :, a, :length_b] = cache[:, :, b, :length_b]
        if kept is not None:
            cache[:, :, b, :length_a] = kept
        for column in (self.tokens, self.length, self.pending, self.stale, self._used):
            column[pair] = column[pair[::-1]]
