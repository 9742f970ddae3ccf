"""Leak detection: whether a plan names its answer, or anything that only the search brought to light."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ARTICLES = frozenset({"a", "an", "the"})
# Scripts written without spaces have no words to compare: there a substring counts.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def _words(text: str, separator: str) -> list[str]:
    """Case folded words without accents and articles, punctuation and symbols replaced by ``separator``.

    Invisible characters vanish, and Greek and Cyrillic letters that look like Latin ones count as those.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold()).translate(_LOOKALIKES)
    kept = []
    for char in folded:
        kind = unicodedata.category(char)
        if kind[0] in "PS":
            kept.append(separator)
        elif kind not in ("Mn", "Cf"):
            kept.append(char)
    return [word for word in "".join(kept).split() if word not in _ARTICLES]


_LOOKALIKES = str.maketrans("аеорсухіјѕһԁԛԝвкмнтαεορυχικντ", "aeopcyxijshdqwbkmhtaeopyxiknt")
_SPELLED = re.compile(r"(?<!\w)(?:\w[\s.\-_·]+){2,}\w(?!\w)")


def _joined_letters(text: str) -> str:
    """``P a r i s`` and ``P-a-r-i-s`` written as one word."""
    return _SPELLED.sub(lambda found: "".join(c for c in found[0] if c.isalnum()), text)


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
        found = [*_words(text, separator), "|", *_words(_joined_letters(text), separator)]
        if any(UNSPACED.search(word) for word in wanted):
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


_POLAR = {"yes": "no", "no": "yes"}
_VERDICT = r"\b(?:answer|result|outcome|verdict|is|are|be|say|reply|conclude|so|therefore)\b\W+(?:\w+\W+)?%s\b"


def leaks(text: str, answer: str, question: str) -> bool:
    """Whether ``text`` holds ``answer`` though ``question`` does not.

    "yes" and "no" are words of any plan ("whether or no"): they leak only where a step says that they are the outcome,
    and not their contrary too.
    """
    other = _POLAR.get(answer.strip().casefold())
    if other is not None:
        said = text.casefold()
        stated = re.search(_VERDICT % re.escape(answer.strip().casefold()), said)
        return bool(stated) and not re.search(rf"\b{other}\b", said)
    return mentions(text, answer) and not mentions(question, answer)


_WORD = re.compile(r"[^\W_](?:[\w'’]|-(?=\w))*|\d[\d.,]*\d|\d")
_SENTENCE_END = re.compile(r"(?:^|[.!?:;\"“”\n(])\s*$")
# fmt: off
_IMPERATIVES = frozenset((
    "ask", "check", "compare", "confirm", "count", "decide", "determine", "establish", "find", "get", "identify",
    "list", "locate", "look", "name", "note", "read", "search", "see", "settle", "take", "tell", "use", "verify",
    "work",
))
# fmt: on


def hindsight(
    plan: Sequence[str], question: str, facts: Iterable[Mapping[str, Any]], passages: Mapping[str, str]
) -> tuple[int, str] | None:
    """The first plan step (from 1) that names what only the facts brought to light, and the name; None if none does.

    A plan is to read as if written before any search, so a name that the question does not hold has no place in any
    step, an earlier or a later one. A *name* is a word of a fact, or of its passage's title, that the retrieved
    passages write with a capital within a sentence and never without; or a number of two digits or more.
    """
    texts = list(passages.values())
    capital, small = set(), {w.casefold() for w in _WORD.findall(question)}
    for text in texts:
        for match in _WORD.finditer(text):
            word = match[0]
            if word[0].isupper():
                if not _SENTENCE_END.search(text[max(0, match.start() - 3) : match.start()]):
                    capital.add(word.casefold())
            else:
                small.add(word.casefold())
    asked = set(_words(question, " ")) | set(_words(question, ""))
    named: set[str] = set()
    for fact in facts:
        title = passages[fact["passage_id"]].partition("\n")[0]
        for word in _WORD.findall(f"{title} {fact['text']}"):
            folded = _bare(word)
            number = sum(c.isdigit() for c in word) >= 2
            proper = word[0].isupper() and len(word) > 2 and word.casefold() in capital and word.casefold() not in small
            if (number or proper) and folded and folded not in asked:
                named.add(folded)
    for step_number, step in enumerate(plan, start=1):
        for place, word in enumerate(_WORD.findall(step)):
            if _bare(word) in named and not (place == 0 and word.casefold() in _IMPERATIVES):
                return step_number, word
    return None


def _bare(word: str) -> str:
    """A word as :func:`mentions` compares it, without a possessive ending."""
    return "".join(_words(re.sub(r"['’]s$", "", word), ""))
