"""Question ids: the key that joins a question to its protocol.

The id is the BLAKE2b digest (16 bytes, as 32 hex digits) of the UTF-8 JSON array ``[question, source, split]`` without
spaces, where the question is in the form of :func:`normalize_question`. Shipped caches rest on it: it never changes.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata

# Built once: json.dumps makes a new encoder for each call with separators, which is half of an id's time.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def normalize_question(question: str) -> str:
    """The form of ``question`` that is hashed.

    NFC, runs of white space become one space, and trailing question marks go, because Search-R1's data
    scripts append one where it is missing. Case is kept: it can tell two questions apart.
    """
    composed = question if question.isascii() else unicodedata.normalize("NFC", question)
    text = " ".join(composed.split())
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
    return hashlib.blake2b(_encode([normal, source, split]).encode(), digest_size=16).hexdigest()
