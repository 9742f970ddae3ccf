import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_server.bm25 import BM25Retriever
from retrieval_server.tokenizer import tokenize


def reference(contents: list[str], query: str, k1: float, b: float) -> list[float]:
    """Lucene's BM25 written out: idf = ln(1 + (N - df + .5) / (df + .5)), tf / (tf + k1 (1 - b + b |d| / avg))."""
    documents = [Counter(tokenize(text)) for text in contents]
    average = sum(document.total() for document in documents) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for token in tokenize(query):
            frequency = sum(token in other for other in documents)
            idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            tf = document[token]
            score += idf * tf / (tf + k1 * (1 - b + b * document.total() / average)) if tf else 0.0
        scores.append(score)
    return scores


WORDS = st.sampled_from(["paris", "lyon", "of", "the", "city", "東京", "são"])
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS, st.integers(1, 15))
def test_scores_and_order_are_lucenes(contents: list[str], query: str, topk: int) -> None:
    hits = BM25Retriever(contents, k1=1.2, b=0.75).search(query, topk)
    expected = reference(contents, query, k1=1.2, b=0.75)
    assert len(hits) == min(topk, sum(score > 0 for score in expected))
    assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
    for (row, score), best in zip(hits, sorted(expected, reverse=True), strict=False):
        assert score == pytest.approx(expected[row], rel=1e-4)
        assert score == pytest.approx(best, rel=1e-4)


def test_equal_scores_come_in_corpus_order() -> None:
    retriever = BM25Retriever(["paris"] * 50 + ["lyon"] * 50)
    for topk in (1, 7, 50, 99):
        assert [row for row, _ in retriever.search("lyon", topk)] == list(range(50, 50 + min(topk, 50)))


def test_no_known_token_gives_no_hit() -> None:
    retriever = BM25Retriever(["paris", "lyon"])
    for query in ("", "?!", "東京", "unknown words"):
        assert retriever.search(query, 3) == []


def test_passages_without_any_token() -> None:
    assert BM25Retriever(["!!!", "???"]).search("paris", 3) == []
    assert [row for row, _ in BM25Retriever(["!!!", "paris", "???"]).search("paris", 3)] == [1]


def test_one_passage() -> None:
    assert [row for row, _ in BM25Retriever(["paris"]).search("paris", 3)] == [0]


def test_a_batch_equals_single_searches() -> None:
    retriever = BM25Retriever(["paris france", "lyon france", "rome italy"])
    queries, topk = ["france", "rome", "france", "france", "nothing"], [2, 3, 2, 1, 5]
    assert retriever.search_batch(queries, topk) == [retriever.search(q, k) for q, k in zip(queries, topk, strict=True)]
