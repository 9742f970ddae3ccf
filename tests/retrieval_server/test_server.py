"""What a client meets on the wire, asked of a real server process."""

import json
import threading

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def ask(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/retrieve", json=body)


def titles(result: list[dict[str, dict[str, str]]]) -> list[str]:
    """What Search-R1's ``_passages2string`` reads."""
    return [item["document"]["contents"].split("\n")[0] for item in result]


def assert_error(answer: httpx.Response, status: int, code: str) -> dict[str, object]:
    """The one error shape."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error", "detail"}
    assert set(body["error"]) == {"code", "message", "details"}
    assert body["error"]["code"] == code
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert body["detail"] == (body["error"]["details"] or body["error"]["message"])
    return body["error"]


def test_search_r1_client(http: httpx.Client, passages: list[dict[str, object]]) -> None:
    """``generation.py`` posts every active rollout's query at once, with scores, and reads document.contents."""
    queries = ["population of São Paulo", "What is the time zone of Paris?"]
    answer = ask(http, queries=queries, topk=3, return_scores=True)
    assert answer.status_code == 200
    result = answer.json()["result"]
    assert [titles(found)[0] for found in result] == ['"São Paulo"', '"Paris"']
    for found in result:
        assert len(found) == 3
        assert [item["score"] for item in found] == sorted((item["score"] for item in found), reverse=True)
        for item in found:
            assert set(item) == {"document", "score"}
            assert item["document"] in passages  # whole rows, with fields of the user's own


@pytest.mark.parametrize("body", [{"return_scores": False}, {}])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_without_scores_the_documents_come_bare(
    http: httpx.Client, passages: list[dict[str, object]], body: dict[str, object], count: int
) -> None:
    queries = ["Paris", "Łódź", "nothing-matches-this", "Reading", "Of"][:count]
    bare = ask(http, queries=queries, topk=2, **body).json()["result"]
    scored = ask(http, queries=queries, topk=2, return_scores=True).json()["result"]
    assert len(bare) == count
    assert bare == [[item["document"] for item in found] for found in scored]
    assert all(row in passages for found in bare for row in found)


@pytest.mark.parametrize("scores", [True, False])
def test_no_queries(http: httpx.Client, scores: bool) -> None:
    answer = ask(http, queries=[], return_scores=scores)
    assert (answer.status_code, answer.content) == (200, b'{"result":[]}')


@pytest.mark.parametrize("topk", [None, 0, "absent"])
def test_default_topk(http: httpx.Client, topk: object) -> None:
    body = {} if topk == "absent" else {"topk": topk}
    assert len(ask(http, queries=["the city of Paris"], **body).json()["result"][0]) == 3


@pytest.mark.parametrize(("topk", "count"), [(1, 1), ("2", 2), (2.0, 2), (10**30, 10)])
def test_topk(http: httpx.Client, topk: object, count: int) -> None:
    """Ten passages hold "city": more than there are can't come, and none comes twice."""
    found = ask(http, queries=["city"], topk=topk, return_scores=True).json()["result"][0]
    ids = [item["document"]["id"] for item in found]
    assert len(ids) == len(set(ids)) == count
    assert all(item["score"] > 0 for item in found)


@pytest.mark.parametrize(
    "body",
    [
        {"queries": ["x"], "topk": -1},
        {"queries": ["x"], "topk": 2.5},
        {"queries": ["x"], "topk": "two"},
        {"queries": ["x"], "topk": [3]},
        {"queries": "a string"},
        {"queries": [None]},
        {"queries": ["x", 7]},
        {"queries": None},
        {"queries": {"0": "x"}},
        {"queries": ["x"], "return_scores": None},
        {"queries": ["x"], "return_scores": "perhaps"},
        {"queries": ["x"], "query": "x"},
        {"query": ["x"]},
        {"query": 7},
        {},
        [],
        "queries",
        None,
    ],
)
def test_a_wrong_request_is_422(http: httpx.Client, body: object) -> None:
    error = assert_error(http.post("/retrieve", content=json.dumps(body)), 422, "invalid_request")
    for fault in error["details"]:  # type: ignore[attr-defined]  # JSON
        assert set(fault) == {"loc", "msg", "type"}


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    assert ask(http, queries=["Paris"], model="e5", index={"nested": []}).status_code == 200


def test_the_content_type_does_not_matter(http: httpx.Client) -> None:
    answer = http.post("/retrieve", content=b'{"queries": ["Paris"]}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b"<html></html>"])
def test_no_json_is_400(http: httpx.Client, body: bytes) -> None:
    assert_error(http.post("/retrieve", content=body), 400, "invalid_json")


def test_skyrl_dialects(http: httpx.Client) -> None:
    """SkyRL's gym client posts ``queries`` of one; its servers take ``query``. Both read document.contents."""
    one = ask(http, query="country of Łódź", topk=3, return_scores=True).json()["result"]
    many = ask(http, queries=["country of Łódź"], topk=3, return_scores=True).json()["result"]
    assert one == many
    assert len(one) == 1 and titles(one[0])[0] == '"Łódź"'


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("Sao Paulo", '"São Paulo"'),
        ("SÃO PAULO", '"São Paulo"'),
        ("Lodz", '"Łódź"'),
        ("Tromso", '"Tromsø"'),
        ("Sana'a", '"Sanaa"'),
        ("Ras al Khaymah", '"Ra’s al Khaymah"'),
        ("population of The Hague", '"The Hague"'),
        ("population of Reading", '"Reading"'),
        ("where is Of?", '"Of"'),
        ("Winston Salem", '"Winston-Salem"'),
        ("2138551", '"Paris"'),
        ("capital of France", '"France"'),
        ("東京", '"東京"'),
        ("日本の首都", '"東京"'),
        ("京", '"東京"'),
    ],
)
def test_names_are_found(http: httpx.Client, query: str, title: str) -> None:
    assert titles(ask(http, queries=[query], topk=1, return_scores=True).json()["result"][0]) == [title]


@pytest.mark.parametrize("query", ["", "   ", "?!…", "🙂", "Zzyzx"])
def test_nothing_matches(http: httpx.Client, query: str) -> None:
    assert ask(http, queries=[query], return_scores=True).json() == {"result": [[]]}


@pytest.mark.parametrize(
    "query",
    [
        "\ud800 Paris",
        "Paris \udfff\ud83d",
        "\0Paris\0",
        "Paris " + "x" * 10_000,
        "Paris " + "\u0301" * 10_000,
        "Paris " * 10_000,
        "<search>Paris</search> <answer>x</answer>",
        '"; DROP TABLE passages; -- Paris',
        "Paris\r\n\t\u2028\u202e",
    ],
)
def test_hostile_queries_still_search(http: httpx.Client, query: str) -> None:
    body = json.dumps({"queries": [query, "Łódź"], "return_scores": True}).encode("ascii")
    answer = http.post("/retrieve", content=body)
    assert answer.status_code == 200
    assert [titles(found)[0] for found in answer.json()["result"]] == ['"Paris"', '"Łódź"']


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=60), max_size=5), st.booleans())
def test_any_strings_give_one_list_each(http: httpx.Client, queries: list[str], scores: bool) -> None:
    body = json.dumps({"queries": queries, "return_scores": scores}).encode("ascii")
    answer = http.post("/retrieve", content=body)
    assert answer.status_code == 200
    assert len(answer.json()["result"]) == len(queries)


def test_a_whole_search_r1_batch(http: httpx.Client) -> None:
    """512 prompts x 5 samples in one request."""
    result = ask(http, queries=["time zone of Paris", "Łódź"] * 1280, topk=3, return_scores=True).json()["result"]
    assert len(result) == 2560
    assert result[::2] == [result[0]] * 1280
    assert result[1::2] == [result[1]] * 1280


def test_limits(http: httpx.Client) -> None:
    assert_error(ask(http, queries=["x"] * 8193), 422, "too_many_queries")
    assert_error(http.post("/retrieve", content=b" " * (33 * 1024 * 1024)), 413, "body_too_large")

    def chunks() -> object:  # no Content-Length: the size shows only while reading
        for _ in range(40):
            yield b" " * (1024 * 1024)

    try:
        answer = http.post("/retrieve", content=chunks())
    except httpx.WriteError:
        pass  # the server answered and closed before all was sent
    else:
        assert_error(answer, 413, "body_too_large")
    assert http.get("/livez").status_code == 200


def test_health(http: httpx.Client, passages: list[dict[str, object]]) -> None:
    assert http.get("/livez").json() == {"status": "alive"}
    ready = http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["status"] == "ready"
    assert ready.json()["passages"] == len(passages)
    assert ready.json()["untitled_passages"] == 1


def test_other_paths_and_methods_have_the_same_error_shape(http: httpx.Client) -> None:
    error = assert_error(http.get("/retrieve"), 405, "method_not_allowed")
    assert "GET /retrieve" in str(error["message"])
    assert http.get("/retrieve").headers["allow"] == "POST"
    assert_error(http.get("/nowhere"), 404, "not_found")


def test_concurrent_requests_get_their_own_answers(http: httpx.Client) -> None:
    """Requests that share a batch differ in topk, length and scores; each gets what it asked for."""
    names = ["São Paulo", "Paris", "Łódź", "Sanaa", "Reading", "Tromsø"]
    wrong: list[object] = []

    def work(worker: int) -> None:
        for turn in range(20):
            name, topk = names[(worker + turn) % len(names)], 1 + (worker + turn) % 3
            queries = [name, "city"][: 1 + worker % 2]
            found = ask(http, queries=queries, topk=topk, return_scores=True).json()["result"]
            if titles(found[0])[0] != f'"{name}"' or len(found) != len(queries) or len(found[-1]) > topk:
                wrong.append((name, found))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_openapi_names_the_request(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()["paths"]["/retrieve"]["post"]["requestBody"]
    assert set(schema["content"]["application/json"]["schema"]["properties"]) >= {"queries", "topk", "return_scores"}
