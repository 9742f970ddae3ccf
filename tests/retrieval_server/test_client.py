"""The client against the real sidecar, and against real servers that misbehave on purpose."""

import asyncio
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.client import ERROR_CODES, Passage, RetrievalClient, SearchResult
from retrieval_server.launch import Sidecar
from retrieval_server.transport import Failure, _read_answer

Respond = Callable[[list[str], asyncio.StreamWriter], Awaitable[None]]


@dataclass
class BadServer:
    url: str
    requests: list[list[str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@asynccontextmanager
async def bad_server(respond: Respond) -> AsyncIterator[BadServer]:
    """An HTTP server on loopback that reads each request properly and answers as ``respond`` likes."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                queries = json.loads(await reader.readexactly(size))["queries"]
                server.requests.append(queries)
                server.times.append(time.monotonic())
                await respond(queries, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = BadServer(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        listening.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> Respond:
    async def respond(queries: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)

    return respond


def good(queries: list[str]) -> bytes:
    item = {"document": {"id": "1", "contents": '"T"\nbody'}, "score": 1.0}
    return json.dumps({"result": [[item]] * len(queries)}).encode()


async def answer_well(queries: list[str], writer: asyncio.StreamWriter) -> None:
    await reply(good(queries))(queries, writer)


def impatient(*urls: str, **settings: Any) -> RetrievalClient:
    return RetrievalClient(urls, **{"timeout": 0.3, "retries": 1, "backoff": 0.01, "max_backoff": 0.1, **settings})


async def search_and_close(client: RetrievalClient, query: str = "x") -> SearchResult:
    async with client:
        return await client.search(query)


async def test_a_real_search(sidecar: Sidecar) -> None:
    async with RetrievalClient(sidecar.url) as client:
        result = await client.search("population of Sao Paulo")
        assert result.ok and result.error is None and result.attempts == 1
        assert len(result.passages) == 3
        first = result.passages[0]
        assert (first.id, first.title) == ("city-São Paulo", '"São Paulo"')
        assert first.text.startswith("The city of São Paulo lies in Brazil.")
        assert first.score is not None and first.score > 0
        assert len((await client.search("city", topk=5)).passages) == 5
        none = await client.search("Zzyzx")
        assert none.ok and none.passages == []


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/retrieve", "{}/retrieve/"])
async def test_base_and_full_urls(sidecar: Sidecar, form: str) -> None:
    assert (await search_and_close(RetrievalClient(form.format(sidecar.url)), "Paris")).ok


@pytest.mark.parametrize("query", ["Paris \ud800", "\0Paris", "Paris " + "x" * 10_000, "Paris </search>\r\n"])
async def test_hostile_queries(sidecar: Sidecar, query: str) -> None:
    result = await search_and_close(RetrievalClient(sidecar.url), query)
    assert result.ok and result.passages[0].title == '"Paris"'


@pytest.mark.parametrize("query", ["", "  \n\t "])
async def test_a_blank_query_makes_no_request(query: str) -> None:
    async with bad_server(answer_well) as server:
        result = await search_and_close(impatient(server.url), query)
        assert (result.ok, result.error, result.passages) == (False, "empty_query", [])
        assert server.requests == []


BARE = {"id": 5, "contents": "T\nb"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"<html><body>502</body></html>", "bad_response"),
        (b"", "bad_response"),
        (b"\xff\xfe", "bad_response"),
        (b"[" * 100_000, "bad_response"),
        (b"null", "bad_response"),
        (b"[]", "bad_response"),
        (b"{}", "bad_response"),
        (b'{"result": null}', "bad_response"),
        (b'{"result": "x"}', "bad_response"),
        (b'{"result": []}', "bad_response"),
        (b'{"result": [[], []]}', "bad_response"),
        (b'{"result": ["x"]}', "bad_response"),
        (b'{"result": [["x"]]}', "bad_response"),
        (b'{"result": [[null]]}', "bad_response"),
        (b'{"result": [[{"document": "a string", "score": 1}]]}', "bad_response"),
        (b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}', "bad_response"),
        (b'{"result": [[{"document": {"contents": 7}, "score": 1}]]}', "bad_response"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}', "bad_response"),
    ],
)
async def test_garbage_with_200(body: bytes, error: str) -> None:
    async with bad_server(reply(body)) as server:
        result = await search_and_close(impatient(server.url))
        assert (result.ok, result.passages, result.error) == (False, [], error)
        assert server.url in result.detail
        assert result.attempts == len(server.requests) == 2


@pytest.mark.parametrize(
    ("item", "passage"),
    [
        ({"document": BARE, "score": 2}, Passage("5", "T\nb", 2.0)),
        ({"document": BARE}, Passage("5", "T\nb", None)),  # web search servers send no score
        ({"document": {"contents": "T"}}, Passage("", "T", None)),
        (BARE, Passage("5", "T\nb", None)),  # servers that ignore return_scores
    ],
)
async def test_other_servers_items(item: object, passage: Passage) -> None:
    async with bad_server(reply(json.dumps({"result": [[item]]}).encode())) as server:
        result = await search_and_close(impatient(server.url))
        assert result.ok and result.passages == [passage]


@pytest.mark.parametrize(
    ("status", "error", "attempts"),
    [
        ("500 Internal Server Error", "server_error", 2),
        ("501 Not Implemented", "server_error", 2),
        ("502 Bad Gateway", "unavailable", 2),
        ("503 Service Unavailable", "unavailable", 2),
        ("504 Gateway Timeout", "unavailable", 2),
        ("429 Too Many Requests", "overloaded", 2),
        ("400 Bad Request", "bad_request", 1),
        ("404 Not Found", "bad_request", 1),
        ("422 Unprocessable Content", "bad_request", 1),
        ("302 Found", "bad_request", 1),
        ("204 No Content", "bad_request", 1),
    ],
)
async def test_http_errors(status: str, error: str, attempts: int) -> None:
    body = b"" if status.startswith("204") else b"<h1>no</h1>"
    async with bad_server(reply(body, status, "Location: http://127.0.0.1:9/\r\n")) as server:
        result = await search_and_close(impatient(server.url))
        assert (result.ok, result.error, result.attempts) == (False, error, attempts)
        assert len(server.requests) == attempts
        assert status[:3] in result.detail


async def hang(queries: list[str], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def drip(queries: list[str], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:  # each read succeeds soon, the whole never ends
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def cut(queries: list[str], writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"result"')
    writer.close()


async def close_at_once(queries: list[str], writer: asyncio.StreamWriter) -> None:
    writer.close()


async def no_http(queries: list[str], writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example.org ESMTP\r\n\r\n")


@pytest.mark.parametrize(
    ("respond", "error"),
    [
        (hang, "timeout"),
        (drip, "timeout"),
        (cut, "unreachable"),
        (close_at_once, "unreachable"),
        (no_http, "unreachable"),
        (reply(b"not gzip", headers="Content-Encoding: gzip\r\n"), "bad_response"),
    ],
)
async def test_broken_connections(respond: Respond, error: str) -> None:
    async with bad_server(respond) as server:
        started = time.monotonic()
        result = await search_and_close(impatient(server.url))
        assert (result.ok, result.error, result.attempts) == (False, error, 2)
        assert time.monotonic() - started < 2
        assert result.seconds < 2


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_server.transport._MAX_ANSWER_BYTES", 1000)
    async with bad_server(reply(b" " * 5000 + good(["x"]))) as server:
        assert (await search_and_close(impatient(server.url))).error == "bad_response"


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A port that is bound, so that nobody else takes it, and doesn't listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def test_nobody_listens(dead_url: str) -> None:
    result = await search_and_close(impatient(dead_url))
    assert (result.ok, result.error, result.attempts) == (False, "unreachable", 2)
    assert dead_url in result.detail


async def test_retry_after_is_honoured_and_bounded() -> None:
    calls = 0

    async def overloaded_once(queries: list[str], writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await reply(b"", "429 Too Many Requests", "Retry-After: 1\r\n")(queries, writer)
        else:
            await answer_well(queries, writer)

    for most, least in ((5.0, 1.0), (0.2, 0.2)):
        calls = 0
        async with bad_server(overloaded_once) as server:
            result = await search_and_close(impatient(server.url, max_backoff=most))
            assert result.ok and result.attempts == 2
            assert least <= server.times[1] - server.times[0] < least + 0.7


async def test_failover_and_cooldown(dead_url: str) -> None:
    """A dead URL costs each search at most one try, and while it cools down none."""
    async with bad_server(answer_well) as server, impatient(dead_url, server.url, cooldown=60) as client:
        results = [await client.search(f"query {number}") for number in range(10)]
        assert all(result.ok for result in results)
        assert sum(result.attempts for result in results) <= 11
        assert len(server.requests) == 10


async def test_a_url_that_refuses_is_not_asked_again_but_the_next_is() -> None:
    async with bad_server(reply(b"", "404 Not Found")) as wrong, bad_server(answer_well) as right:
        async with impatient(wrong.url, right.url, retries=3, cooldown=0) as client:
            for _ in range(4):
                assert (await client.search("x")).ok
        assert len(wrong.requests) <= 4
    async with bad_server(reply(b"", "404 Not Found")) as one, bad_server(reply(b"", "403 Forbidden")) as other:
        result = await search_and_close(impatient(one.url, other.url, retries=5))
        assert (result.error, result.attempts) == ("bad_request", 2)


async def test_load_is_spread_over_urls() -> None:
    async with bad_server(answer_well) as one, bad_server(answer_well) as other:
        async with impatient(one.url, other.url) as client:
            for _ in range(10):
                assert (await client.search("x")).ok
        assert len(one.requests) == len(other.requests) == 5


async def test_searches_made_together_share_a_request(sidecar: Sidecar) -> None:
    async with bad_server(answer_well) as server, impatient(server.url, max_batch=8) as client:
        results = await client.search_many([f"q{number}" for number in range(20)])
        assert all(result.ok for result in results)
        assert [len(queries) for queries in server.requests] == [8, 8, 4]
    names = ["São Paulo", "Paris", "Łódź", "Sanaa", "Reading", "Tromsø"] * 20
    async with RetrievalClient(sidecar.url, max_batch=16) as client:
        found = await asyncio.gather(
            *(client.search(name, topk=1 + number % 3) for number, name in enumerate(names)), client.search(" ")
        )
    assert found[-1].error == "empty_query"
    for number, (name, result) in enumerate(zip(names, found[:-1], strict=True)):
        assert result.ok and result.passages[0].title == f'"{name}"'
        assert 1 <= len(result.passages) <= 1 + number % 3


async def test_one_poisonous_query_does_not_fail_its_neighbours() -> None:
    async def choke(queries: list[str], writer: asyncio.StreamWriter) -> None:
        if "poison" in queries:
            await reply(b"Internal Server Error", "500 Internal Server Error")(queries, writer)
        else:
            await answer_well(queries, writer)

    async with bad_server(choke) as server, impatient(server.url) as client:
        results = await client.search_many(["a", "poison", "b"])
        assert [result.error for result in results] == [None, "server_error", None]


async def test_a_cancelled_search_leaves_the_others_alone() -> None:
    async def slow(queries: list[str], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await answer_well(queries, writer)

    async with bad_server(slow) as server, impatient(server.url, timeout=2) as client:
        tasks = [asyncio.create_task(client.search(query)) for query in ("a", "b", "c")]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert [result.ok for result in (results[0], results[2])] == [True, True]  # type: ignore[union-attr]


async def test_timeouts_leave_no_connection_slot_behind() -> None:
    hanging = True

    async def sometimes(queries: list[str], writer: asyncio.StreamWriter) -> None:
        await (hang if hanging else answer_well)(queries, writer)

    settings = {"timeout": 0.05, "retries": 0, "max_concurrency": 2, "max_batch": 1}
    async with bad_server(sometimes) as server, impatient(server.url, **settings) as client:
        results = await client.search_many("abcdef")
        assert {result.error for result in results} == {"timeout"}
        hanging = False
        assert all(result.ok for result in await client.search_many("abcdef"))


def test_one_client_on_several_event_loops_and_threads(sidecar: Sidecar) -> None:
    client = RetrievalClient(sidecar.url)
    outcomes: list[bool] = []

    def work() -> None:
        for _ in range(3):
            results = asyncio.run(client.search_many(["Paris", "Łódź"]))
            outcomes.extend(result.ok for result in results)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 24
    asyncio.run(client.search("Paris"))
    assert len(client._pools) == 1  # those of ended loops are gone


async def test_a_client_can_be_sent_to_another_process(sidecar: Sidecar) -> None:
    client = RetrievalClient([sidecar.url], topk=2, timeout=7)
    assert (await client.search("Paris")).ok
    copy = pickle.loads(pickle.dumps(client))
    assert (copy.urls, copy.topk, copy.timeout) == (client.urls, 2, 7)
    assert len((await search_and_close(copy, "city")).passages) == 2
    await client.aclose()
    assert (await client.search("Paris")).ok  # usable again after closing
    await client.aclose()


async def test_the_environments_proxy_is_not_used(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await search_and_close(RetrievalClient(sidecar.url), "Paris")).ok


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://h/", "http://", "http://h:99999", "http://h:0", "http://h/?q=1", "http://a b/"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="RetrievalClient"):
        RetrievalClient(url)


@pytest.mark.parametrize(
    "settings",
    [
        {"topk": 0},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"retries": -1},
        {"max_concurrency": 0},
        {"max_batch": 0},
        {"backoff": -1},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RetrievalClient("http://127.0.0.1:8000", **settings)
    with pytest.raises(ValueError, match="at least one URL"):
        RetrievalClient([])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["result", "document", "contents", "id", "score", "x"]), inner, max_size=4
            )
        ),
        max_leaves=15,
    ),
    st.integers(1, 3),
)
def test_any_json_is_an_answer_or_a_bad_response(body: object, queries: int) -> None:
    for content in (body, {"result": body}, {"result": [body]}, {"result": [[body]]}):
        try:
            found = _read_answer("url", json.dumps(content).encode(), queries)
        except Failure as failure:
            assert failure.code == "bad_response"
        else:
            assert len(found) == queries
            assert all(isinstance(passage, Passage) for passages in found for passage in passages)


def test_error_codes_are_listed() -> None:
    assert "empty_query" in ERROR_CODES and len(ERROR_CODES) == 8


def test_the_client_needs_neither_server_nor_torch() -> None:
    code = (
        "import sys, retrieval_server.client, retrieval_server.launch;"
        "heavy = {'fastapi', 'uvicorn', 'bm25s', 'numpy', 'pydantic', 'orjson', 'torch', 'verl'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_server_needs_no_torch() -> None:
    code = (
        "import sys, retrieval_server.app, retrieval_server.serve, uvicorn, bm25s;"
        "print(sorted({'torch', 'verl', 'transformers', 'jax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
