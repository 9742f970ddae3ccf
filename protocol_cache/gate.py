"""The quality gate: four automatic checks that a protocol must pass to enter the cache (stage C)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol_cache.grounding import find_span
from protocol_cache.leaks import UNSPACED, hindsight
from protocol_cache.schema import SCHEMA_VERSION, draft_error, validate_protocol

if TYPE_CHECKING:
    from protocol_cache.synthesis.state import Gold

#: In the order in which they are reported.
CHECKS = ("schema", "exact_match", "grounding", "leak")

#: What a chat template or the agent loop would read as its own: it must not come in by way of a passage.
_MARKUP = re.compile(
    r"<\|[^<>|]{0,40}\|>|</?(?:search|answer|information|think|tool_call|tool_response)\b[^<>]*>|\[/?INST\]", re.I
)
_INSTRUCTION = re.compile(
    r"\b(?:ignore|disregard|forget)\b.{0,30}\b(?:previous|above|prior|earlier|all)\b.{0,30}\b(?:instruction|prompt|rule)"
    r"|\b(?:system|developer) prompt\b|\byou are (?:now )?an? (?:ai|assistant|language model)\b"
    r"|\b(?:reply|respond|answer) (?:only )?with\b",
    re.I | re.S,
)


@dataclass(frozen=True)
class Verdict:
    """What the gate says about one candidate.

    ``protocol`` is the finished protocol if it passed, else None. ``problems`` maps each failed check to
    its reason; no reason quotes a gold answer.
    """

    protocol: dict[str, Any] | None
    problems: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return self.protocol is not None

    @property
    def failed_check(self) -> str | None:
        """The first check that failed."""
        return next((check for check in CHECKS if check in self.problems), None)

    @property
    def reason(self) -> str | None:
        """All failed checks with their reasons in one line."""
        return "; ".join(f"{c}: {self.problems[c]}" for c in CHECKS if c in self.problems) or None


def judge(
    draft: Any, variant: str, question: str, passages: Mapping[str, str], gold: Gold, normalize: str = "none"
) -> Verdict:
    """Put a draft (what the protocolizer wrote) to the gate.

    1. schema: the draft's fields and types (``schema.draft_error``), and no chat or agent markup in any text;
    2. exact_match: for "succeeded", the answer matches a gold answer;
    3. grounding: every fact is a substring, character for character, of the retrieved passage it names, cut between
       words, of two words or more, and no instruction to a model;
    4. leak: no plan step holds a gold answer, unless the question does, nor a name or number that the facts brought.

    Args:
        passages: contents of the passages that were retrieved for this question, by id.
        normalize: how a fact may differ from its passage (``grounding.NORMALIZATIONS``). The protocol always keeps the
            passage's own characters.
    """
    problem = draft_error(draft, variant) or _markup_problem(draft)
    if problem:
        return Verdict(None, {"schema": problem})
    problems: dict[str, str] = {}
    if variant == "succeeded" and not gold.matches(draft["answer"]):
        problems["exact_match"] = "the answer is not the verified one"
    facts: list[dict[str, Any]] = []
    for number, fact in enumerate(draft["grounding_facts"], start=1):
        cut = cut_fact(fact["passage_id"], fact["text"], passages, normalize)
        if isinstance(cut, str):
            problems.setdefault("grounding", f"fact {number}: {cut}")
        else:
            facts.append(cut)
    for number, step in enumerate(draft["reasoning_plan"], start=1):
        if gold.leaks_into(step, question):
            problems.setdefault("leak", f"plan step {number} names the answer")
    early = hindsight(draft["reasoning_plan"], question, facts, passages)
    if early and "leak" not in problems:
        problems["leak"] = f"plan step {early[0]} names {early[1]!r}, which only the search brought to light"
    if problems:
        return Verdict(None, problems)
    protocol = {"schema_version": SCHEMA_VERSION, "variant": variant, **draft, "grounding_facts": facts}
    return Verdict(validate_protocol(protocol), {})


def cut_fact(passage_id: str, text: str, passages: Mapping[str, str], normalize: str = "none") -> dict[str, Any] | str:
    """The fact with its character span in the passage's contents, or why there is none."""
    contents = passages.get(passage_id)
    if contents is None:
        return f"passage {passage_id!r} was not retrieved"
    span = find_span(text, contents, normalize)
    if span is None:
        return f"not a verbatim part of passage {passage_id!r}: {_short(text)!r}"
    if not span.whole_words:
        return f"cut within a word or number of passage {passage_id!r}: {_short(text)!r}"
    text = contents[span.start : span.end]
    if len(text.split()) < 2 and not UNSPACED.search(text):
        return f"a single word says nothing: {_short(text)!r}"
    if _INSTRUCTION.search(text):
        return f"reads as an instruction to a model: {_short(text)!r}"
    return {"passage_id": passage_id, "text": text, "start": span.start, "end": span.end}


def _markup_problem(draft: Mapping[str, Any]) -> str | None:
    texts = [("answer", draft.get("answer") or "")]
    texts += [(f"grounding_facts[{i}].text", fact["text"]) for i, fact in enumerate(draft["grounding_facts"])]
    for name in ("reasoning_plan", "partial_findings"):
        texts += [(f"{name}[{i}]", line) for i, line in enumerate(draft.get(name) or ())]
    for where, text in texts:
        if found := _MARKUP.search(text):
            return f"{where}: holds {found[0]!r}, which a chat template or the agent would read as its own"
    return None


def grounding_problem(protocol: Mapping[str, Any], passages: Mapping[str, str]) -> str | None:
    """Why a finished protocol's facts do not fit these passages, or None: for checks against another corpus."""
    for number, fact in enumerate(protocol["grounding_facts"], start=1):
        contents = passages.get(fact["passage_id"])
        if contents is None:
            return f"fact {number}: there is no passage {fact['passage_id']!r}"
        if contents[fact["start"] : fact["end"]] != fact["text"]:
            return f"fact {number}: passage {fact['passage_id']!r} reads otherwise at {fact['start']}:{fact['end']}"
    return None


def _short(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[:length] + "..."
