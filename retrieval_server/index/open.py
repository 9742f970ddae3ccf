"""Opening a built index for serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..bm25 import Hit
from . import memory
from .manifest import IndexFault, Manifest, check
from .rows import MappedRows


class Backend(Protocol):
    """What serves searches. ``search_batch`` gives each query what it would get alone, bit for bit."""

    def __len__(self) -> int: ...
    def info(self) -> dict[str, Any]: ...
    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]: ...
    def close(self) -> None: ...


class Index:
    """A built index: its rows and the backends asked for.

    Raises:
        IndexFault: anything disagrees with the manifest, the backend isn't there, or memory won't do.
    """

    def __init__(
        self,
        folder: str | Path,
        backend: str | None = None,
        thorough: bool = False,
        encoder: str | None = None,
        gpu: bool = False,
    ) -> None:
        folder = Path(folder)
        self.folder = folder
        self.manifest = Manifest.read(folder)
        check(folder, self.manifest, thorough)
        names = list(self.manifest.backends)
        name = backend or ("hybrid" if len(names) > 1 else names[0])
        wanted = ["bm25", "dense"] if name == "hybrid" else [name]
        for part in wanted:
            if part not in names:
                raise IndexFault(f"index {folder}: holds {', '.join(names)}, not {part}")
        if "dense" in wanted:  # faiss reads it into this machine's memory first, whatever searches it
            memory.require(self.manifest, folder)
        starts = np.load(folder / "starts.npy", mmap_mode="r")
        if len(starts) != self.manifest.corpus["rows"]:
            raise IndexFault(
                f"index {folder}: {len(starts)} rows mapped, the manifest says {self.manifest.corpus['rows']}"
            )
        lengths = np.load(folder / "lengths.npy", mmap_mode="r")
        self.rows = MappedRows(self.manifest.corpus_path(folder), starts, lengths)
        self.name = name
        backends = [self._open(part, encoder, gpu) for part in wanted]
        if name == "hybrid":
            from .hybrid import Hybrid

            self.backend: Backend = Hybrid(backends)
        else:
            self.backend = backends[0]

    def _open(self, name: str, encoder: str | None, gpu: bool) -> Backend:
        settings = self.manifest.backends[name]
        if name == "bm25":
            from .bm25 import IndexedBM25

            return IndexedBM25(self.folder / "bm25", settings["passages"])
        from .dense import Dense

        return Dense(self.folder / "dense", settings, encoder, gpu)

    def info(self) -> dict[str, Any]:
        """What ``GET /info`` says."""
        corpus = {key: self.manifest.corpus[key] for key in ("rows", "untitled", "bytes", "sha256")}
        return {"corpus": corpus, "versions": self.manifest.versions, **self.backend.info()}

    def close(self) -> None:
        """Give maps and threads back."""
        self.backend.close()
        self.rows.close()
