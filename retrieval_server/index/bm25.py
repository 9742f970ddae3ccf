"""BM25 from a built index: mapped files, compiled search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bm25 import Hit
from ..tokenizer import tokenize
from .vocabulary import Vocabulary


class IndexedBM25:
    """A backend over ``folder`` (``bm25/`` of an index). The first search compiles, once per machine (seconds)."""

    def __init__(self, folder: Path, passages: int) -> None:
        from .kernel import top_k

        self._top_k = top_k
        self._size = passages
        self._vocabulary = Vocabulary(folder)
        self._indptr, self._rows, self._impacts, self._maxima = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "rows", "impacts", "maxima")
        )
        self.search("", 1)
        self._search(np.zeros(0, np.int64), np.zeros(0, np.float32), 1)

    def __len__(self) -> int:
        return self._size

    def info(self) -> dict[str, Any]:
        """What ``GET /info`` says of it."""
        return {"backend": "bm25", "tokens": len(self._vocabulary), "postings": len(self._rows)}

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        """``search`` for each query and its own ``topk``; equal pairs are searched once."""
        done: dict[tuple[str, int], list[Hit]] = {}
        for pair in zip(queries, topk, strict=True):
            if pair not in done:
                done[pair] = self.search(*pair)
        return [done[pair] for pair in zip(queries, topk, strict=True)]

    def search(self, query: str, topk: int) -> list[Hit]:
        """As :meth:`retrieval_server.bm25.BM25Retriever.search`: same passages, same order."""
        counts = Counter(number for token in tokenize(query) if (number := self._vocabulary.find(token)) >= 0)
        if not counts or topk < 1:
            return []
        terms = np.fromiter(counts.keys(), np.int64, len(counts))
        return self._search(terms, np.fromiter(counts.values(), np.float32, len(counts)), min(topk, self._size))

    def _search(self, terms: np.ndarray, weights: np.ndarray, topk: int) -> list[Hit]:
        rows, scores = np.empty(topk, np.int64), np.empty(topk, np.float32)
        n = self._top_k(self._indptr, self._rows, self._impacts, self._maxima, terms, weights, topk, rows, scores)
        return list(zip(rows[:n].tolist(), scores[:n].tolist(), strict=True))

    def close(self) -> None:
        """The maps go with the object."""
