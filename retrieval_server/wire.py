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
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ApiError

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
    #: Queries waiting in all requests together; beyond it the answer is 429. With none waiting, any request gets in.
    max_pending: int = 8192


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


def _clean(value: Any, max_chars: int) -> Any:
    """A query as it will be searched: cut to ``max_chars``, halves of surrogate pairs replaced by U+FFFD."""
    return _LONE_SURROGATES.sub("\ufffd", value[:max_chars]) if isinstance(value, str) else value


def parse_request(body: bytes, limits: Limits) -> RetrieveRequest:
    """Read a request body; raises ApiError 400 for what is not JSON and 422 for what is not a request."""
    try:
        # The standard parser on purpose: clients send lone surrogates as escapes, which strict parsers refuse.
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, "invalid_json", f"the request body is not JSON: {reason}") from error
    if isinstance(data, dict):
        if isinstance(data.get("queries"), list):
            if len(data["queries"]) > limits.max_queries:
                raise ApiError(
                    422,
                    "too_many_queries",
                    f"{len(data['queries'])} queries in one request, at most {limits.max_queries} are answered",
                )
            data["queries"] = [_clean(query, limits.max_query_chars) for query in data["queries"]]
        data["query"] = _clean(data.get("query"), limits.max_query_chars)
    try:
        return RetrieveRequest.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        details = [{"loc": ["body", *f["loc"]], "msg": f["msg"], "type": f["type"]} for f in faults[:20]]
        first = details[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(422, "invalid_request", f"{where}: {first['msg']}", details) from error


def encode_result(rows: Sequence[bytes], hits: Sequence[Sequence[tuple[int, float]]], return_scores: bool) -> bytes:
    """The answer's body. ``rows`` are the corpus rows as JSON, ``hits`` the (row, score) pairs of each query."""
    if return_scores:
        per_query = (
            b",".join(b'{"document":%b,"score":%b}' % (rows[row], orjson.dumps(score)) for row, score in found)
            for found in hits
        )
    else:
        per_query = (b",".join(rows[row] for row, _ in found) for found in hits)
    return b'{"result":[%b]}' % b",".join(b"[%b]" % items for items in per_query)


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
