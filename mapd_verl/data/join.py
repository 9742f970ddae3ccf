"""Questions meet their protocols: the join by question id, without verl and without torch.

The join itself reads no protocol: it sorts the questions into :data:`STATES` by a few columns of the cache. Texts are
read and rendered one at a time, when a row is asked for, so that 170,000 questions cost neither time nor memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mapd_verl.errors import UserError

if TYPE_CHECKING:
    from protocol_cache.store import ProtocolStore, Record

logger = logging.getLogger(__name__)

#: What happens to a training question without a usable protocol: the own-rollout baseline of the recipe
#: (``privilege.fallback``), out of the training set, or a refusal to start.
POLICIES = ("fallback", "skip", "error")
#: A protocol that a person marked as bad may also be used all the same.
REVIEWED_POLICIES = ("keep", *POLICIES)

#: Where a question can stand, each with the policy that decides on it (None: its protocol is used).
STATES: dict[str, str | None] = {
    "joined": None,
    "missing": "missing",  # not in the cache
    "failed": "missing",  # synthesis gave no candidate: to the trainer as if it were not there
    "rejected": "rejected",  # the gate refused every candidate
    "withdrawn": "rejected",  # passed, then withdrawn by a person
    "stale_schema": "stale",  # passed, under another protocol schema
    "stale_corpus": "stale",  # passed, over another corpus
    "reviewed_bad": "reviewed_bad",  # passed, then marked as bad by a person
}


@dataclass(frozen=True)
class JoinPolicies:
    """What to do with each kind of question that has no protocol fit for use. ``corpus_hash`` None compares none."""

    missing: str = "fallback"
    rejected: str = "fallback"
    stale: str = "error"
    reviewed_bad: str = "fallback"
    corpus_hash: str | None = None

    def action(self, state: str) -> str:
        """``use``, ``fallback``, ``skip`` or ``error`` for a question in this state."""
        name = STATES[state]
        policy = "use" if name is None else getattr(self, name)
        return "use" if policy == "keep" else policy


@dataclass(frozen=True)
class Budget:
    """At most ``tokens`` tokens, as ``count`` counts them in a text: the student's tokenizer."""

    tokens: int
    count: Callable[[str], int]


@dataclass(frozen=True)
class Joined:
    """What a row gains: the rendered text ("" where none is used), the protocol's task type, the question's state."""

    text: str
    task_type: str
    state: str


@dataclass(frozen=True)
class Join:
    """Where each distinct question stands; :meth:`look_up` reads its protocol."""

    path: Path
    template: str
    states: dict[str, str]
    policies: JoinPolicies = JoinPolicies()
    _opened: _Stores = field(default_factory=lambda: _Stores(), repr=False, compare=False)

    @property
    def counts(self) -> dict[str, int]:
        """Distinct questions in each state, all states named."""
        found = Counter(self.states.values())
        return {state: found[state] for state in STATES}

    @property
    def texts(self) -> Mapping[str, str]:
        """The rendered protocols by question id; each is read when it is asked for."""
        return _Texts(self)

    def action(self, question_id: str) -> str:
        """What the policies say about this question (see :meth:`JoinPolicies.action`)."""
        return self.policies.action(self.states[question_id])

    def actions(self) -> dict[str, int]:
        """Distinct questions by action."""
        found: Counter[str] = Counter()
        for state, count in self.counts.items():
            found[self.policies.action(state)] += count
        return {action: found[action] for action in ("use", "fallback", "skip", "error")}

    def look_up(self, question_id: str, budget: Budget | None = None) -> Joined:
        """The row's share of the join.

        Under a budget whole parts of the protocol are left out (``protocol_cache.render.TRUNCATION_ORDER``). One whose
        core is still too long is not used: there is no text, and a warning names the question.

        Raises:
            UserError: the cache has lost the protocol since the join, or the template does not fit it.
        """
        state = self.states[question_id]
        if self.policies.action(state) != "use":
            return Joined("", "", state)
        record = self._opened.of(self.path).get(question_id)
        if record is None or record.protocol is None:
            raise UserError(f"{self.path}: question {question_id} had a protocol at the start and has none now")
        return Joined(self._render(record, budget), record.protocol.get("task_type", ""), state)

    def _render(self, record: Record, budget: Budget | None) -> str:
        from protocol_cache.render import render, render_within

        assert record.protocol is not None
        try:
            if budget is None:
                return render(record.protocol, self.template)
            fitting = render_within(record.protocol, self.template, budget.count, budget.tokens)
        except ValueError as error:
            raise UserError(str(error)) from error
        if fitting is None:
            logger.warning(
                "%s: question %s: its protocol does not fit in %d tokens even without facts and plan; it is not used",
                *(self.path, record.question_id, budget.tokens),
            )
            return ""
        return fitting.text

    def __str__(self) -> str:
        used = self.actions()["use"]
        others = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count and state != "joined")
        return f"{used} of {len(self.states)} questions have a protocol" + (f" ({others})" if others else "")


class _Stores:
    """One read-only handle for each process and thread: SQLite's must not cross a fork, and belong to a thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def of(self, path: Path) -> ProtocolStore:
        if getattr(self._local, "pid", None) != os.getpid():
            from protocol_cache.store import ProtocolStore

            # A parent's handle is left alone: to close it here would reach into the parent's.
            self._local.inherited = getattr(self._local, "store", None)
            self._local.store, self._local.pid = ProtocolStore(path, readonly=True), os.getpid()
        return self._local.store

    def __reduce__(self) -> Any:
        return _Stores, ()


class _Texts(Mapping[str, str]):
    def __init__(self, join: Join) -> None:
        self._join = join
        used = {state for state in STATES if join.policies.action(state) == "use"}
        self._ids = {qid: None for qid, state in join.states.items() if state in used}

    def __getitem__(self, question_id: str) -> str:
        if question_id not in self._ids:
            raise KeyError(question_id)
        return self._join.look_up(question_id).text

    def __contains__(self, question_id: object) -> bool:
        return question_id in self._ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def join_protocols(
    path: str | Path,
    question_ids: Sequence[str],
    template: str = "compact",
    policies: JoinPolicies = JoinPolicies(),
) -> Join:
    """Look the questions up in the cache. The first protocols are rendered, so that a bad template is named now.

    Raises:
        UserError: if the cache cannot be read, a question falls under a policy of ``error`` (the first of each state
            is named), or the template is unknown or does not fit.
    """
    from protocol_cache.reviews import read_reviews
    from protocol_cache.schema import SCHEMA_VERSION
    from protocol_cache.store import ProtocolStore

    path = Path(path)
    with ProtocolStore(path, readonly=True) as store:
        origins = store.origins()
        reviews = read_reviews(path)

    def state_of(qid: str) -> str:
        origin = origins.get(qid)
        if origin is None:
            return "missing"
        status, corpus, schema = origin
        if status != "passed":
            return sys.intern(status)
        if schema != SCHEMA_VERSION:
            return "stale_schema"
        if policies.corpus_hash is not None and corpus != policies.corpus_hash:
            return "stale_corpus"
        review = reviews.get(qid)
        if review is not None and review.verdict == "withdrawn":
            return "withdrawn"
        return "reviewed_bad" if review is not None and review.verdict == "bad" else "joined"

    join = Join(path, template, {qid: state_of(qid) for qid in question_ids}, policies)
    refused = {s: n for s, n in join.counts.items() if n and policies.action(s) == "error"}
    if refused:
        told = []
        for state, count in refused.items():
            first = next(qid for qid, s in join.states.items() if s == state)
            policy = f"mapd.protocols.{STATES[state]}=error"
            detail = _stale_detail(state, origins.get(first), policies)
            told.append(f"{count} questions are {state}{detail} and {policy}; the first is {first}")
        raise UserError(f"{path}: " + "; ".join(told))
    texts = iter(join.texts)
    for _, qid in zip(range(8), texts, strict=False):
        join.look_up(qid)
    return join


def _stale_detail(state: str, origin: tuple[str, str, str] | None, policies: JoinPolicies) -> str:
    from protocol_cache.schema import SCHEMA_VERSION

    if origin is None or not state.startswith("stale"):
        return ""
    if state == "stale_schema":
        return f" (protocol schema {origin[2]!r}, this version reads {SCHEMA_VERSION!r})"
    return f" (corpus {origin[1][:12]}, the recipe's is {(policies.corpus_hash or '')[:12]})"


def corpus_hash(source: str | None) -> str | None:
    """The corpus hash that a recipe names: None, ``sha256:`` and 64 hex digits, or a corpus file, which is hashed.

    Raises:
        UserError: neither a hash nor a file.
    """
    if source is None:
        return None
    if source.startswith("sha256:"):
        digits = source.removeprefix("sha256:").lower()
        if not re.fullmatch("[0-9a-f]{64}", digits):
            raise UserError(f"mapd.protocols.corpus: want sha256: and 64 hex digits, got {source!r}")
        return digits
    if not Path(source).is_file():
        raise UserError(f"mapd.protocols.corpus: {source}: no such file (a hash is written sha256:...)")
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
