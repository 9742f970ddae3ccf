"""Many questions: concurrency, resuming, progress, and when to give up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mapd_verl.errors import UserError
from protocol_cache.calls import BudgetReached
from protocol_cache.store import ProtocolStore, Provenance, Record, Usage
from protocol_cache.synthesis.llm import Account
from protocol_cache.synthesis.pipeline import Outcome, Team
from protocol_cache.synthesis.state import Gold, Question

if TYPE_CHECKING:
    from protocol_cache.synthesis.llm import TeacherConfig
    from retrieval_server.client import RetrievalClient

#: The corpus hash of a run that was not told its corpus.
UNKNOWN_CORPUS = "unknown"


@dataclass
class Tally:
    """Counts of one run (not of the whole store)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0
    #: Why the run ended before its questions did: the budget. None if it did not.
    stopped: str | None = None

    @property
    def done(self) -> int:
        """Questions that this run ended with a record."""
        return sum(self.outcomes.values())

    def add(self, record: Record) -> None:
        """Count a record."""
        self.outcomes[record.status] += 1
        if record.reason:
            self.reasons[record.reason] += 1
        self.calls += record.usage.calls
        if record.usage.cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + record.usage.cost_usd


@dataclass(frozen=True)
class Plan:
    """What a run has to do: ``todo``, of which ``stale`` had a record; ``finished`` questions are left alone."""

    todo: list[tuple[Question, Gold]]
    finished: int
    stale: int


def plan_run(
    questions: Sequence[tuple[Question, Gold]], store: ProtocolStore, provenance: Provenance, retry: Sequence[str] = ()
) -> Plan:
    """Which questions need work: those without a record, those that failed, and those whose record is stale.

    Stale is what was made for another corpus (where both hashes are known) or another schema version:
    its facts need not be there any more.

    Args:
        retry: "rejected" to work on those again too.
    """
    origins = store.origins()
    todo, stale = [], 0
    for question, gold in questions:
        status, corpus, schema = origins.get(question.question_id, (None, UNKNOWN_CORPUS, provenance.schema_version))
        other_corpus = UNKNOWN_CORPUS not in (corpus, provenance.corpus_hash) and corpus != provenance.corpus_hash
        outdated = other_corpus or schema != provenance.schema_version
        stale += outdated
        if outdated or status in (None, "failed") or status in retry:
            todo.append((question, gold))
    return Plan(todo, len(questions) - len(todo), stale)


async def synthesize(
    todo: Sequence[tuple[Question, Gold]],
    store: ProtocolStore,
    team: Team,
    provenance: Provenance,
    concurrency: int,
    on_record: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Work on the questions, ``concurrency`` at a time.

    Each record is in the store, for good, before its worker takes the next question. Cancelling loses
    only what is under way.

    Raises:
        UserError: ``max(20, 2 * concurrency)`` questions in a row failed: something is down or unusable.
        StoreError: a record could not be written.
    """
    tally = Tally()
    patience = max(20, 2 * concurrency)
    failures = 0
    exhausted: BudgetReached | None = None
    begin = time.monotonic()
    waiting: Iterator[tuple[Question, Gold]] = iter(todo)

    async def work() -> None:
        nonlocal failures
        nonlocal exhausted
        for question, gold in waiting:
            if exhausted is not None:
                return
            account, since = Account(), time.monotonic()
            try:
                outcome = await team.solve(question, gold, account)
            except BudgetReached as error:
                # Others may still end with the calls that they have paid for.
                exhausted = error
                return
            record = _record(question, outcome, account, time.monotonic() - since, provenance)
            store.put(record, outcome.candidates, outcome.exploration.to_json())
            tally.add(record)
            tally.seconds = time.monotonic() - begin
            on_record(tally)
            failures = failures + 1 if record.status == "failed" else 0
            if failures >= patience:
                raise UserError(f"{failures} questions in a row failed, the last one: {record.reason}")

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if exhausted is not None:
        tally.stopped = str(exhausted)
    return tally


def _record(question: Question, outcome: Outcome, account: Account, seconds: float, provenance: Provenance) -> Record:
    return Record(
        question_id=question.question_id,
        question=question.text,
        source=question.source,
        split=question.split,
        status=outcome.status,
        provenance=provenance,
        protocol=outcome.protocol,
        reason=outcome.reason,
        usage=Usage(account.calls, account.prompt_tokens, account.completion_tokens, account.cost_usd, seconds),
    )


async def check_retriever(retriever: RetrievalClient) -> None:
    """One search, so that a retriever that is down stops the run before any model call.

    Raises:
        UserError: naming the URL and the cause.
    """
    result = await retriever.search("capital city")
    if not result.ok:
        raise UserError(f"retriever: {result.error}: {result.detail}")


async def check_teacher(config: TeacherConfig, timeout: float = 5.0) -> None:
    """Open and close a connection to ``api_base``, if one is given.

    Raises:
        UserError: naming the URL and the cause.
    """
    from urllib.parse import urlsplit

    base = config.api_base
    if base is None:
        return
    parts = urlsplit(base)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise UserError(f"teacher: not the http URL of an API: {base!r}")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), timeout)
    except (OSError, asyncio.TimeoutError) as error:
        raise UserError(f"teacher {base}: {error or 'no connection'}") from error
    writer.close()
