"""BM25 over a corpus held in memory, on bm25s (Lu 2024, arXiv:2407.03618; Lucene's variant of BM25).

The numpy backend is chosen on purpose: for some ten thousand passages a query takes well under a
millisecond, while the numba backend spends seconds of JIT compilation on its first query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .tokenizer import tokenize

#: One hit: the passage's row in the corpus and its score.
Hit = tuple[int, float]


class BM25Retriever:
    """Ranks passages by BM25; built once, then only read. Default k1 and b are Anserini's, as in Search-R1."""

    def __init__(self, contents: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        import bm25s

        self._size = len(contents)
        self._vocabulary: dict[str, int] = {}
        vocabulary = self._vocabulary
        token_ids = [[vocabulary.setdefault(t, len(vocabulary)) for t in tokenize(text)] for text in contents]
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        if vocabulary:
            self._index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)

    def __len__(self) -> int:
        return self._size

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        """``search`` for each query and its own ``topk``; equal pairs (a rollout group asks them) are scored once."""
        done: dict[tuple[str, int], list[Hit]] = {}
        for pair in zip(queries, topk, strict=True):
            if pair not in done:
                done[pair] = self.search(*pair)
        return [done[pair] for pair in zip(queries, topk, strict=True)]

    def search(self, query: str, topk: int) -> list[Hit]:
        """The best ``topk`` hits, best first, equal scores in corpus order.

        Only passages that share a token with the query are hits, so the list may be shorter than
        ``topk``, and is empty for a query without any known token. Scores are positive.
        """
        ids = [self._vocabulary[t] for t in tokenize(query) if t in self._vocabulary]
        if not ids or topk < 1:
            return []
        scores = self._index.get_scores_from_ids(ids)
        best = _best_rows(scores, topk)
        return [(int(row), float(scores[row])) for row in best]


def _best_rows(scores: np.ndarray, topk: int) -> np.ndarray:
    """Rows of the ``topk`` highest positive scores ``[N]``, best first, ties by row: the same on every machine."""
    if topk < len(scores):
        threshold = np.partition(scores, -topk)[-topk]
        rows = np.flatnonzero((scores >= threshold) & (scores > 0))
    else:
        rows = np.flatnonzero(scores > 0)
    return rows[np.argsort(-scores[rows], kind="stable")][:topk]
