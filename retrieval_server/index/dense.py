"""Dense search with faiss over a built index."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bm25 import Hit
from .encoder import Encoder, Family
from .manifest import IndexFault

#: Candidates beyond ``topk`` that are scored again: what faiss' rounding could have put in another order.
_SPARE = 16


class Dense:
    """A backend over ``folder`` (``dense/`` of an index).

    faiss finds candidates (its products of a batch round otherwise than those of one query); their scores are then
    computed for each query alone, in float64, from the vectors as the index stores them. So a batch changes nothing.

    Args:
        settings: the manifest's.
        encoder: another place of the same model, if it has moved.
        gpu: search on all visible GPUs, the index sharded in fp16.
    """

    #: Of the last batch.
    encode_seconds = 0.0

    def __init__(self, folder: Path, settings: dict[str, Any], encoder: str | None = None, gpu: bool = False) -> None:
        import faiss

        self._settings = settings
        family = Family(*(settings[key] for key in ("query_prefix", "passage_prefix", "pooling", "normalize")))
        self._encoder = Encoder(
            encoder or settings["encoder"], family, settings["max_tokens"], "cuda" if gpu else "cpu"
        )
        if self._encoder.dimension != settings["dimension"]:
            raise IndexFault(
                f"index {folder.parent}: made of {settings['dimension']}-dimensional vectors, the encoder "
                f"{self._encoder.name} makes {self._encoder.dimension}"
            )
        probe = self._encoder.probe()
        if not np.allclose(probe, settings["probe"], atol=2e-3):
            raise IndexFault(
                f"index {folder.parent}: the encoder {self._encoder.name} is not the one that made it "
                f"(a fixed text's vector begins {probe[:2]}, then {settings['probe'][:2]})"
            )
        try:
            self._stored = faiss.read_index(str(folder / "index.faiss"))
        except RuntimeError as error:
            raise IndexFault(f"index {folder.parent}: faiss can't read it ({str(error).splitlines()[-1]})") from error
        if (self._stored.ntotal, self._stored.d) != (settings["passages"], settings["dimension"]):
            raise IndexFault(
                f"index {folder.parent}: holds {self._stored.ntotal} vectors of dimension {self._stored.d}, "
                f"the manifest says {settings['passages']} of {settings['dimension']}"
            )
        if hasattr(self._stored, "make_direct_map"):
            self._stored.make_direct_map()
        self._index = to_gpus(self._stored) if gpu else self._stored

    def __len__(self) -> int:
        return int(self._stored.ntotal)

    def info(self) -> dict[str, Any]:
        """What ``GET /info`` says of it."""
        keys = ("encoder", "dimension", "factory", "metric", "query_prefix", "passage_prefix", "pooling")
        return {"backend": "dense", **{key: self._settings[key] for key in keys}}

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        """See :class:`retrieval_server.index.open.Backend`; scores are inner products."""
        if not queries:
            return []
        pairs = list(zip(queries, topk, strict=True))
        unique = list(dict.fromkeys(queries))
        started = time.perf_counter()
        vectors = dict(zip(unique, self._encoder.queries(unique), strict=True))
        self.encode_seconds = time.perf_counter() - started
        done: dict[tuple[str, int], list[Hit]] = {}
        # An approximate index looks further when it is asked for more: each depth is a search of its own.
        for k in sorted(set(topk)):
            asked = list(dict.fromkeys(query for query, depth in pairs if depth == k))
            block = np.stack([vectors[query] for query in asked])
            _, found = self._index.search(block, min(len(self), k + _SPARE))
            for query, vector, candidates in zip(asked, block, found, strict=True):
                done[query, k] = self._rank(vector, candidates, k)
        return [done[pair] for pair in pairs]

    def _rank(self, vector: np.ndarray, candidates: np.ndarray, topk: int) -> list[Hit]:
        rows = np.sort(candidates[candidates >= 0])  # -1 where an approximate index found fewer
        if not len(rows) or topk < 1:
            return []
        stored = np.stack([self._stored.reconstruct(int(row)) for row in rows]).astype(np.float64)
        scores = (stored * vector.astype(np.float64)).sum(-1).astype(np.float32)
        best = np.argsort(-scores, kind="stable")[:topk]
        return [(int(rows[i]), float(scores[i])) for i in best]

    def close(self) -> None:
        """faiss frees with the object."""


def to_gpus(index: Any, faiss: Any = None) -> Any:
    """The index on all visible GPUs, sharded, fp16: what Search-R1's ``--faiss_gpu`` does. Needs ``faiss-gpu``."""
    if faiss is None:
        import faiss as installed

        faiss = installed
    if not hasattr(faiss, "GpuMultipleClonerOptions"):
        raise IndexFault("--gpu needs faiss with GPU support: pip install 'mapd-verl[retrieval-gpu]'")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
