"""The quality gate: four automatic checks that a protocol must pass to enter the cache (stage C)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol_cache.schema import SCHEMA_VERSION, draft_error, validate_protocol

if TYPE_CHECKING:
    from protocol_cache.synthesis.state import Gold

#: In the order in which they are reported.
CHECKS = ("schema", "exact_match", "grounding", "leak")


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


def judge(draft: Any, variant: str, question: str, passages: Mapping[str, str], gold: Gold) -> Verdict:
    """Put a draft (what the protocolizer wrote) to the gate.

    1. schema: the draft's fields and types (``schema.draft_error``);
    2. exact_match: for "succeeded", the answer matches a gold answer;
    3. grounding: every fact is a substring, character for character, of the retrieved passage it names;
    4. leak: no plan step holds a gold answer, unless the question does.

    Args:
        passages: contents of the passages that were retrieved for this question, by id.
    """
    problem = draft_error(draft, variant)
    if problem:
        return Verdict(None, {"schema": problem})
    problems: dict[str, str] = {}
    if variant == "succeeded" and not gold.matches(draft["answer"]):
        problems["exact_match"] = "the answer is not the verified one"
    facts: list[dict[str, Any]] = []
    for number, fact in enumerate(draft["grounding_facts"], start=1):
        cut = cut_fact(fact["passage_id"], fact["text"], passages)
        if isinstance(cut, str):
            problems.setdefault("grounding", f"fact {number}: {cut}")
        else:
            facts.append(cut)
    for number, step in enumerate(draft["reasoning_plan"], start=1):
        if gold.leaks_into(step, question):
            problems.setdefault("leak", f"plan step {number} names the answer")
    if problems:
        return Verdict(None, problems)
    protocol = {"schema_version": SCHEMA_VERSION, "variant": variant, **draft, "grounding_facts": facts}
    return Verdict(validate_protocol(protocol), {})


def cut_fact(passage_id: str, text: str, passages: Mapping[str, str]) -> dict[str, Any] | str:
    """The fact with its character span in the passage's contents, or why there is none."""
    contents = passages.get(passage_id)
    if contents is None:
        return f"passage {passage_id!r} was not retrieved"
    start = contents.find(text)
    if start < 0:
        return f"not a verbatim part of passage {passage_id!r}: {_short(text)!r}"
    return {"passage_id": passage_id, "text": text, "start": start, "end": start + len(text)}


def grounding_problem(protocol: Mapping[str, Any], passages: Mapping[str, str]) -> str | None:
    """Why a finished protocol's facts do not fit these passages, or None: for checks against another corpus."""
    for number, fact in enumerate(protocol["grounding_facts"], start=1):
        contents = passages.get(fact["passage_id"])
        if contents is None:
            return f"fact {number}: there is no passage {fact['passage_id']!r}"
        if contents[fact["start"] : fact["end"]] != fact["text"]:
            return f"fact {number}: passage {fact['passage_id']!r} reads otherwise at {fact['start']}:{fact['end']}"
    return None


_ARTICLES = frozenset({"a", "an", "the"})
# Scripts written without spaces have no words to compare: there a substring counts.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def _words(text: str, separator: str) -> list[str]:
    """Case folded words without accents and articles, punctuation and symbols replaced by ``separator``."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    kept = []
    for char in folded:
        kind = unicodedata.category(char)
        if kind[0] in "PS":
            kept.append(separator)
        elif kind != "Mn":
            kept.append(char)
    return [word for word in "".join(kept).split() if word not in _ARTICLES]


def mentions(text: str, answer: str) -> bool:
    """Whether ``text`` holds ``answer``, whatever its case, accents, articles, punctuation or plural s.

    Whole words only: "Niger" is not in "Nigeria". Punctuation is tried both as nothing and as a space, so
    that "Europe/Paris" is found in "Europe, Paris" and "1,234" in "1234".
    """
    seen_words = False
    for separator in ("", " "):
        wanted = _words(answer, separator)
        if not wanted:
            continue
        seen_words = True
        found = _words(text, separator)
        if any(_UNSPACED.search(word) for word in wanted):
            if "".join(wanted) in "".join(found):
                return True
            continue
        for begin in range(len(found) - len(wanted) + 1):
            window = found[begin : begin + len(wanted)]
            if window[:-1] == wanted[:-1] and window[-1] in (wanted[-1], wanted[-1] + "s"):
                return True
    if seen_words:
        return False
    raw = answer.strip().casefold()  # nothing but articles or punctuation: "The The", "C-- "
    return bool(raw) and raw in text.casefold()


def _short(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[:length] + "..."
