"""``python benchmarks/retrieval_build.py --text FILE --passages N --folder DIR``: what a BM25 index of N costs.

Builds it from ``passages.py``'s text, then serves it: seconds and bytes a passage, resident memory, latency of one
search after another. Prints the sum for wiki-18 (21,015,324 passages) from the same bytes a passage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from load_generator import closed_loop, requests_of  # noqa: E402
from passages import make_queries, read_articles, write_corpus  # noqa: E402
from retrieval_load import free_port, ours, server  # noqa: E402

WIKI_18 = 21_015_324


def run(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak resident MB (this process and its children together) of a command."""
    started, peak = time.perf_counter(), 0
    process = psutil.Popen([sys.executable, *command], cwd=ROOT)
    cpu: dict[int, float] = {}
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                with one.oneshot():
                    total += one.memory_info().rss
                    cpu[one.pid] = sum(one.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.perf_counter() - started, sum(cpu.values()), peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus, index = arguments.folder / "corpus.jsonl", arguments.folder / "index"
    articles = read_articles(arguments.text)
    if not corpus.exists():
        write_corpus(articles, arguments.passages, corpus)
    n = arguments.passages
    print(f"{n} passages, {corpus.stat().st_size / n:.0f} bytes of JSON each")
    if not index.exists():
        command = ["-m", "retrieval_server", "build", "--corpus", str(corpus), "--index", str(index)]
        wall, cpu, peak = run([*command, "--workers", str(arguments.workers)])
        print(f"build: {wall:.0f} s, {cpu:.0f} s of CPU ({1e6 * cpu / n:.0f} us a passage), peak {peak:.0f} MB")
    facts = json.loads((index / "manifest.json").read_text())
    size = sum(file["bytes"] for file in facts["files"].values())
    counts = facts["backends"]["bm25"]
    print(
        f"index: {size / n:.0f} bytes a passage; {counts['tokens']} tokens, "
        f"{counts['postings'] / n:.1f} postings a passage"
    )
    port = free_port()
    started = time.perf_counter()
    with server(ours(index, "bm25"), port) as process:
        print(
            f"ready after {time.perf_counter() - started:.1f} s; resident {process.memory_info().rss / 2**20:.0f} MB",
            end="",
        )
        outcome = closed_loop(f"http://127.0.0.1:{port}", requests_of(make_queries(articles, 100_000, 5)), 1, 20)
        full = process.memory_full_info()
        print(f", after {len(outcome.accepted)} searches {full.rss / 2**20:.0f} MB ({full.uss / 2**20:.0f} MB its own)")
        print(f"one search after another: p50 {outcome.quantile(0.5):.1f} ms, p99 {outcome.quantile(0.99):.1f} ms")
    print(f"wiki-18 at these bytes a passage: {WIKI_18 * size / n / 2**30:.1f} GiB mapped")


if __name__ == "__main__":
    main()
