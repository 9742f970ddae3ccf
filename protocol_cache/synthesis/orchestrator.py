"""The orchestrator: splits a question into sub-tasks, and judges what their findings amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from protocol_cache.schema import TASK_TYPES, compile_schema
from protocol_cache.synthesis.state import Exploration, Limits, Question, SubTask

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

    from protocol_cache.synthesis.llm import Account, Teacher


@dataclass(frozen=True)
class FailedAttempt:
    """An answer that did not match, with the sub-tasks that the repair agent doubts. No gold in it."""

    answer: str | None
    suspect_subtasks: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _decompose_schema() -> Validator:
    text = {"type": "string", "pattern": "\\S", "maxLength": 500}
    return compile_schema(
        {
            "type": "object",
            "properties": {
                "task_type": {"enum": list(TASK_TYPES)},
                "subtasks": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "id": {**text, "maxLength": 40},
                            "goal": text,
                            "depends_on": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["id", "goal"],
                    },
                },
            },
            "required": ["task_type", "subtasks"],
        }
    )


@lru_cache(maxsize=1)
def _synthesize_schema() -> Validator:
    return compile_schema(
        {
            "type": "object",
            "properties": {
                "status": {"enum": ["continue", "answer", "search_more", "no_answer"]},
                "answer": {"type": ["string", "null"], "maxLength": 500},
            },
            "required": ["status"],
        }
    )


def topological_levels(subtasks: Iterable[SubTask], known: Iterable[str] = ()) -> list[list[SubTask]]:
    """Groups of sub-tasks in the order in which they can run; those of one group run side by side.

    Args:
        known: ids that are settled already and may be depended on.

    Raises:
        ValueError: a duplicate or taken id, a dependency on nothing, or a cycle; the message names it.
    """
    tasks, settled = list(subtasks), set(known)
    by_id: dict[str, SubTask] = {}
    for task in tasks:
        if task.id in settled:
            raise ValueError(f"id {task.id!r} is taken by an earlier round")
        if task.id in by_id:
            raise ValueError(f"id {task.id!r} is used twice")
        by_id[task.id] = task
    graph: dict[str, list[str]] = {}
    for task in tasks:
        for needed in task.depends_on:
            if needed not in by_id and needed not in settled:
                raise ValueError(f"sub-task {task.id!r} depends on {needed!r}, which does not exist")
        graph[task.id] = [d for d in task.depends_on if d in by_id]
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"the sub-tasks depend on each other in a circle: {' -> '.join(error.args[1])}") from error
    levels = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=list(by_id).index)
        levels.append([by_id[i] for i in ready])
        sorter.done(*ready)
    return levels


def _subtasks(reply: dict[str, Any]) -> list[SubTask]:
    return [SubTask(t["id"], t["goal"], tuple(t.get("depends_on") or ())) for t in reply["subtasks"]]


class Orchestrator:
    """See the role prompts ``orchestrator_decompose`` and ``orchestrator_synthesize``."""

    def __init__(self, teacher: Teacher, limits: Limits) -> None:
        self._teacher = teacher
        self._limits = limits

    async def decompose(
        self, question: Question, exploration: Exploration, failed: FailedAttempt | None, account: Account
    ) -> list[list[SubTask]]:
        """Sub-tasks in topological levels; also settles the exploration's ``task_type``.

        Raises:
            TeacherError: no valid decomposition after the re-asks.
        """
        known = exploration.findings

        def check(reply: dict[str, Any]) -> str | None:
            if len(reply["subtasks"]) > self._limits.subtasks:
                return f"subtasks: {len(reply['subtasks'])} of them, at most {self._limits.subtasks} are allowed"
            try:
                topological_levels(_subtasks(reply), known)
            except ValueError as error:
                return f"subtasks: {error}"
            return None

        inputs = {
            "question": question.text,
            "known": [finding.brief() for finding in known.values()],
            "failed": {"answer": failed.answer, "suspect_subtasks": failed.suspect_subtasks} if failed else None,
        }
        reply = await self._teacher.ask(
            "orchestrator_decompose",
            inputs,
            _decompose_schema(),
            account,
            check,
            max_subtasks=self._limits.subtasks,
        )
        exploration.task_type = reply["task_type"]
        levels = topological_levels(_subtasks(reply), known)
        exploration.note(
            "decompose",
            task_type=reply["task_type"],
            levels=[
                [{"id": t.id, "goal": t.goal, "depends_on": list(t.depends_on)} for t in level] for level in levels
            ],
        )
        return levels

    async def synthesize(
        self,
        question: Question,
        exploration: Exploration,
        open_tasks: list[SubTask],
        rounds_left: int,
        rejected: list[str],
        account: Account,
    ) -> tuple[str, str | None]:
        """How to go on, as ``(status, answer)``; ``answer`` is a text exactly if the status is "answer".

        Raises:
            TeacherError: no usable reply after the re-asks.
        """

        def check(reply: dict[str, Any]) -> str | None:
            status, answer = reply["status"], reply.get("answer")
            if status == "answer" and not (answer or "").strip():
                return 'answer: blank, though the status is "answer"'
            if status == "continue" and not open_tasks:
                return 'status: "continue", but no goals are open'
            if status == "search_more" and (open_tasks or not rounds_left):
                return 'status: "search_more" needs rounds_left above 0 and no open goals'
            return None

        inputs = {
            "question": question.text,
            "findings": [finding.brief() for finding in exploration.findings.values()],
            "open_goals": [task.goal for task in open_tasks],
            "rounds_left": rounds_left,
            "rejected_answers": rejected,
        }
        reply = await self._teacher.ask("orchestrator_synthesize", inputs, _synthesize_schema(), account, check)
        answer = reply["answer"].strip() if reply["status"] == "answer" else None
        exploration.note("synthesize", status=reply["status"], answer=answer)
        return reply["status"], answer
