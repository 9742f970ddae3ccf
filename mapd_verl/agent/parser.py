"""Reading one turn of the policy: its action, and which of its tokens belong to it.

The rules are Search-R1's (``action_mode="compat"``). The turn's text is cut at its first ``</search>``,
else at its first ``</answer>``; the action is the first ``<search>...</search>`` or ``<answer>...</answer>``
of what is left. Search-R1 samples on and cuts afterwards; here sampling stops as soon as the cut cannot
change the action any more (:func:`is_closed`), with the same result for fewer tokens.

Tokens are never re-encoded: a cut keeps a prefix of the sampled ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ACTION_TAGS = ("search", "answer")
ALL_TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
# What was probably meant as a tag: other case, blanks or attributes inside the brackets.
_ALMOST_TAG = re.compile(r"<\s*/?\s*(?:search|answer)\b[^<>]*>", re.IGNORECASE)
# Queries that are only the words between two tags mentioned in passing ("use <search> and </search>").
STOP_WORD_QUERIES = frozenset({"", "and", "or", "the", "a", "an", "to", "query", "your query", "...", "tags"})


@dataclass(frozen=True)
class Action:
    """What a turn asks for. ``start`` and ``end`` bound the content in the turn's text, in characters;
    ``cut`` is where the turn ends. ``malformed`` names what was wrong with the text, in a fixed vocabulary."""

    kind: str  # "search", "answer" or "none"
    text: str  # the content, stripped
    start: int
    end: int
    cut: int
    malformed: tuple[str, ...] = ()


def is_closed(text: str, mode: str = "compat") -> bool:
    """Whether no further token can change the action of ``text``."""
    if mode == "compat" and "</search>" in text:
        return True
    found = _ACTION.search(text)
    if not found:
        return False
    if found.group(1) == "search":
        return True
    # An open <search> before the answer may still close, and the answer was then part of a query.
    if "<search>" in text[: found.start()]:
        return False
    # In compat a stray </answer> before this answer ends the turn, unless a </search> comes.
    return mode != "compat" or "</answer>" not in text[: found.start()]


def parse(text: str, mode: str = "compat") -> Action:
    """The action of one turn's text; ``kind`` is ``none`` where there is no complete one."""
    if mode not in ("compat", "strict"):
        raise ValueError(f"action mode: want compat or strict, got {mode!r}")
    cut = _compat_cut(text) if mode == "compat" else len(text)
    found = _ACTION.search(text[:cut])
    if found and mode == "strict":
        cut = found.end()
    malformed = _malformed(text[:cut], found)
    if not found:
        return Action("none", "", 0, 0, cut, malformed)
    return Action(found.group(1), found.group(2).strip(), found.start(2), found.end(2), cut, malformed)


def _compat_cut(text: str) -> int:
    first = _ACTION.search(text)
    if first and "</search>" not in text[: first.end()] and is_closed(text[: first.end()]):
        return first.end()  # an answer: a later </search> would not change it
    for tag in ("</search>", "</answer>"):
        at = text.find(tag)
        if at >= 0:
            return at + len(tag)
    return len(text)


def _malformed(text: str, found: re.Match[str] | None) -> tuple[str, ...]:
    flags = []
    before, content = (text[: found.start()], found.group(2)) if found else (text, "")
    for name in ACTION_TAGS:
        if f"<{name}>" in before:
            flags.append(f"unclosed_{name}")
        if f"</{name}>" in before:
            flags.append("stray_close")
    if text.count("<think>") != text.count("</think>"):
        flags.append("unbalanced_think")
    if "<information>" in text or "</information>" in text:
        flags.append("invented_information")
    if any(match.group(0) not in ALL_TAGS for match in _ALMOST_TAG.finditer(before)):
        flags.append("unknown_tag")
    if found:
        if any(tag in content for tag in ALL_TAGS):
            flags.append("nested_tag")
        if found.group(1) == "search" and content.strip().lower() in STOP_WORD_QUERIES:
            flags.append("stop_word_query" if content.strip() else "empty_query")
        if found.group(1) == "answer" and not content.strip():
            flags.append("empty_answer")
    return tuple(dict.fromkeys(flags))


class TurnReader:
    """Between sampled ids and text, for one tokenizer.

    Special tokens other than the tags (end of turn, padding) have no text here, as in Search-R1.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tag_ids = {tag: single_token_id(tokenizer, tag) for tag in ALL_TAGS}
        closing = [tag_ids["</search>"], tag_ids["</answer>"]]
        self.stop_token_ids: tuple[int, ...] = tuple(i for i in closing if i is not None)
        """Ids after which sampling pauses; empty where a closing tag is several tokens."""
        self.tags_are_single_tokens = len(self.stop_token_ids) == len(closing)
        if not self.tags_are_single_tokens:
            self.stop_token_ids = ()
        self._silent = set(tokenizer.all_special_ids) - {i for i in tag_ids.values() if i is not None}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, tags included."""
        kept = [int(i) for i in ids if i not in self._silent]
        return self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prefix_length(self, ids: Sequence[int], text: str, end: int) -> int:
        """The least number of ``ids`` whose decoded text holds ``text[:end]``.

        A prefix may end inside a multi-byte character, whose bytes decode to U+FFFD until it is
        complete: so texts are compared, not lengths.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self.decode(ids[:middle])[:end] == text[:end]:
                high = middle
            else:
                low = middle + 1
        return low

    def content_span(self, ids: Sequence[int], text: str, action: Action) -> tuple[int, int]:
        """Token positions ``[first, last)`` that hold nothing but the action's content.

        A token that spells part of a tag counts to the tag, as in EviSD's content mask.
        """
        if action.kind == "none":
            return 0, 0
        first = self.prefix_length(ids, text, action.start)
        last = self.prefix_length(ids, text, action.end)
        # The last token may also spell the "<" of the closing tag; then it is the tag's.
        if last > first and len(self.decode(ids[:last])) > action.end:
            last -= 1
        # The token that closes the opening tag may also spell the content's first letters.
        return first, max(first, last)


def single_token_id(tokenizer: Any, text: str) -> int | None:
    """The id that stands for ``text`` alone, or None where it takes several (or is unknown)."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
