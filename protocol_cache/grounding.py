"""Where in a passage a fact was cut from, exactly or under a stated normalisation."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

#: How a fact may differ from its passage: not at all, in its white space, in composed or decomposed letters, in both.
NORMALIZATIONS = ("none", "whitespace", "nfc", "whitespace+nfc")

_PIECE = re.compile(r"\s+|.", re.DOTALL)


@dataclass(frozen=True)
class Span:
    """``contents[start:end]``, in code points; ``whole_words`` is False where it begins or ends within a word."""

    start: int
    end: int
    whole_words: bool


def find_span(text: str, contents: str, normalize: str = "none") -> Span | None:
    """The first occurrence of ``text`` that is cut between words, else the first of all; None if there is none.

    Raises:
        ValueError: an unknown normalisation.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize: choose from {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    places: list[tuple[int, int]]
    if normalize == "none":
        hay, places = contents, []
    else:
        hay, places = _normal(contents, normalize)
        text = _normal(text, normalize)[0].strip()
    first: Span | None = None
    at = hay.find(text) if text else -1
    while at >= 0:
        end = at + len(text)
        if _splits(places, at) or _splits(places, end):  # part of a letter with its marks is not that letter
            at = hay.find(text, at + 1)
            continue
        start, stop = (places[at][0], places[end - 1][1]) if places else (at, end)
        span = Span(start, stop, _between_words(contents, start) and _between_words(contents, stop))
        if span.whole_words:
            return span
        first = first or span
        at = hay.find(text, at + 1)
    return first


def _splits(places: list[tuple[int, int]], at: int) -> bool:
    return 0 < at < len(places) and places[at - 1] == places[at]


def _between_words(contents: str, at: int) -> bool:
    """Whether a cut at ``at`` splits no word, no number and no letter from its accent."""
    before, after = contents[max(0, at - 2) : at], contents[at : at + 2]
    if not before or not after:
        return True
    if unicodedata.combining(after[0]):
        return False
    if _unspaced(before[-1]) or _unspaced(after[0]):
        return True
    if before[-1].isalnum() and after[0].isalnum():
        return False
    # 1,234 and 3.5: the separator belongs to the number.
    left, right = before[-1], after[0]
    if left.isdigit() and right in ".," and after[1:].isdigit():
        return False
    return not (
        right.isdigit() and left in ".,-" and (before[:1].isdigit() or (left == "-" and not before[:1].isalnum()))
    )


def _unspaced(char: str) -> bool:
    from protocol_cache.leaks import UNSPACED

    return bool(UNSPACED.match(char))


def _normal(text: str, normalize: str) -> tuple[str, list[tuple[int, int]]]:
    """The normal form, and for each of its characters the span of ``text`` that it came from."""
    made: list[str] = []
    places: list[tuple[int, int]] = []
    pieces = [(m.start(), m.end()) for m in _PIECE.finditer(text)]
    at = 0
    while at < len(pieces):
        start, end = pieces[at]
        at += 1
        piece = text[start:end]
        if piece.isspace():
            normal = " " if "whitespace" in normalize else piece
        else:
            # NFC may join a letter with the marks and the Hangul vowels and finals behind it.
            while "nfc" in normalize and at < len(pieces) and _continues(text[pieces[at][0]]):
                end = pieces[at][1]
                at += 1
            piece = text[start:end]
            normal = unicodedata.normalize("NFC", piece) if "nfc" in normalize else piece
        if normal == piece and len(piece) > 1:
            places += [(i, i + 1) for i in range(start, end)]
        else:
            places += [(start, end)] * len(normal)
        made.append(normal)
    return "".join(made), places


def _continues(char: str) -> bool:
    return bool(unicodedata.combining(char)) or "\u1160" <= char <= "\u11ff"
