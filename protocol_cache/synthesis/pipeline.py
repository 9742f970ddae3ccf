"""One question through stages A (explore), B (compile) and C (gate)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from protocol_cache.gate import judge
from protocol_cache.store import Candidate
from protocol_cache.synthesis.orchestrator import FailedAttempt, Orchestrator
from protocol_cache.synthesis.protocolizer import Protocolizer
from protocol_cache.synthesis.repair import RepairAgent
from protocol_cache.synthesis.searcher import Searcher
from protocol_cache.synthesis.state import Exploration, Gold, Limits, Question, SynthesisError

if TYPE_CHECKING:
    from protocol_cache.synthesis.llm import Account, Teacher
    from retrieval_server.client import RetrievalClient

T = TypeVar("T")


@dataclass
class Outcome:
    """What became of a question: ``protocol`` if it passed, else the ``reason``, and everything on the way."""

    status: str = "failed"
    protocol: dict[str, Any] | None = None
    reason: str | None = None
    candidates: list[Candidate] = field(default_factory=list)
    exploration: Exploration = field(default_factory=Exploration)


class Team:
    """The agents, sharing one teacher and one retriever. Safe for many questions at once."""

    def __init__(self, teacher: Teacher, retriever: RetrievalClient, limits: Limits, normalize: str = "none") -> None:
        self._limits = limits
        self._normalize = normalize
        self._orchestrator = Orchestrator(teacher, limits)
        self._searcher = Searcher(teacher, retriever, limits)
        self._repair = RepairAgent(teacher)
        self._protocolizer = Protocolizer(teacher, limits)

    async def solve(self, question: Question, gold: Gold, account: Account) -> Outcome:
        """The whole way for one question; a question that cannot be finished has the status "failed".

        Raises:
            TeacherUnusable: the teacher is of no use for any question.
        """
        outcome = Outcome()
        try:
            answer = await self._explore(question, gold, outcome.exploration, account)
            await self._compile(question, gold, answer, outcome, account)
        except SynthesisError as error:
            outcome.status, outcome.reason = "failed", str(error)
        return outcome

    async def _explore(self, question: Question, gold: Gold, exploration: Exploration, account: Account) -> str | None:
        """Stage A: the verified answer, or None. Of ``gold`` it learns one bit a check and a diagnosis."""
        answer = await self._research(question, exploration, None, [], account)
        rejected: list[str] = []
        for repairs_left in range(self._limits.repairs, -1, -1):
            matches = answer is not None and gold.matches(answer)
            exploration.note("check", answer=answer, matches=matches)
            if matches:
                return answer
            if not repairs_left:
                break
            diagnosis = await self._repair.diagnose(question, gold, answer, exploration, account)
            if diagnosis is None:
                break
            if answer is not None and answer not in rejected:
                rejected.append(answer)
            if diagnosis.kind == "expression":
                _, answer = await self._orchestrator.synthesize(question, exploration, [], 0, rejected, account)
            else:
                failed = FailedAttempt(answer, diagnosis.suspect_subtasks)
                answer = await self._research(question, exploration, failed, rejected, account)
        return None

    async def _research(
        self,
        question: Question,
        exploration: Exploration,
        failed: FailedAttempt | None,
        rejected: list[str],
        account: Account,
    ) -> str | None:
        """Rounds of decomposition, parallel search and synthesis, until there is an answer or none is to be had."""
        for rounds_left in range(self._limits.rounds - 1, -1, -1):
            levels = await self._orchestrator.decompose(question, exploration, failed, account)
            failed = None
            for number, level in enumerate(levels):
                findings = await _all(self._searcher.settle(question, task, exploration, account) for task in level)
                exploration.findings.update((finding.subtask.id, finding) for finding in findings)
                still_open = [task for later in levels[number + 1 :] for task in later]
                status, answer = await self._orchestrator.synthesize(
                    question, exploration, still_open, rounds_left, rejected, account
                )
                if status in ("answer", "no_answer"):
                    return answer
        return None

    async def _compile(
        self, question: Question, gold: Gold, answer: str | None, outcome: Outcome, account: Account
    ) -> None:
        """Stages B and C."""
        variant = "succeeded" if answer is not None else "evidence"
        passages = {p.id: p.contents for p in outcome.exploration.passages.values()}
        previous: dict[str, Any] | None = None
        for _ in range(self._limits.protocol_attempts):
            draft = await self._protocolizer.write(question, outcome.exploration, answer, previous, account)
            verdict = judge(draft, variant, question.text, passages, gold, self._normalize)
            outcome.exploration.note("gate", normalize=self._normalize, problems=verdict.problems)
            outcome.candidates.append(Candidate(draft, verdict.passed, verdict.failed_check, verdict.reason))
            outcome.reason = verdict.reason
            if verdict.passed:
                outcome.status, outcome.protocol = "passed", verdict.protocol
                return
            outcome.status = "rejected"
            if variant == "evidence" and "leak" in verdict.problems:
                return  # to say why would tell the protocolizer that the plan names the gold answer
            previous = {"draft": draft, "reason": verdict.reason}


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. If one fails, the others are cancelled and awaited before the error goes on."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
