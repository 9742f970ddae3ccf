"""Exact top k over an inverted index with precomputed scores, compiled.

MaxScore (Turtle and Flood 1995): a term whose greatest score, together with those of all lesser terms, can't lift a
passage above the k-th best so far is not walked any more, only looked up for passages that other terms bring. The
result is that of scoring every passage: same passages, same float32 scores, equal scores in row order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_NONE = np.int64(2**62)


@njit(cache=True, nogil=True)
def _worse(score: float, row: int, other_score: float, other_row: int) -> bool:
    return score < other_score or (score == other_score and row > other_row)


@njit(cache=True, nogil=True)
def _sift_down(scores: np.ndarray, rows: np.ndarray, n: int) -> None:
    place = 0
    while True:
        child = 2 * place + 1
        if child >= n:
            return
        if child + 1 < n and _worse(scores[child + 1], rows[child + 1], scores[child], rows[child]):
            child += 1
        if not _worse(scores[child], rows[child], scores[place], rows[place]):
            return
        scores[place], scores[child] = scores[child], scores[place]
        rows[place], rows[child] = rows[child], rows[place]
        place = child


@njit(cache=True, nogil=True)
def _sift_up(scores: np.ndarray, rows: np.ndarray, place: int) -> None:
    while place > 0:
        parent = (place - 1) // 2
        if not _worse(scores[place], rows[place], scores[parent], rows[parent]):
            return
        scores[place], scores[parent] = scores[parent], scores[place]
        rows[place], rows[parent] = rows[parent], rows[place]
        place = parent


@njit(cache=True, nogil=True)
def _seek(rows: np.ndarray, start: int, end: int, row: int) -> int:
    """The first place in ``rows[start:end]`` (ascending) that is not below ``row``: doubling steps, then halving."""
    if start >= end or rows[start] >= row:
        return start
    step = 1
    low = start
    while low + step < end and rows[low + step] < row:
        low += step
        step *= 2
    high = min(low + step, end)
    while low + 1 < high:
        middle = (low + high) // 2
        if rows[middle] < row:
            low = middle
        else:
            high = middle
    return high


@njit(cache=True, nogil=True)
def top_k(
    indptr: np.ndarray,
    rows: np.ndarray,
    impacts: np.ndarray,
    maxima: np.ndarray,
    terms: np.ndarray,
    weights: np.ndarray,
    k: int,
    best_rows: np.ndarray,
    best_scores: np.ndarray,
) -> int:
    """Write the best ``k`` passages, best first, into ``best_rows`` and ``best_scores``; returns how many there are.

    Args:
        indptr: ``[V + 1]`` int64, where each term's postings lie.
        rows, impacts: ``[P]`` int32 ascending within a term, and float32 positive.
        maxima: ``[V]`` float32, each term's greatest impact.
        terms: ``[m]`` int64, different from each other; ``weights``: ``[m]`` float32, how often the query has each.
        best_rows, best_scores: ``[k]`` int64 and float32.
    """
    m = len(terms)
    # Scores are float32 sums in the query's order: by so much they may exceed a bound that was summed otherwise.
    slack = 1.0 + (m + 2) * 2.0**-23
    order = np.argsort(weights * maxima[terms])
    cursor, end = np.empty(m, np.int64), np.empty(m, np.int64)
    bound = np.empty(m, np.float64)
    total = 0.0
    for i in range(m):
        term = terms[order[i]]
        cursor[i], end[i] = indptr[term], indptr[term + 1]
        total += weights[order[i]] * maxima[term]
        bound[i] = total * slack
    parts = np.zeros(m, np.float32)
    n, first, threshold = 0, 0, 0.0
    while True:
        row = _NONE
        for i in range(first, m):
            if cursor[i] < end[i] and rows[cursor[i]] < row:
                row = np.int64(rows[cursor[i]])
        if row == _NONE:
            break
        so_far = 0.0
        for i in range(m):
            parts[i] = 0.0
        for i in range(first, m):
            if cursor[i] < end[i] and rows[cursor[i]] == row:
                part = weights[order[i]] * impacts[cursor[i]]
                parts[order[i]] = part
                so_far += part
                cursor[i] += 1
        hopeless = False
        for i in range(first - 1, -1, -1):
            if so_far * slack + bound[i] <= threshold:
                hopeless = True
                break
            cursor[i] = _seek(rows, cursor[i], end[i], row)
            if cursor[i] < end[i] and rows[cursor[i]] == row:
                part = weights[order[i]] * impacts[cursor[i]]
                parts[order[i]] = part
                so_far += part
        if hopeless:
            continue
        score = np.float32(0.0)
        for i in range(m):
            score += parts[i]
        if n < k:
            best_scores[n], best_rows[n] = score, row
            _sift_up(best_scores, best_rows, n)
            n += 1
        elif score > best_scores[0]:
            best_scores[0], best_rows[0] = score, row
            _sift_down(best_scores, best_rows, n)
        else:
            continue
        if n == k:
            threshold = np.float64(best_scores[0])
            while first < m and bound[first] <= threshold:
                first += 1
    # The heap's root is the worst: take it off again and again to fill from the back.
    for last in range(n - 1, 0, -1):
        best_scores[0], best_scores[last] = best_scores[last], best_scores[0]
        best_rows[0], best_rows[last] = best_rows[last], best_rows[0]
        _sift_down(best_scores, best_rows, last)
    return n
