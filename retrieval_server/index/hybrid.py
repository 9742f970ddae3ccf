"""Two rankings as one: reciprocal rank fusion (Cormack, Clarke and Büttcher 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bm25 import Hit

#: The paper's constant.
K = 60
#: Each backend is asked for this many times the passages wanted, and at least ``DEPTH``.
FACTOR, DEPTH = 4, 50


class Hybrid:
    """``score = sum over backends of 1 / (60 + rank)``, equal scores in row order."""

    def __init__(self, backends: Sequence[Any]) -> None:
        self._backends = list(backends)

    def __len__(self) -> int:
        return len(self._backends[0])

    def info(self) -> dict[str, Any]:
        """What ``GET /info`` says of it."""
        parts = {info.pop("backend"): info for info in (backend.info() for backend in self._backends)}
        return {"backend": "hybrid", "parts": parts}

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        """See :class:`retrieval_server.index.open.Backend`."""
        depth = [min(len(self), max(DEPTH, FACTOR * k)) for k in topk]
        rankings = [backend.search_batch(list(queries), depth) for backend in self._backends]
        return [fuse([ranking[i] for ranking in rankings], k) for i, k in enumerate(topk)]

    def close(self) -> None:
        """Closes both."""
        for backend in self._backends:
            backend.close()


def fuse(rankings: Sequence[Sequence[Hit]], topk: int) -> list[Hit]:
    """The ``topk`` best rows by summed reciprocal rank."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (K + rank)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:topk]
