"""Question ids: the key that joins a question to its protocol."""

from __future__ import annotations

import hashlib
import json
import unicodedata


def normalize_question(question: str) -> str:
    """The form of ``question`` that is hashed.

    NFC, runs of white space become one space, and trailing question marks go, because Search-R1's data
    scripts append one where it is missing. Case is kept: it can tell two questions apart.
    """
    text = " ".join(unicodedata.normalize("NFC", question).split())
    return text.rstrip("?？ ")


def question_id(question: str, source: str, split: str) -> str:
    """32 hex digits (128 bits) that depend on the normalised question, its source and its split only.

    Raises:
        ValueError: if the question is blank, or if source or split is empty.
    """
    normal = normalize_question(question)
    if not normal:
        raise ValueError("a blank question has no id")
    if not source or not split:
        raise ValueError(f"question {question!r} needs a source and a split, got {source!r} and {split!r}")
    key = json.dumps([normal, source, split], ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
