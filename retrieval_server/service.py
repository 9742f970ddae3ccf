"""The service's state: loads corpus and index in a thread while the port already answers, then serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .batching import Retriever
from .bm25 import BM25Retriever
from .corpus import load_corpus
from .index.manifest import versions

if TYPE_CHECKING:
    from .index.rows import MappedRows
    from .rerank import CrossEncoder


@dataclass(frozen=True)
class ServiceConfig:
    """What to serve: a corpus, indexed in memory at the start, or a built ``index``.

    Attributes:
        corpus, k1, b: of the first kind; BM25.
        topk: passages a query by default.
        index, backend, thorough, encoder, gpu: of the second; see :class:`retrieval_server.index.open.Index`.
        reranker: a cross-encoder for ``/rerank``, or None.
    """

    corpus: str | None = None
    topk: int = 3
    k1: float = 0.9
    b: float = 0.4
    index: str | None = None
    backend: str | None = None
    thorough: bool = False
    encoder: str | None = None
    gpu: bool = False
    reranker: str | None = None

    @property
    def what(self) -> str:
        """The file or folder that is served."""
        return self.index or self.corpus or ""


class _Stopped(Exception):
    pass


class Service:
    """``phase`` goes starting -> reading -> indexing -> ready, or to failed; ``share`` (0..1) is the reading's."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.phase = "starting"
        self.share = 0.0
        self.load_seconds: float | None = None
        self.rows: Sequence[bytes] | MappedRows = []
        self.untitled = 0
        self.retriever: Retriever | None = None
        self.reranker: CrossEncoder | None = None
        self.name = config.backend or "bm25"
        self._info: dict[str, Any] = {}
        self._stop = threading.Event()

    def start_loading(self, finished: Callable[[Exception | None], None]) -> None:
        """Load in a daemon thread, which holds up no exit; then call ``finished`` there with the error or None."""

        def work() -> None:
            try:
                self.load()
            except _Stopped:
                return
            except Exception as error:
                self.phase = "failed"
                finished(error)
            else:
                finished(None)

        threading.Thread(target=work, name="corpus-loader", daemon=True).start()

    def stop_loading(self) -> None:
        """Ask a running load to end at its next report."""
        self._stop.set()

    def load(self) -> None:
        """Read or map what is to be served; raises StartupError."""
        started = time.perf_counter()
        if self.config.reranker is not None:
            from .rerank import CrossEncoder

            self.reranker = CrossEncoder(self.config.reranker, device="cuda" if self.config.gpu else "cpu")
        if self.config.index is not None:
            self._open_index(self.config.index)
        else:
            self._index_corpus(self.config.corpus or "")
        self.load_seconds = time.perf_counter() - started
        self.phase = "ready"

    def _open_index(self, folder: str) -> None:
        from .index.open import Index

        self.phase = "mapping"
        config = self.config
        index = Index(folder, config.backend, config.thorough, config.encoder, config.gpu)
        self.rows, self.untitled, self.name = index.rows, index.manifest.corpus["untitled"], index.name
        self._info = index.info()
        self.retriever = index.backend

    def _index_corpus(self, path: str) -> None:
        self.phase = "reading"
        corpus = load_corpus(path, self._progress)
        self.phase = "indexing"
        retriever = BM25Retriever(corpus.contents, k1=self.config.k1, b=self.config.b)
        self.rows, self.untitled = corpus.rows, corpus.untitled
        about = {"rows": len(corpus), "untitled": corpus.untitled, "sha256": corpus.sha256}
        self._info = {"corpus": about, "backend": "bm25", "k1": self.config.k1, "b": self.config.b}
        self.retriever = retriever

    def info(self) -> dict[str, Any]:
        """What ``GET /info`` says of what is served."""
        reranker = None if self.reranker is None else self.reranker.name
        return {**self._info, "reranker": reranker, "versions": {**versions(), **self._info.get("versions", {})}}

    def _progress(self, share: float) -> None:
        if self._stop.is_set():
            raise _Stopped
        self.share = share
