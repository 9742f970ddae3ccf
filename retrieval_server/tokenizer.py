"""Text to search tokens, the same for passages and queries; only the standard library.

Made for names: no stop words are dropped and nothing is stemmed ("The Hague", "Of", "Reading" stay
what they are; BM25's idf already makes common words cheap). Case, width, accents, apostrophes and
thousands separators never decide a match, and scripts without spaces give character bigrams.
"""

from __future__ import annotations

import re
import unicodedata

#: Named in every index: another value means that the same text gives other tokens.
TOKENIZER = "names-1"

# Letters that Unicode does not decompose into a base letter and an accent.
_PLAIN_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "ŧ": "t", "æ": "ae", "œ": "oe", "þ": "th", "ŋ": "ng"}
)
# Every sign that is written for an apostrophe, an ʿayn or a hamza in romanised names.
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘ʼʻʾʿ`´′ʹꞌ＇‛", "'"))
# Accents proper. Vowel signs of Indic scripts and Japanese voicing marks are left alone: they
# change the word, not its spelling.
_ACCENTS = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # kana and iteration marks
    "\u1100-\u11ff\uac00-\ud7af"  # Hangul
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"  # Han
)


def _mark_ranges() -> str:
    """The character-class body of all combining marks: ``\\w`` leaves them out and would cut words there."""
    ranges: list[list[int]] = []
    for code in range(0x20000):
        if unicodedata.category(chr(code)).startswith("M"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


_WORD = re.compile(rf"(?:[^\W_]|[{_mark_ranges()}])+(?:'(?:[^\W_]|[{_mark_ranges()}])+)*")


def normalize(text: str) -> str:
    """NFKC, casefold, accents folded, apostrophes unified, thousands separators removed."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFD", text))
        text = unicodedata.normalize("NFKC", text).translate(_PLAIN_LETTERS).translate(_APOSTROPHES)
    return _THOUSANDS.sub("", text)


def tokenize(text: str) -> list[str]:
    """Search tokens of ``text`` in order, repeats kept; empty when it holds no letter and no digit.

    A word with apostrophes gives its joined form ("sana'a" -> "sanaa") and, when it ends in ``'s``,
    also the form without it. A run of an unspaced script gives its characters and its bigrams, so
    that a one-character query finds something and a longer one ranks whole matches first.
    """
    tokens: list[str] = []
    for word in _WORD.findall(normalize(text)):
        if word.isascii():
            if "'" in word:
                tokens.append(word.replace("'", ""))
                if word.endswith("'s"):
                    tokens.append(word[:-2].replace("'", ""))
            else:
                tokens.append(word)
            continue
        word = word.replace("'", "")
        position = 0
        for run in _UNSPACED.finditer(word):
            if run.start() > position:
                tokens.append(word[position : run.start()])
            characters = run.group()
            tokens.extend(characters)
            tokens.extend(characters[i : i + 2] for i in range(len(characters) - 1))
            position = run.end()
        if position < len(word):
            tokens.append(word[position:])
    return tokens
