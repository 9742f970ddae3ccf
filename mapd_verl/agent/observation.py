"""Search results, and what stands in for them, as the text and the tokens that the policy reads next.

``\\n\\n<information>Doc 1(Title: "T") text\\nDoc 2(...) ...</information>\\n\\n``, in Search-R1's form: a
passage's first line is its title, quotes kept. Each passage has a budget, and all together have one, so
that the closing tag is always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mapd_verl.agent.parser import ALL_TAGS

OPEN, CLOSE = "\n\n<information>", "</information>\n\n"

#: What the policy reads when there are no passages, by the kind of event. No tag is spelled out, so that
#: nothing here looks like an action.
NOTICES = {
    "no_hits": "No passage matches this query.",
    "empty_query": "The query was empty. Write words to search for.",
    "invalid_action": "No action was found. Write one search query or one answer inside its opening and closing tags.",
    "retrieval_failed": "The search service did not answer. No passages are available.",
}

#: The whole observation after a turn without an action, as the policy reads it.
INVALID_ACTION = OPEN + NOTICES["invalid_action"] + CLOSE


class PassageLike(Protocol):
    """What an observation needs of a retrieved passage."""

    @property
    def contents(self) -> str: ...


@dataclass(frozen=True)
class Observation:
    """``kind`` is ``passages`` or a key of :data:`NOTICES`; ``shortened`` counts passages that were cut."""

    kind: str
    text: str
    ids: tuple[int, ...]
    shortened: int = 0


def split_title(contents: str) -> tuple[str, str]:
    """``contents`` as (title, text). Without a line break all of it is the title, as in Search-R1."""
    title, _, text = contents.partition("\n")
    return title, text


class ObservationWriter:
    """Makes observations for one tokenizer and one pair of budgets (tokens)."""

    def __init__(self, tokenizer: Any, max_tokens: int, max_passage_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_passage_tokens = max_passage_tokens
        self._frame_tokens = len(self._encode(OPEN + CLOSE))
        # Text that the tokenizer would turn into a control token or a tag is data inside a passage.
        control = {*ALL_TAGS, *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._control = sorted((t for t in control if t.strip()), key=lambda t: (-len(t), t))

    def passages(self, passages: Sequence[PassageLike], budget: int) -> Observation | None:
        """The observation for a search result, at most ``budget`` tokens long.

        None if not even a shortened first passage fits. Zero passages give the ``no_hits`` notice.
        """
        if not passages:
            return self.notice("no_hits", budget)
        budget = min(budget, self._max_tokens)
        lines = [self._line(i, p) for i, p in enumerate(passages, 1)]
        encoded = [self._encode(line) for line in lines]
        share = self._shares([len(ids) for ids in encoded], budget - self._frame_tokens)
        # Cutting a text moves token borders, so that the whole can come out a little longer than its
        # parts: the shares shrink until it fits.
        while True:
            cut = [self._cut(*each) for each in zip(lines, encoded, share, strict=True)]
            kept = [line for line in cut if line.strip()]
            if not kept:
                return None
            text = OPEN + "\n".join(kept).strip() + CLOSE
            ids = self._encode(text)
            if len(ids) <= budget:
                shortened = sum(a != b for a, b in zip(cut, lines, strict=True))
                return Observation("passages", text, tuple(ids), shortened)
            over = len(ids) - budget
            widest = max(range(len(share)), key=lambda i: share[i])
            share[widest] = max(0, share[widest] - over)

    def notice(self, kind: str, budget: int) -> Observation | None:
        """A typed observation without passages; None where it does not fit ``budget``. It is never cut."""
        text = OPEN + NOTICES[kind] + CLOSE
        ids = self._encode(text)
        return Observation(kind, text, tuple(ids)) if len(ids) <= budget else None

    def _line(self, number: int, passage: PassageLike) -> str:
        title, text = split_title(self._defuse(passage.contents))
        return f"Doc {number}(Title: {title}) {text}".rstrip()

    def _defuse(self, text: str) -> str:
        for control in self._control:
            if control in text:
                text = text.replace(control, control.replace("<", "‹").replace(">", "›"))
        return text

    def _shares(self, lengths: list[int], budget: int) -> list[int]:
        """Tokens for each passage: none above its own budget, the rest shared out evenly from the shortest up."""
        wanted = [min(length, self._max_passage_tokens) for length in lengths]
        left, shares = max(0, budget), [0] * len(wanted)
        order = sorted(range(len(wanted)), key=lambda i: wanted[i])
        for position, i in enumerate(order):
            shares[i] = min(wanted[i], left // (len(order) - position))
            left -= shares[i]
        return shares

    def _cut(self, line: str, ids: list[int], tokens: int) -> str:
        if len(ids) <= tokens:
            return line
        text = self._tokenizer.decode(ids[:tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # A cut inside a multi-byte character leaves U+FFFD, which the line itself does not hold there.
        while text and not line.startswith(text):
            text = text[:-1]
        return text.rstrip()

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]
