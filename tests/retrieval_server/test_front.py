"""The service around the search: token, deadline, cache, metrics, info, rerank, exposure, stopping."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from retrieval_server.app import Settings, create_app
from retrieval_server.bm25 import BM25Retriever, Hit
from retrieval_server.cache import QueryCache
from retrieval_server.errors import ApiError, StartupError
from retrieval_server.launch import start_sidecar
from retrieval_server.serve import check_exposure, read_token
from retrieval_server.service import Service, ServiceConfig
from retrieval_server.wire import Limits

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[httpx.Client]:
    """A server with a token that logs all it logs."""
    folder = tmp_path_factory.mktemp("token")
    (folder / "token").write_text(TOKEN + "\n")
    arguments = ["--token-file", str(folder / "token"), "--log-level", "info"]
    with (
        start_sidecar(corpus, log=folder / "log", arguments=arguments) as sidecar,
        httpx.Client(base_url=sidecar.url) as client,
    ):
        client.headers["X-Log"] = str(folder / "log")
        yield client


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", f"bearer  {TOKEN[:-1]}"]
)
@pytest.mark.parametrize("path", ["/retrieve", "/info", "/metrics", "/openapi.json", "/rerank", "/nowhere"])
def test_without_the_token_nothing_is_answered(guarded: httpx.Client, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header}
    method = "POST" if path in ("/retrieve", "/rerank") else "GET"
    answer = guarded.request(method, path, headers=headers, content=b'{"queries": ["Paris"]}')
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_with_the_token_all_is_and_the_log_tells_neither_token_nor_query(guarded: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/retrieve", json={"queries": ["Winston-Salem"]}, headers=headers).status_code == 200
    assert guarded.get("/info", headers=headers).status_code == 200
    assert guarded.post("/retrieve", content=b"{Winston", headers=headers).status_code == 400
    assert guarded.get("/livez").status_code == guarded.get("/readyz").status_code == 200
    log = Path(guarded.headers["X-Log"]).read_text()
    assert TOKEN not in log and "Winston" not in log and "/retrieve" not in log


def test_info_and_metrics(http: httpx.Client, passages: list[dict[str, object]]) -> None:
    info = http.get("/info").json()
    assert info["corpus"]["rows"] == len(passages) and len(info["corpus"]["sha256"]) == 64
    assert info["backend"] == "bm25" and info["topk"] == 3 and "numpy" in info["versions"]
    http.post("/retrieve", json={"queries": ["Tromsø", "Tromsø"]})
    http.post("/retrieve", json={"queries": ["Tromsø"]})
    http.post("/retrieve", content=b"{")
    metrics = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in http.get("/metrics").text.splitlines()
        if not line.startswith("#")
    }
    assert metrics['retrieval_requests_total{route="/retrieve",status="200"}'] >= 2
    assert metrics['retrieval_errors_total{code="invalid_json"}'] >= 1
    assert metrics["retrieval_queries_total"] >= 3
    assert metrics["retrieval_cache_hits_total"] >= 1 and metrics["retrieval_shared_total"] >= 1
    assert metrics["retrieval_search_seconds_count"] >= 1 and metrics["retrieval_batch_queries_count"] >= 1
    assert (metrics["retrieval_ready"], metrics["retrieval_passages"]) == (1.0, len(passages))
    assert metrics["retrieval_queue_queries"] == 0


def test_rerank_without_a_reranker_says_so(http: httpx.Client) -> None:
    answer = http.post("/rerank", json={"queries": ["a"], "documents": [["b"]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_reranker")
    for body in (
        {"queries": ["a"]},
        {"queries": ["a"], "documents": []},
        {"queries": ["a"], "documents": [[{"x": 1}]]},
    ):
        assert http.post("/rerank", json=body).status_code == 422


class ByLength:
    """Stands where the cross-encoder does: scores are lengths."""

    name = "by-length"

    def rank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        return sorted(((i, float(len(d))) for i, d in enumerate(documents)), key=lambda p: -p[1])


class Slow(BM25Retriever):
    """Half a second a batch."""

    def search_batch(self, queries: Sequence[str], topk: Sequence[int]) -> list[list[Hit]]:
        time.sleep(0.5)
        return super().search_batch(queries, topk)


async def ask(service: Service, settings: Settings, work) -> None:
    ready = asyncio.Event()
    app = create_app(service, settings, loaded=lambda error: ready.set())
    async with app.app.router.lifespan_context(app.app):
        await asyncio.wait_for(ready.wait(), 10)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await work(client)


async def test_rerank_in_search_r1s_shape(corpus: Path) -> None:
    service = Service(ServiceConfig(str(corpus)))

    async def work(client: httpx.AsyncClient) -> None:
        service.reranker = ByLength()  # type: ignore[assignment]
        documents = [["bb", {"contents": "a", "id": 7}, "cccc"], ["x"]]
        body = {"queries": ["q", "r"], "documents": documents, "rerank_topk": 2, "return_scores": True}
        assert (await client.post("/rerank", json=body)).json() == {
            "result": [
                [{"document": "cccc", "score": 4.0}, {"document": "bb", "score": 2.0}],
                [{"document": "x", "score": 1.0}],
            ]
        }
        bare = await client.post("/rerank", json={"queries": ["q"], "documents": [documents[0]]})
        assert bare.json() == {"result": [["cccc", "bb", {"contents": "a", "id": 7}]]}
        odd = await client.post("/rerank", content=b'{"queries": ["q"], "documents": [["\\ud800 x"]]}')
        assert odd.json() == {"result": [["\ud800 x"]]}
        large = await client.post("/rerank", content=b" " * (33 << 20))
        assert large.json()["error"]["code"] == "body_too_large"
        many = {"queries": ["q"], "documents": [["d"] * 3000]}
        assert (await client.post("/rerank", json=many)).json()["error"]["code"] == "too_many_pairs"

    await ask(service, Settings(), work)


async def test_a_deadline_is_the_servers_or_less_and_the_queue_goes_on(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval_server.service.BM25Retriever", Slow)

    async def work(client: httpx.AsyncClient) -> None:
        for headers, status in (({"X-Request-Timeout": "0.05"}, 504), ({"X-Request-Timeout": "60"}, 200), ({}, 200)):
            answer = await client.post("/retrieve", json={"queries": [f"Paris {status}"]}, headers=headers)
            assert answer.status_code == status
        for bad in ("soon", "-1", "0", "nan", "inf"):
            answer = await client.post("/retrieve", json={"queries": ["x"]}, headers={"X-Request-Timeout": bad})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_deadline")

    await ask(Service(ServiceConfig(str(corpus))), Settings(deadline=2.0), work)


async def test_overflow_is_refused_at_once_while_the_index_is_busy(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval_server.service.BM25Retriever", Slow)

    async def work(client: httpx.AsyncClient) -> None:
        waiting = [asyncio.create_task(client.post("/retrieve", json={"queries": [f"q{i}"]})) for i in range(4)]
        await asyncio.sleep(0.1)
        times = []
        for i in range(10):
            started = time.perf_counter()
            refused = await client.post("/retrieve", json={"queries": [f"r{i}"]})
            times.append(time.perf_counter() - started)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert sorted(times)[5] < 0.05
        assert [(await task).status_code for task in waiting] == [200] * 4

    await ask(Service(ServiceConfig(str(corpus))), Settings(Limits(max_pending=4)), work)


async def test_the_cache_keeps_answers_not_errors_and_survives_a_cancelled_asker() -> None:
    calls: list[list[str]] = []
    gate = asyncio.Event()

    def submit(queries: list[str], topk: int) -> asyncio.Future[list[list[Hit]]]:
        calls.append(queries)
        return asyncio.ensure_future(search(queries, topk))

    async def search(queries: list[str], topk: int) -> list[list[Hit]]:
        await gate.wait()
        if "bad" in queries:
            raise ApiError(429, "overloaded", "full")
        return [[(len(query), float(topk))] for query in queries]

    cache = QueryCache(submit, 2)
    first = asyncio.create_task(cache.search(["a", "bb", "a"], 1))
    await asyncio.sleep(0)
    second = asyncio.create_task(cache.search(["bb", "ccc"], 1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await second == [[(2, 1.0)], [(3, 1.0)]]
    assert calls == [["a", "bb"], ["ccc"]]
    assert await cache.search(["ccc"], 1) == [[(3, 1.0)]] and len(calls) == 2
    assert await cache.search(["ccc"], 2) == [[(3, 2.0)]] and len(calls) == 3
    gate.clear()
    expired = asyncio.create_task(cache.search(["dddd"], 1))
    await asyncio.sleep(0)
    begun = cache._flying["dddd", 1][0].future
    expired.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun.cancelled(), "nobody waits any more: the search is called off"
    calls.pop()
    gate.set()
    for _ in range(2):
        with pytest.raises(ApiError):
            await cache.search(["bad"], 1)
    assert len(calls) == 5, "an error is not kept"
    await cache.search(["a"], 1)
    assert len(calls) == 6, "two entries are kept, the one asked longest ago goes"


@pytest.mark.parametrize(
    ("host", "token", "is_open", "fine"),
    [
        ("127.0.0.1", None, False, True),
        ("0.0.0.0", None, False, False),
        ("0.0.0.0", TOKEN, False, True),
        ("0.0.0.0", None, True, True),
    ],
)
def test_beyond_this_machine_a_token_is_wanted(host: str, token: str | None, is_open: bool, fine: bool) -> None:
    with socket.socket() as listener:
        listener.bind((host, 0))
        if fine:
            check_exposure(listener, token, is_open)
        else:
            with pytest.raises(StartupError, match="--token-file"):
                check_exposure(listener, token, is_open)


def test_a_poor_token_file_is_refused(tmp_path: Path) -> None:
    assert read_token(None) is None
    with pytest.raises(StartupError, match="can't be read"):
        read_token(str(tmp_path / "none"))
    for text in ("short", "two words of some length"):
        (tmp_path / "t").write_text(text)
        with pytest.raises(StartupError, match="16 characters"):
            read_token(str(tmp_path / "t"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one of --corpus and --index"),
        (["--corpus", "c", "--index", "i"], "name one of --corpus and --index"),
        (["--corpus", "c", "--retriever", "dense"], "wants --index"),
        (["--corpus", "c", "--gpu"], "--gpu goes with --index"),
        (["--index", "/nowhere/at/all"], "no such folder"),
        (["build", "--corpus", "/nowhere.jsonl", "--index", "/tmp/never"], "no such file"),
        (["build", "--corpus", "c"], "--index"),
        (["build", "--corpus", "setup.py", "--index", "/tmp/never", "--backend", "dense"], "--encoder"),
        (["verify", "--index", "/nowhere/at/all"], "no such folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "retrieval_server", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_serving_bm25_imports_neither_torch_nor_verl(corpus: Path) -> None:
    script = (
        "import sys; from retrieval_server.app import create_app; from retrieval_server.service import *\n"
        f"s = Service(ServiceConfig({str(corpus)!r})); s.load(); create_app(s)\n"
        "import retrieval_server.index.open, retrieval_server.index.bm25\n"
        "print(sorted({'torch', 'verl', 'transformers', 'faiss', 'litellm'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"
    )


@pytest.mark.e2e
@pytest.mark.parametrize("attempt", range(3))
def test_a_stop_under_load_loses_no_request(corpus: Path, tmp_path: Path, attempt: int) -> None:
    """48 threads, every other one with a new connection each time; the server is told to stop in the middle."""
    sidecar = start_sidecar(corpus, log=tmp_path / "log")
    host, port = sidecar.url.removeprefix("http://").split(":")
    body = json.dumps({"queries": ["Paris"], "return_scores": True}).encode()
    request = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    lost: list[str] = []
    answered = [0] * 48
    stop = threading.Event()

    def read_answer(connection: socket.socket) -> tuple[bytes, bool]:
        data = b""
        while b"\r\n\r\n" not in data:
            block = connection.recv(65536)
            if not block:
                return data, True
            data += block
        head, _, rest = data.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        while len(rest) < length:
            rest += connection.recv(65536)
        return head, b"connection: close" in head.lower()

    def work(worker: int) -> None:
        connection, fresh = None, True
        while not stop.is_set():
            if connection is None:
                try:
                    connection, fresh = socket.create_connection((host, int(port)), 5), True
                except OSError:
                    return  # the port is closed: nothing was accepted
            try:
                connection.sendall(request)
                head, closes = read_answer(connection)
            except OSError as error:
                head, closes = repr(error).encode(), True
            if head.startswith(b"HTTP/1.1 200"):
                answered[worker] += 1
            elif fresh or head:
                # A kept connection that the server closed while idle answers nothing, and HTTP clients ask again.
                lost.append(f"worker {worker}: {head[:80]!r} on a {'new' if fresh else 'kept'} connection")
            fresh = False
            if closes or worker % 2:
                connection.close()
                connection = None

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(48)]
    for thread in threads:
        thread.start()
    time.sleep(0.5 + 0.2 * attempt)
    sidecar.process.terminate()
    code = sidecar.process.wait(20)
    stop.set()
    for thread in threads:
        thread.join()
    assert lost == [] and code == 0
    assert min(answered) > 0
