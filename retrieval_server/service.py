"""The service's state: loads corpus and index in a thread while the port already answers, then serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .batching import Retriever
from .bm25 import BM25Retriever
from .corpus import Corpus, load_corpus


@dataclass(frozen=True)
class ServiceConfig:
    """What to serve: the corpus file, passages a query by default, the retriever's name and BM25's constants."""

    corpus: str
    topk: int = 3
    retriever: str = "bm25"
    k1: float = 0.9
    b: float = 0.4


def _bm25(corpus: Corpus, config: ServiceConfig) -> Retriever:
    return BM25Retriever(corpus.contents, k1=config.k1, b=config.b)


#: Name on the command line -> how it is built.
RETRIEVERS: dict[str, Callable[[Corpus, ServiceConfig], Retriever]] = {"bm25": _bm25}


class _Stopped(Exception):
    pass


class Service:
    """``phase`` goes starting -> reading -> indexing -> ready, or to failed; ``share`` (0..1) is the reading's."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.phase = "starting"
        self.share = 0.0
        self.load_seconds: float | None = None
        self.rows: list[bytes] = []
        self.untitled = 0
        self.retriever: Retriever | None = None
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
        """Read the corpus and build the index; raises CorpusError."""
        started = time.perf_counter()
        self.phase = "reading"
        corpus = load_corpus(self.config.corpus, self._progress)
        self.phase = "indexing"
        self.retriever = RETRIEVERS[self.config.retriever](corpus, self.config)
        self.rows, self.untitled = corpus.rows, corpus.untitled
        self.load_seconds = time.perf_counter() - started
        self.phase = "ready"

    def _progress(self, share: float) -> None:
        if self._stop.is_set():
            raise _Stopped
        self.share = share
