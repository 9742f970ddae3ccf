"""Whole runs with money: budget, rate limit, kills and resuming, against the rule-based teacher over real HTTP."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol_cache.calls import CallLog
from protocol_cache.store import ProtocolStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PRICE = (3.0, 15.0)


class Meter:
    """A proxy before the teacher that keeps the bill: latency, a limit a minute, and what was asked and answered."""

    def __init__(self, target: str, latency: float = 0.0, rpm: int | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.refused = 0
        self.bill = 0.0
        self.times: list[float] = []
        self._recent: deque[float] = deque()
        self._lock = threading.Lock()
        outer, client = self, httpx.Client(timeout=30)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(latency)
                status, content = outer._answer(client, target, body, rpm)
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client was killed

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, client: httpx.Client, target: str, body: bytes, rpm: int | None) -> tuple[int, bytes]:
        with self._lock:
            now = time.monotonic()
            while self._recent and self._recent[0] <= now - 60:
                self._recent.popleft()
            if rpm is not None and len(self._recent) >= rpm:
                self.refused += 1
                return 429, b'{"error": {"message": "slow down"}}'
            self._recent.append(now)
        answer = client.post(f"{target}/chat/completions", content=body, headers={"Content-Type": "application/json"})
        with self._lock:
            if answer.status_code == 200:
                usage = answer.json()["usage"]
                self.bill += (usage["prompt_tokens"] * PRICE[0] + usage["completion_tokens"] * PRICE[1]) / 1e6
                self.asked[body.decode()] += 1
                self.times.append(time.monotonic())
        return answer.status_code, answer.content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def meter(teacher_url: str) -> Iterator[Any]:
    made: list[Meter] = []

    def make(**keys: Any) -> Meter:
        made.append(Meter(teacher_url, **keys))
        return made[-1]

    yield make
    for one in made:
        one.close()


def command(world: Path, out: Path, retriever_url: str, url: str, *extra: str) -> list[str]:
    base = [sys.executable, "-m", "protocol_cache", "synthesize", "--questions", str(world / "train.parquet")]
    base += ["--out", str(out), "--retriever", retriever_url, "--model", "openai/geonames-rules", "--api-base", url]
    return [*base, "--price", str(PRICE[0]), str(PRICE[1]), "--corpus", str(world / "corpus.jsonl"), *extra]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)


def test_the_ledger_is_the_bill_and_a_second_run_pays_nothing(world, tmp_path, retriever_url, meter):
    server, out = meter(), tmp_path / "cache.sqlite"
    done = run(command(world, out, retriever_url, server.url))
    assert done.returncode == 0, done.stderr
    calls, _, spent = CallLog(out).spent()
    assert spent == pytest.approx(server.bill, abs=1e-9) and calls == sum(server.asked.values())
    assert max(server.asked.values()) == 1
    # Making every protocol again asks the teacher next to nothing: what is asked anew is not the same call, since
    # searchers that work side by side report in another order.
    import sqlite3

    with sqlite3.connect(out) as db:
        db.executescript("PRAGMA foreign_keys = ON; DELETE FROM records;")
    paid = server.bill
    assert run(command(world, out, retriever_url, server.url)).returncode == 0
    assert server.bill <= 1.03 * paid
    assert max(server.asked.values()) == 1, "an identical call was paid twice"
    assert CallLog(out).spent()[2] == pytest.approx(server.bill, abs=1e-9)


@pytest.mark.parametrize("concurrency", ["1", "32"])
def test_a_budget_is_never_exceeded_and_is_used_up(world, tmp_path, retriever_url, meter, concurrency):
    whole = meter()
    run(command(world, tmp_path / "whole.sqlite", retriever_url, whole.url))
    server, out, budget = meter(), tmp_path / "cache.sqlite", 0.5 * whole.bill
    options = ("--concurrency", concurrency, "--budget-usd", f"{budget:.6f}", "--max-tokens", "400")
    done = run(command(world, out, retriever_url, server.url, *options))
    assert done.returncode == 3, done.stderr
    assert "--budget-usd" in done.stderr and "goes on" in done.stderr
    spent = CallLog(out).spent()[2]
    assert spent == pytest.approx(server.bill, abs=1e-9)
    bound = 0.02  # one call's upper bound at these prices
    assert budget - bound <= spent <= budget
    more = run(command(world, out, retriever_url, server.url, *options[:2], "--budget-usd", "99", *options[4:]))
    assert more.returncode == 0, more.stderr
    # All that was paid before is used: both runs together cost about what one run costs, and nothing is asked twice.
    assert server.bill == pytest.approx(whole.bill, rel=0.05)
    assert max(server.asked.values()) == 1


def test_the_rate_limit_is_kept_to_and_used(world, tmp_path, retriever_url, meter):
    server = meter(latency=0.3, rpm=240)
    started = time.monotonic()
    arguments = command(world, tmp_path / "c.sqlite", retriever_url, server.url, "--rpm", "240", "--concurrency", "64")
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert server.refused <= 2  # arrivals on a busy machine
    busy = server.times[-1] - server.times[0]
    # From the first answer to the last; the last wave of a question's own calls waits for each other.
    steady = [t for t in server.times if t < server.times[0] + 0.7 * busy]
    rate = (len(steady) - 1) / (steady[-1] - steady[0]) * 60
    assert rate >= 0.95 * 240, (rate, time.monotonic() - started)


#: A longer run of the same: MAPD_KILLS=100 MAPD_KILL_QUESTIONS=500 python -m pytest -s ... -k kills
KILLS, QUESTIONS = (
    int(os.environ.get(name, default)) for name, default in (("MAPD_KILLS", 6), ("MAPD_KILL_QUESTIONS", 60))
)


def test_kills_lose_nothing_and_repeat_no_finished_call(world, tmp_path, retriever_url, meter):
    if QUESTIONS != 60:
        from mapd_verl.data.geonames.build import WorldConfig, build_world

        world = tmp_path / "world"
        build_world(world, WorldConfig(cities=600, train=QUESTIONS, val=5, test=5))
    server, out = meter(latency=0.02), tmp_path / "cache.sqlite"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    chooser, kills, kept = random.Random(0), 0, set()
    arguments = command(world, out, retriever_url, server.url, "--concurrency", "8")
    while kills < KILLS:
        child = subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen = sum(server.asked.values())
        while sum(server.asked.values()) < seen + chooser.randint(3, 10 * QUESTIONS // KILLS) and child.poll() is None:
            time.sleep(0.01)
        if child.poll() is not None:
            break
        child.send_signal(signal.SIGKILL)
        child.wait()
        kills += 1
        with ProtocolStore(out, readonly=True) as store:
            now = {record.question_id for record in store}
        assert kept <= now, "a protocol was lost"
        kept = now
    assert run(arguments).returncode == 0
    assert kills >= 3
    import sqlite3

    with sqlite3.connect(out) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM reservations").fetchone() == (0,)
    # A call may be asked again only if it was under way at a kill (8 at most each time): its answer was never kept.
    repeated = sum(count - 1 for count in server.asked.values())
    assert repeated <= 8 * kills
    print(
        f"{kills} kills, {sum(server.asked.values())} calls answered, {repeated} asked again, {len(kept)} records kept"
    )
    uncertain = sum(a["calls"] for a in CallLog(out).accounts() if a["kind"] == "uncertain")
    assert repeated <= uncertain <= 8 * kills


def test_a_dry_run_prices_the_job(world, tmp_path, retriever_url, meter):
    server, out = meter(), tmp_path / "cache.sqlite"
    done = run(command(world, out, retriever_url, server.url, "--dry-run", "20"))
    assert done.returncode == 0, done.stderr
    found = re.search(r"60 questions by 20 of them: ([\d.]+) dollars \[([\d.]+), ([\d.]+)\]", done.stdout)
    assert found, done.stdout
    low, high = float(found[2]), float(found[3])
    assert run(command(world, out, retriever_url, server.url)).returncode == 0
    assert 0.8 * low <= server.bill <= 1.2 * high
    assert json.loads(json.dumps(server.asked.most_common(1)))[0][1] == 1, "the sample's calls were not made again"
