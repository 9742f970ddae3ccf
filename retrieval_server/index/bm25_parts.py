"""The first half of a BM25 build: a slice of the corpus becomes a file of postings, in a process of its own.

A part is named by what it was made from, so that a build that was killed goes on with the parts it finds.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..corpus import parse_row
from ..errors import CorpusError
from ..tokenizer import tokenize


@dataclass(frozen=True)
class Slice:
    """Bytes ``start`` to ``end`` of the corpus: whole lines."""

    number: int
    start: int
    end: int


@dataclass
class BadLine(Exception):
    """A line that is no passage; ``line`` counts from 1 within the slice."""

    line: int
    reason: str

    def __reduce__(self) -> tuple:
        return BadLine, (self.line, self.reason)


def slices(corpus: Path, size: int) -> list[Slice]:
    """The corpus cut into slices of about ``size`` bytes, at line ends."""
    total = corpus.stat().st_size
    cuts = [0]
    with corpus.open("rb") as file:
        while cuts[-1] + size < total:
            file.seek(cuts[-1] + size)
            file.readline()
            cuts.append(file.tell())
    if cuts[-1] < total:
        cuts.append(total)
    return [Slice(i, start, end) for i, (start, end) in enumerate(itertools.pairwise(cuts))]


def make_part(corpus: Path, piece: Slice, target: Path, with_postings: bool) -> int:
    """Read, check and tokenize a slice; write ``target`` at once when all is well. Returns the number of passages.

    The file holds, of the slice's passages: ``starts`` and ``lengths`` (bytes in the corpus), ``ids`` (64-bit hashes),
    ``untitled``; and with postings ``lines`` (distinct tokens, sorted, joined by line breaks), ``counts`` (postings of
    each), ``rows`` (within the slice) and ``tf`` (times in the passage) in that order, ``sizes`` (tokens a passage).

    Raises:
        BadLine: a line that is no passage.
    """
    vocabulary: dict[str, int] = {}
    tokens, rows, tf = array("i"), array("i"), array("i")
    starts, lengths, sizes = array("q"), array("i"), array("i")
    ids: list[int] = []
    untitled = 0
    with corpus.open("rb") as file:
        file.seek(piece.start)
        place, number = piece.start, 0
        while place < piece.end:
            raw = file.readline()
            number += 1
            begin = place
            place += len(raw)
            line = raw
            if begin == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            text = line.strip()
            if not text:
                continue
            try:
                identifier, contents = parse_row(text, "")
            except CorpusError as error:
                raise BadLine(number, str(error).removeprefix(": ")) from None
            starts.append(begin + (len(raw) - len(line)) + (len(line) - len(line.lstrip())))
            lengths.append(len(text))
            ids.append(_hash(identifier))
            untitled += "\n" not in contents.strip()
            if with_postings:
                words = tokenize(contents)
                sizes.append(len(words))
                row = len(starts) - 1
                for word, times in Counter(words).items():
                    tokens.append(vocabulary.setdefault(word, len(vocabulary)))
                    rows.append(row)
                    tf.append(times)
    columns: dict[str, Any] = {
        "starts": np.frombuffer(starts, np.int64) if starts else np.zeros(0, np.int64),
        "lengths": np.asarray(lengths, np.int32),
        "ids": np.asarray(ids, np.uint64),
        "untitled": np.asarray(untitled, np.int64),
    }
    if with_postings:
        encoded = [word.encode("utf-8", "surrogatepass") for word in vocabulary]
        sorted_places = sorted(range(len(encoded)), key=encoded.__getitem__)
        rank = np.empty(len(encoded), np.int64)
        rank[sorted_places] = np.arange(len(encoded))
        places = rank[np.asarray(tokens, np.int64)]
        order = np.argsort(places, kind="stable")  # rows stay ascending within a token
        columns |= {
            "lines": np.frombuffer(b"\n".join(encoded[i] for i in sorted_places), np.uint8),
            "counts": np.bincount(places, minlength=len(encoded)).astype(np.int32),
            "rows": np.asarray(rows, np.int32)[order],
            "tf": np.asarray(tf, np.int32)[order],
            "sizes": np.asarray(sizes, np.int32),
        }
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **columns)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(target)
    return len(starts)


def _hash(identifier: str) -> int:
    import hashlib

    return int.from_bytes(
        hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )
