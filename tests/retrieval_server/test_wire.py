import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.errors import ApiError
from retrieval_server.wire import Limits, encode_error, encode_result, parse_request

LIMITS = Limits()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON, JSON, JSON)
def test_any_json_is_read_or_refused(queries: object, query: object, topk: object, scores: object) -> None:
    body = {"queries": queries, "query": query, "topk": topk, "return_scores": scores}
    try:
        wanted = parse_request(json.dumps(body).encode(), LIMITS)
    except ApiError as error:
        assert error.status == 422
        orjson.loads(encode_error(error))
    else:
        assert wanted.topk is None or wanted.topk >= 0
        for text in wanted.queries:
            text.encode()  # no lone surrogate is left


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        parse_request(body, LIMITS)
    except ApiError as error:
        assert error.status in (400, 422)
        orjson.loads(encode_error(error))


def test_nesting_and_huge_numbers() -> None:
    for body in (b"[" * 200_000, b'{"queries": [], "topk": ' + b"9" * 5000 + b"}", b'{"queries": [], "topk": 1e999}'):
        with pytest.raises(ApiError) as caught:
            parse_request(body, LIMITS)
        assert caught.value.status in (400, 422)


def test_queries_are_cut_and_counted() -> None:
    limits = Limits(max_queries=2, max_query_chars=5)
    assert parse_request(b'{"queries": ["abcdefgh", "x"]}', limits).queries == ["abcde", "x"]
    assert parse_request(b'{"query": "abcdefgh"}', limits).queries == ["abcde"]
    with pytest.raises(ApiError, match="3 queries in one request, at most 2"):
        parse_request(b'{"queries": ["a", "b", "c"]}', limits)


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_results(scores: bool, count: int) -> None:
    rows = [{"id": str(i), "contents": f'"T{i}"\nübel'} for i in range(3)]
    encoded = [orjson.dumps(row) for row in rows]
    hits = [[(2, 1.5), (0, 0.25)], [], [(1, 3.0)]][:count]
    result = orjson.loads(encode_result(encoded, hits, scores))["result"]
    if scores:
        assert result == [[{"document": rows[row], "score": score} for row, score in found] for found in hits]
    else:
        assert result == [[rows[row] for row, _ in found] for found in hits]
