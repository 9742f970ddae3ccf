"""A searcher: settles one sub-task by a few queries and compresses what it read into one finding."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from protocol_cache.schema import compile_schema
from protocol_cache.synthesis.state import Exploration, Finding, Limits, Passage, Question, SubTask, SynthesisError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

    from protocol_cache.synthesis.llm import Account, Teacher
    from retrieval_server.client import RetrievalClient


class RetrieverError(SynthesisError):
    """The retriever did not answer: this is no evidence, so the question is left for the next run."""


@lru_cache(maxsize=1)
def _schema() -> Validator:
    text = {"type": "string", "pattern": "\\S"}
    return compile_schema(
        {
            "type": "object",
            "properties": {
                "action": {"enum": ["search", "report"]},
                "queries": {"type": "array", "items": {**text, "maxLength": 300}},
                "finding": {**text, "maxLength": 2000},
                "supported": {"type": "boolean"},
                "passage_ids": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["action"],
        }
    )


class Searcher:
    """See the role prompt ``searcher``."""

    def __init__(self, teacher: Teacher, retriever: RetrievalClient, limits: Limits) -> None:
        self._teacher = teacher
        self._retriever = retriever
        self._limits = limits

    async def settle(self, question: Question, task: SubTask, exploration: Exploration, account: Account) -> Finding:
        """The finding for ``task``. What was read goes into ``exploration.passages``.

        Raises:
            TeacherError: no usable reply after the re-asks.
            RetrieverError: a search failed after the client's own retries.
        """
        queries: dict[str, list[str]] = {}  # query -> ids of its passages
        seen: dict[str, Passage] = {}
        given = [exploration.findings[d] for d in task.depends_on]
        while True:
            left = self._limits.queries - len(queries)
            reply = await self._teacher.ask(
                "searcher",
                {
                    "question": question.text,
                    "goal": task.goal,
                    "given": [{"goal": f.subtask.goal, "finding": f.text, "supported": f.supported} for f in given],
                    "queries_left": left,
                    "searches": [{"query": q, "passage_ids": ids} for q, ids in queries.items()],
                    "passages": [{"id": p.id, "contents": p.contents} for p in seen.values()],
                },
                _schema(),
                account,
                lambda reply: _problem(reply, left, queries, seen),  # noqa: B023 (called before the next turn)
            )
            if reply["action"] == "report":
                break
            asked = list(dict.fromkeys(q.strip() for q in reply["queries"]))[:left]
            results = await asyncio.gather(*(self._search(q) for q in asked))
            for query, passages in zip(asked, results, strict=True):
                queries[query] = [p.id for p in passages]
                seen.update((p.id, p) for p in passages)
                exploration.note("search", subtask=task.id, query=query, passage_ids=queries[query])
        finding = Finding(
            subtask=task,
            text=reply["finding"].strip(),
            supported=reply["supported"],
            passage_ids=tuple(dict.fromkeys(reply.get("passage_ids") or ())),
            queries=tuple(queries),
        )
        exploration.passages.update(seen)
        exploration.note("finding", subtask=task.id, finding=finding.text, supported=finding.supported)
        return finding

    async def _search(self, query: str) -> list[Passage]:
        result = await self._retriever.search(query)
        if not result.ok:
            raise RetrieverError(f"retriever, query {query!r}: {result.error} ({result.detail})")
        return [Passage(p.id, p.contents) for p in result.passages]


def _problem(reply: dict[str, Any], left: int, queries: dict[str, list[str]], seen: dict[str, Passage]) -> str | None:
    if reply["action"] == "search":
        if not left:
            return "action: no queries are left, report now"
        new = [q for q in reply.get("queries") or () if q.strip() not in queries]
        return None if new else "queries: there must be at least one that was not made before"
    for name in ("finding", "supported"):
        if name not in reply:
            return f"{name}: missing, a report needs it"
    unread = [i for i in reply.get("passage_ids") or () if i not in seen]
    if unread:
        return f"passage_ids: {unread[0]!r} is not among the passages you were shown"
    if reply["supported"] and not reply.get("passage_ids"):
        return "passage_ids: a supported finding must cite at least one passage"
    return None
