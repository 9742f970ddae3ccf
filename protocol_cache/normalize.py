"""Answer normalisation and exact match, as Search-R1 scores them (so that published EM stays comparable)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower case, ASCII punctuation deleted, the articles a/an/the removed, white space collapsed."""
    bare = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, golden_answers: Iterable[str]) -> bool:
    """Whether ``prediction`` equals one of ``golden_answers`` in normal form.

    An empty normal form matches nothing (else an empty answer would match the band "The The"): there
    the raw texts are compared, case folded.
    """
    normal = normalize_answer(prediction)
    raw = prediction.strip().casefold()
    for gold in golden_answers:
        if normal:
            if normal == normalize_answer(gold):
                return True
        elif raw and raw == gold.strip().casefold():
            return True
    return False
