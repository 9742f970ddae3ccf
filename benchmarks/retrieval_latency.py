"""Start-up, latency, throughput and memory of the retrieval sidecar, and numpy against numba in its index.

    python benchmarks/retrieval_latency.py [--corpus corpus.jsonl] [--queries 1000]

Without ``--corpus`` it builds the GeoNames world. Every query is the search for one relation of one title of
the corpus, so no two are alike. Linux only: CPU time and memory of the server come from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from retrieval_server.client import RetrievalClient  # noqa: E402
from retrieval_server.launch import start_sidecar  # noqa: E402

_BACKEND = """
import json, sys, time
from retrieval_server.bm25 import BM25Retriever
from retrieval_server.corpus import load_corpus
backend, corpus, queries = sys.argv[1], load_corpus(sys.argv[2]), json.load(open(sys.argv[3]))
started = time.perf_counter()
retriever = BM25Retriever(corpus.contents)
if backend == "numba":
    retriever._index.activate_numba_scorer()
built = time.perf_counter()
retriever.search(queries[0], 3)
first = time.perf_counter()
times = []
for query in queries:
    start = time.perf_counter(); retriever.search(query, 3); times.append(time.perf_counter() - start)
times.sort()
print(json.dumps([built - started, first - built, times[len(times) // 2] * 1e3, times[int(len(times) * .99)] * 1e3]))
"""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def make_queries(corpus: Path, count: int) -> list[str]:
    """``count`` different queries, evenly spread over the corpus."""
    with corpus.open(encoding="utf-8") as file:
        titles = [json.loads(line)["contents"].split("\n")[0].strip('"') for line in file if line.strip()]
    step = max(1, len(titles) // count)
    relations = ("country", "time zone", "population")
    return [f"{relations[number % 3]} of {title}" for number, title in enumerate(titles[::step][:count])]


async def measure(url: str, pid: int, queries: list[str]) -> None:
    async with RetrievalClient(url) as client:
        await client.search("warm up")
        seconds = []
        server, own, started = cpu_seconds(pid), time.process_time(), time.perf_counter()
        for query in queries:
            result = await client.search(query)
            if not result.ok:
                raise SystemExit(f"search failed: {result.detail}")
            seconds.append(result.seconds)
        report("one at a time", queries, started, server, own, pid)
        ms = [value * 1e3 for value in statistics.quantiles(seconds, n=100)]
        print(f"  latency p50 {ms[49]:.2f} ms, p95 {ms[94]:.2f} ms, p99 {ms[98]:.2f} ms")
        server, own, started = cpu_seconds(pid), time.process_time(), time.perf_counter()
        results = await client.search_many(queries)
        if not all(result.ok for result in results):
            raise SystemExit("a search failed")
        report("all at once, shared requests", queries, started, server, own, pid)
    async with RetrievalClient(url, max_batch=1) as client:
        server, own, started = cpu_seconds(pid), time.process_time(), time.perf_counter()
        results = await client.search_many(queries)
        if not all(result.ok for result in results):
            raise SystemExit("a search failed")
        report("all at once, a request each", queries, started, server, own, pid)


def report(name: str, queries: list[str], started: float, server: float, own: float, pid: int) -> None:
    wall, count = time.perf_counter() - started, len(queries)
    server_ms, own_ms = (cpu_seconds(pid) - server) / count * 1e3, (time.process_time() - own) / count * 1e3
    print(f"{name}: {count / wall:,.0f} queries/s; CPU a query: server {server_ms:.2f} ms, client {own_ms:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--backends", action="store_true", help="also time bm25s's numpy and numba backends")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = arguments.corpus
        if corpus is None:
            from mapd_verl.data.geonames.build import build_world

            build_world(Path(folder))
            corpus = Path(folder) / "corpus.jsonl"
        queries = make_queries(corpus, arguments.queries)
        started = time.perf_counter()
        with start_sidecar(corpus) as sidecar:
            pid = sidecar.process.pid
            print(f"start to ready: {time.perf_counter() - started:.2f} s wall, {cpu_seconds(pid):.2f} s CPU")
            asyncio.run(measure(sidecar.url, pid, queries))
            print(f"memory: {memory_mb(pid, 'VmRSS'):.0f} MB resident, {memory_mb(pid, 'VmHWM'):.0f} MB peak")
        if arguments.backends:
            listed = Path(folder) / "queries.json"
            listed.write_text(json.dumps(queries))
            for backend in ("numpy", "numba"):
                command = [sys.executable, "-c", _BACKEND, backend, str(corpus), str(listed)]
                ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
                build, first, middle, slow = json.loads(ended.stdout)
                print(
                    f"index, {backend}: build {build:.2f} s, first query {first * 1e3:,.1f} ms, "
                    f"then p50 {middle:.3f} ms, p99 {slow:.3f} ms"
                )


if __name__ == "__main__":
    main()
