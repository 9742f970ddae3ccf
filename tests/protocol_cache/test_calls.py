"""The ledger: no budget is ever exceeded, by whatever many at once; nothing finished is lost or paid twice."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol_cache.calls import Bound, Budget, BudgetReached, CallLog, Reply, call_key, read_accounts
from protocol_cache.store import ProtocolStore
from protocol_cache.synthesis.rate import RateLimit

ROOT = Path(__file__).resolve().parents[2]
REPLY = Reply("text", "stop", 10, 5, 0.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ProtocolStore(tmp_path / "cache.sqlite").close()
    return tmp_path / "cache.sqlite"


def test_an_answer_comes_back_and_its_cost_is_entered_once(path: Path) -> None:
    log = CallLog(path)
    assert log.find("k") is None
    log.settle(log.reserve("repair", "m", Bound(100, 50, 1.0)), "k", "repair", "m", REPLY)
    assert log.find("k") == REPLY
    again = CallLog(path)
    assert again.find("k") == REPLY and again.spent() == (1, 15, 0.25)
    assert again.accounts() == [
        {
            "model": "m",
            "role": "repair",
            "kind": "settled",
            "calls": 1,
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "cost_usd": 0.25,
        }
    ]


def test_what_decides_an_answer_decides_the_key() -> None:
    base = ("searcher", "v1", "openai/m", {"temperature": 0.0, "max_tokens": 9}, [{"role": "user", "content": "x"}])
    keys = {call_key(*base)}
    for place, other in enumerate(("repair", "v2", "openai/n", {"temperature": 0.1, "max_tokens": 9}, [])):
        keys.add(call_key(*base[:place], other, *base[place + 1 :]))  # type: ignore[arg-type]
    assert len(keys) == 6
    assert call_key(*base) == call_key(*base[:3], {"max_tokens": 9, "temperature": 0.0}, base[4])
    call_key("r", "v", "m", {}, [{"role": "user", "content": "half \ud800 a pair"}])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.5, 5.0))
def test_the_budget_holds_whatever_the_order_of_reserving_settling_and_losing(tmp_path_factory, seed, limit):
    path = tmp_path_factory.mktemp("ledger") / "cache.sqlite"
    ProtocolStore(path).close()
    log, chooser, under_way, refused = CallLog(path, Budget(usd=limit)), random.Random(seed), [], 0
    for step in range(60):
        action = chooser.random()
        if action < 0.5:
            bound = chooser.uniform(0.01, 0.4)
            try:
                under_way.append((log.reserve("r", "m", Bound(10, 10, bound)), bound))
            except BudgetReached:
                refused += 1
        elif under_way:
            reservation, bound = under_way.pop(chooser.randrange(len(under_way)))
            if action < 0.8:
                used = Reply("x", "stop", 5, 5, chooser.uniform(0.0, bound))
                log.settle(reservation, f"{step}", "r", "m", used)
            elif action < 0.9:
                log.release(reservation)
            else:
                log.write_off(reservation)
        assert log.spent()[2] + sum(bound for _, bound in under_way) <= limit + 1e-9
    log.close()


@pytest.mark.parametrize(
    ("budget", "flag"), [(Budget(calls=3), "--budget-calls 3"), (Budget(tokens=60), "--budget-tokens 60")]
)
def test_budgets_in_calls_and_tokens(path: Path, budget: Budget, flag: str) -> None:
    log = CallLog(path, budget)
    for i in range(3):
        log.settle(log.reserve("r", "m", Bound(15, 5, 0.0)), str(i), "r", "m", Reply("", None, 15, 5, None))
    with pytest.raises(BudgetReached, match=flag):
        log.reserve("r", "m", Bound(15, 5, 0.0))


def test_two_processes_share_one_budget_to_the_cent(path: Path) -> None:
    script = (
        "import os; from protocol_cache.calls import *\n"
        f"log = CallLog({str(path)!r}, Budget(usd=1.0))\n"
        "try:\n"
        "    for i in range(10_000):\n"
        "        r = log.reserve('r', 'm', Bound(1, 1, 0.01))\n"
        "        log.settle(r, f'{os.getpid()}-{i}', 'r', 'm', Reply('', None, 1, 1, 0.01))\n"
        "except BudgetReached:\n    pass\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=env) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    calls, _, spent = CallLog(path).spent()
    assert calls == 100 and spent == pytest.approx(1.0)


def test_a_killed_process_leaves_its_reservation_counted(path: Path) -> None:
    script = (
        "import os, signal, sys; from protocol_cache.calls import *\n"
        f"CallLog({str(path)!r}).reserve('r', 'm', Bound(7, 3, 0.5)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    log = CallLog(path, Budget(usd=0.75))
    assert log.spent() == (1, 10, 0.5) and log.accounts()[0]["kind"] == "uncertain"
    with pytest.raises(BudgetReached):
        log.reserve("r", "m", Bound(7, 3, 0.5))


def test_a_living_process_keeps_its_reservation(path: Path) -> None:
    log = CallLog(path, Budget(usd=1.0))
    log.reserve("r", "m", Bound(1, 1, 0.6))
    other = CallLog(path, Budget(usd=1.0))
    assert other.spent()[0] == 0
    with pytest.raises(BudgetReached):
        other.reserve("r", "m", Bound(1, 1, 0.6))


def test_a_full_or_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database at all, but long enough to be looked at\n" * 20)
    with pytest.raises(Exception, match="cannot open its calls"):
        CallLog(tmp_path / "text")


def test_accounts_are_read_of_any_cache(path: Path) -> None:
    assert read_accounts(path) == []
    log = CallLog(path)
    log.settle(log.reserve("r", "m", Bound(1, 1, 0.0)), "k", "r", "m", REPLY)
    assert read_accounts(path) == log.accounts()


def test_calls_take_no_room_in_a_store_that_only_reads(path: Path) -> None:
    log = CallLog(path)
    log.settle(log.reserve("r", "m", Bound(1, 1, 0.0)), "k", "r", "m", REPLY)
    with ProtocolStore(path, readonly=True) as store:
        assert len(store) == 0 and store.stats()["records"] == 0
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0

        async def sleep(seconds: float) -> None:
            self.now += seconds

        monkeypatch.setattr(asyncio, "sleep", sleep)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rpm", "tpm", "tokens"), [(120, None, 50), (None, 6000, 50), (600, 6000, 50), (90, 60000, 50)]
)
def test_no_minute_holds_more_than_the_limits_and_little_is_wasted(monkeypatch, rpm, tpm, tokens) -> None:
    clock = Clock(monkeypatch)
    limit = RateLimit(rpm, tpm, clock)
    sent: list[float] = []

    async def run() -> None:
        for _ in range(400):
            await limit.wait(2 * tokens)
            sent.append(clock.now)
            limit.correct(2 * tokens, tokens)  # half of the bound was used

    asyncio.run(run())
    allowed = min(x for x in (rpm, tpm and tpm / tokens) if x is not None)
    for i, start in enumerate(sent):
        within = sum(1 for t in sent[i:] if t < start + 60)
        assert within <= allowed + 1
    assert len(sent) / (sent[-1] / 60) >= 0.95 * allowed


def test_without_limits_nobody_waits(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    asyncio.run(RateLimit(clock=clock).wait(10**9))
    assert clock.now == 0.0
