"""What ``GET /metrics`` tells Prometheus. One registry a process; no query, path or token in any label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Telemetry:
    """The service's metrics; each attribute is one."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = r = CollectorRegistry()
        self.requests = Counter("retrieval_requests", "Answers by route and status", ["route", "status"], registry=r)
        self.errors = Counter("retrieval_errors", "Error answers by code", ["code"], registry=r)
        self.request_seconds = Histogram(
            "retrieval_request_seconds", "From the body read to the answer made", registry=r, buckets=_SECONDS
        )
        self.queries = Counter("retrieval_queries", "Queries asked", registry=r)
        self.cache_hits = Counter("retrieval_cache_hits", "Queries answered from memory", registry=r)
        self.shared = Counter("retrieval_shared", "Queries that joined an equal one in flight", registry=r)
        self.queue = Gauge("retrieval_queue_queries", "Queries that wait or are being searched", registry=r)
        self.batch_size = Histogram("retrieval_batch_queries", "Queries a batch", registry=r, buckets=_SIZES)
        self.search_seconds = Histogram(
            "retrieval_search_seconds", "A batch in the index, encoding included", registry=r, buckets=_SECONDS
        )
        self.encode_seconds = Histogram(
            "retrieval_encode_seconds", "A batch in the encoder", registry=r, buckets=_SECONDS
        )
        self.rerank_seconds = Histogram(
            "retrieval_rerank_seconds", "A request in the cross-encoder", registry=r, buckets=_SECONDS
        )
        self.ready = Gauge("retrieval_ready", "1 once the index is loaded", registry=r)
        self.passages = Gauge("retrieval_passages", "Passages in the index", registry=r)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
