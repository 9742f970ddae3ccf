"""The second half of a BM25 build: parts become one inverted index, written straight into its files.

Scores are Lucene's variant of BM25 (bm25s' ``method="lucene"``),
``ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 (1 - b + b L / L_mean))``, in float64, kept as float32.
Memory: two parts, and 20 bytes for each distinct token.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .vocabulary import Vocabulary


def merge(parts: list[Path], target: Path, k1: float, b: float, progress: Callable[[int], None]) -> dict[str, int]:
    """Write ``target`` (a folder); returns the numbers of passages, tokens and postings."""
    sizes = [np.load(part)["sizes"] for part in parts]
    passages = sum(map(len, sizes))
    mean = sum(int(s.sum()) for s in sizes) / max(1, passages)
    numbers = _number_tokens(parts, target)
    vocabulary = len(np.load(target / "token_offsets.npy", mmap_mode="r")) - 1
    frequency = np.zeros(vocabulary, np.int64)
    for part, number in zip(parts, numbers, strict=True):
        frequency[number] += np.load(part)["counts"]
    indptr = np.zeros(vocabulary + 1, np.int64)
    np.cumsum(frequency, out=indptr[1:])
    postings = int(indptr[-1])
    rows = np.lib.format.open_memmap(target / "rows.npy", "w+", np.int32, (postings,))
    impacts = np.lib.format.open_memmap(target / "impacts.npy", "w+", np.float32, (postings,))
    maxima = np.zeros(vocabulary, np.float32)
    idf = np.log(1.0 + (passages - frequency + 0.5) / (frequency + 0.5))
    place = indptr[:-1].copy()
    first = 0
    for part, number, size in zip(parts, numbers, sizes, strict=True):
        data = np.load(part)
        counts, local, tf = data["counts"].astype(np.int64), data["rows"], data["tf"].astype(np.float64)
        begins = np.cumsum(counts) - counts
        where = np.repeat(place[number] - begins, counts) + np.arange(len(local))
        norm = k1 * (1.0 - b + b * size[local] / mean) if mean else np.zeros(0)
        impact = (np.repeat(idf[number], counts) * tf / (tf + norm)).astype(np.float32)
        rows[where] = local + first
        impacts[where] = impact
        if len(counts):
            maxima[number] = np.maximum(maxima[number], np.maximum.reduceat(impact, begins))
        place[number] += counts
        first += len(size)
        progress(len(size))
    rows.flush()
    impacts.flush()
    np.save(target / "indptr.npy", indptr)
    np.save(target / "maxima.npy", maxima)
    return {"passages": passages, "tokens": vocabulary, "postings": postings}


def _number_tokens(parts: list[Path], target: Path) -> list[np.ndarray]:
    """Write the vocabulary; returns each part's token numbers, in the part's order."""
    numbers = [np.empty(len(np.load(part)["counts"]), np.int32) for part in parts]
    filled = [0] * len(parts)

    def streams() -> Iterator[tuple[bytes, int]]:
        return heapq.merge(*(_tokens(part, i) for i, part in enumerate(parts)))

    def tokens() -> Iterator[bytes]:
        for number, (token, group) in enumerate(itertools.groupby(streams(), key=lambda pair: pair[0])):
            for _, part in group:
                numbers[part][filled[part]] = number
                filled[part] += 1
            yield token

    Vocabulary.write(target, tokens())
    return numbers


def _tokens(part: Path, number: int) -> Iterator[tuple[bytes, int]]:
    lines = np.load(part)["lines"].tobytes()
    return ((token, number) for token in lines.split(b"\n")) if lines else iter(())
