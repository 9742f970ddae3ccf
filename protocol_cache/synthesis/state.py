"""What the agents hand to each other, and who may see the gold answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from protocol_cache.normalize import exact_match

if TYPE_CHECKING:
    from protocol_cache.synthesis.repair import RepairAgent


class SynthesisError(Exception):
    """This question cannot be finished; the run goes on. The message is kept as the record's reason."""


@dataclass(frozen=True)
class Question:
    """A question as every agent may see it: there is no gold answer in it."""

    question_id: str
    text: str
    source: str
    split: str


class Gold:
    """The gold answers of one question, sealed.

    The pipeline can ask whether a candidate matches and the gate whether a plan leaks, both yes or no.
    The texts come out for a :class:`RepairAgent` alone, whose reply carries no free text. Neither
    ``repr`` nor pickling shows them, so no log can hold them by accident.
    """

    __slots__ = ("_answers",)

    def __init__(self, answers: Iterable[str]) -> None:
        self._answers = tuple(answers)
        if not self._answers or not all(isinstance(a, str) and a.strip() for a in self._answers):
            raise ValueError("gold answers must be one or more texts that are not blank")

    def matches(self, candidate: str) -> bool:
        """Exact match in Search-R1's normal form against any gold answer."""
        return exact_match(candidate, self._answers)

    def leaks_into(self, text: str, question: str) -> bool:
        """Whether ``text`` holds a gold answer that the question itself does not hold."""
        from protocol_cache.leaks import leaks

        return any(leaks(text, answer, question) for answer in self._answers)

    def reveal_to(self, agent: RepairAgent) -> tuple[str, ...]:
        """The gold answers, for a repair agent's diagnosis.

        Raises:
            PermissionError: anyone else asks.
        """
        from protocol_cache.synthesis.repair import RepairAgent

        if type(agent) is not RepairAgent:
            raise PermissionError(f"the gold answer is for the repair agent alone, not for {type(agent).__name__}")
        return self._answers

    def __repr__(self) -> str:
        return "Gold(sealed)"

    def __reduce__(self) -> Any:
        raise TypeError("a Gold is not pickled: it must not leave the process")


@dataclass(frozen=True)
class Passage:
    """A retrieved passage: ``contents`` is the quoted title, a newline and the text."""

    id: str
    contents: str


@dataclass(frozen=True)
class SubTask:
    """One piece of the question, with the ids of the sub-tasks whose findings it needs."""

    id: str
    goal: str
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What one searcher reports: one sentence, what it rests on, and the queries behind it."""

    subtask: SubTask
    text: str
    supported: bool
    passage_ids: tuple[str, ...]
    queries: tuple[str, ...]

    def brief(self) -> dict[str, Any]:
        """As other agents see it."""
        return {"id": self.subtask.id, "goal": self.subtask.goal, "finding": self.text, "supported": self.supported}


@dataclass
class Exploration:
    """Everything stage A did: what the protocolizer compiles, and what the cache keeps as the log."""

    task_type: str = "others"
    findings: dict[str, Finding] = field(default_factory=dict)
    passages: dict[str, Passage] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: str, **details: Any) -> None:
        """Add a line to the log."""
        self.events.append({"event": event, **details})

    def to_json(self) -> dict[str, Any]:
        """The log as the cache keeps it."""
        return {
            "task_type": self.task_type,
            "events": self.events,
            "findings": [asdict(f) for f in self.findings.values()],
            "passages": [asdict(p) for p in self.passages.values()],
        }


@dataclass(frozen=True)
class Limits:
    """How far the team may go on one question."""

    subtasks: int = 4
    """N: sub-tasks in one decomposition."""
    rounds: int = 2
    """R: decompositions that the orchestrator may ask for, the first included, between two checks."""
    queries: int = 3
    """Q: searches of one searcher."""
    repairs: int = 2
    """K: repairs after a failed check."""
    topk: int = 3
    """Passages a search."""
    passages: int = 20
    """Passages that the protocolizer reads, those that findings cite first."""
    protocol_attempts: int = 2
    """Protocols written before the question counts as rejected."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name == "repairs" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"limit {item.name} must be a whole number of at least {least}, got {value!r}")


@contextmanager
def because(what: str) -> Iterator[None]:
    """Name the step in the message of a SynthesisError."""
    try:
        yield
    except SynthesisError as error:
        raise SynthesisError(f"{what}: {error}") from error
