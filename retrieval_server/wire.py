"""The Search-R1 wire format: reading ``POST /retrieve`` bodies and writing their answers.

Request: ``{"queries": [str, ...], "topk": int | null, "return_scores": bool}``, or ``"query": str``
in place of ``queries`` (SkyRL's server). Answer: ``{"result": [[item, ...] per query]}`` where an item is
``{"document": row, "score": float}`` with ``return_scores`` and the bare row without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ApiError

M = TypeVar("M", bound=BaseModel)

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Limits:
    """What one request, and all waiting requests together, may ask for."""

    max_body_bytes: int = 32 * 1024 * 1024
    #: Search-R1 sends every active rollout's query in one request: 512 prompts x 5 samples in its scripts.
    max_queries: int = 8192
    #: Characters of a query that are searched; what follows is ignored, so one runaway query fails no batch.
    max_query_chars: int = 4096
    #: queries x topk of one request.
    max_results: int = 200_000
    #: Documents of one ``/rerank`` request.
    max_pairs: int = 2048
    #: Queries waiting in all requests together; beyond it the answer is 429. With none waiting, any request gets in.
    max_pending: int = 8192


class Rows(Protocol):
    """Corpus rows as JSON, by number."""

    def __getitem__(self, row: int) -> bytes: ...


class RetrieveRequest(BaseModel):
    """A request after validation: ``queries`` is always set, ``topk`` None or 0 stands for the server's default."""

    model_config = ConfigDict(extra="ignore")

    queries: list[str]
    topk: int | None = Field(default=None, ge=0)
    return_scores: bool = False

    @model_validator(mode="before")
    @classmethod
    def _single_query(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("query") is not None:
            if data.get("queries") is not None:
                raise ValueError("send either 'queries' or 'query', not both")
            return {**data, "queries": [data["query"]]}
        return data


class RerankRequest(BaseModel):
    """Search-R1's ``rerank_server.py``: each query with documents of its own, strings or objects with contents."""

    model_config = ConfigDict(extra="ignore")

    queries: list[str]
    documents: list[list[str | dict[str, Any]]]
    rerank_topk: int | None = Field(default=None, ge=0)
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_list_a_query(self) -> RerankRequest:
        if len(self.queries) != len(self.documents):
            raise ValueError(f"{len(self.queries)} queries, but documents for {len(self.documents)}")
        for documents in self.documents:
            for document in documents:
                if isinstance(document, dict) and not isinstance(document.get("contents"), str):
                    raise ValueError("a document is a string or an object with a string 'contents'")
        return self

    def texts(self) -> list[list[tuple[str, Any]]]:
        """Text and the document as it came, for each query."""
        return [
            [(_LONE_SURROGATES.sub("\ufffd", d if isinstance(d, str) else d["contents"]), d) for d in documents]
            for documents in self.documents
        ]


def _clean(value: Any, max_chars: int) -> Any:
    """A query as it will be searched: cut to ``max_chars``, halves of surrogate pairs replaced by U+FFFD."""
    return _LONE_SURROGATES.sub("\ufffd", value[:max_chars]) if isinstance(value, str) else value


@dataclass(frozen=True)
class Wanted:
    """A request as it is searched."""

    queries: list[str]
    topk: int | None
    return_scores: bool


def parse_request(body: bytes, limits: Limits) -> Wanted:
    """Read a ``/retrieve`` body; raises ApiError 400 for what is not JSON and 422 for what is not a request."""
    return _plain_request(body, limits) or _any_request(body, limits)


def _plain_request(body: bytes, limits: Limits) -> Wanted | None:
    """What nearly every client sends, read without a schema; None for all else, which the schema judges."""
    try:
        data = orjson.loads(body)
    except ValueError:
        return None
    if type(data) is not dict or data.get("query") is not None:
        return None
    queries, topk, scores = data.get("queries"), data.get("topk"), data.get("return_scores", False)
    if type(queries) is not list or len(queries) > limits.max_queries or type(scores) is not bool:
        return None
    if topk is not None and (type(topk) is not int or topk < 0):
        return None
    if any(type(query) is not str or len(query) > limits.max_query_chars for query in queries):
        return None
    return Wanted(queries, topk, scores)


def _any_request(body: bytes, limits: Limits) -> Wanted:
    data = _parse_json(body)
    if isinstance(data, dict):
        _check_queries(data, limits)
        data["query"] = _clean(data.get("query"), limits.max_query_chars)
    request = _validate(RetrieveRequest, data)
    return Wanted(request.queries, request.topk, request.return_scores)


def parse_rerank(body: bytes, limits: Limits) -> RerankRequest:
    """Read a ``/rerank`` body; raises as :func:`parse_request`."""
    if len(body) > limits.max_body_bytes:
        raise ApiError(413, "body_too_large", f"the request body is larger than {limits.max_body_bytes} bytes")
    data = _parse_json(body)
    if isinstance(data, dict):
        _check_queries(data, limits)
    wanted = _validate(RerankRequest, data)
    pairs = sum(map(len, wanted.documents))
    if pairs > limits.max_pairs:
        raise ApiError(422, "too_many_pairs", f"{pairs} documents to score, at most {limits.max_pairs} are")
    return wanted


def _parse_json(body: bytes) -> Any:
    try:
        # The standard parser on purpose: clients send lone surrogates as escapes, which strict parsers refuse.
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, "invalid_json", f"the request body is not JSON: {reason}") from error


def _check_queries(data: dict[str, Any], limits: Limits) -> None:
    if not isinstance(data.get("queries"), list):
        return
    if len(data["queries"]) > limits.max_queries:
        raise ApiError(
            422,
            "too_many_queries",
            f"{len(data['queries'])} queries in one request, at most {limits.max_queries} are answered",
        )
    data["queries"] = [_clean(query, limits.max_query_chars) for query in data["queries"]]


def _validate(model: type[M], data: Any) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        details = [{"loc": ["body", *f["loc"]], "msg": f["msg"], "type": f["type"]} for f in faults[:20]]
        first = details[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(422, "invalid_request", f"{where}: {first['msg']}", details) from error


def encode_result(rows: Rows, hits: Sequence[Sequence[tuple[int, float]]], return_scores: bool) -> bytes:
    """The answer's body. ``rows`` are the corpus rows as JSON, ``hits`` the (row, score) pairs of each query."""
    if return_scores:
        per_query = (
            b",".join(b'{"document":%b,"score":%b}' % (rows[row], orjson.dumps(score)) for row, score in found)
            for found in hits
        )
    else:
        per_query = (b",".join(rows[row] for row, _ in found) for found in hits)
    return b'{"result":[%b]}' % b",".join(b"[%b]" % items for items in per_query)


def encode_any(value: Any) -> bytes:
    """JSON of what a client sent, lone surrogates and all (as escapes, which is how they came)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode("ascii")


def encode_error(error: ApiError) -> bytes:
    """The one shape of every 4xx and 5xx answer.

    ``{"error": {"code", "message", "details"}, "detail": ...}``; ``detail`` repeats it for clients
    written for FastAPI's own errors (a list of faults for 422, else the message).
    """
    body = {
        "error": {"code": error.code, "message": error.message, "details": error.details},
        "detail": error.details or error.message,
    }
    return orjson.dumps(body)
