"""How often BM25 finds the right GeoNames passage, as shipped and with other tokens or constants.

    python benchmarks/retrieval_quality.py [--questions 2000]

Rank 1 and top 3, for the search query of a city, the whole question, the query with accents left out, and the
search query of a country.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path

import bm25s.stopwords

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mapd_verl.data.geonames import text
from retrieval_server import bm25
from retrieval_server.corpus import Corpus, load_corpus

STOP_WORDS = frozenset(bm25s.stopwords.STOPWORDS_EN)
Case = tuple[str, str, str]  # kind, query, title of the right passage


def without_accents(name: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", name) if not unicodedata.combining(c))


def cases(folder: Path, corpus: Corpus) -> list[Case]:
    """Every query to try."""
    import pyarrow.parquet as pq

    found: list[Case] = []
    for question in pq.read_table(folder / "test.parquet", columns=["question"])["question"].to_pylist():
        parsed = text.parse_question(question)
        if parsed is None:
            raise SystemExit(f"not a question of this world: {question}")
        relation = parsed.relation if parsed.relation in text.CITY_RELATIONS else "country"
        if parsed.relation == "comparison":
            relation = "population"
        else:
            found.append(("question", question, parsed.city))
        for city in filter(None, (parsed.city, parsed.other)):
            found.append(("city", text.query(relation, city), city))
            if without_accents(city) != city:
                found.append(("no accents", text.query(relation, without_accents(city)), city))
    for row, contents in zip(corpus.rows, corpus.contents, strict=True):
        if b'"country-' in row:
            title = contents.split("\n")[0].strip('"')
            found.append(("country", text.query("capital", title), title))
    return found


def main() -> None:
    import Stemmer

    from mapd_verl.data.geonames.build import WorldConfig, build_world

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=2000)
    arguments = parser.parse_args()
    plain, stemmer = bm25.tokenize, Stemmer.Stemmer("english")
    variants: dict[str, tuple[Callable[[str], list[str]], float, float]] = {
        "as shipped": (plain, 0.9, 0.4),
        "k1 1.5, b 0.75": (plain, 1.5, 0.75),
        "stop words dropped": (lambda s: [t for t in plain(s) if t not in STOP_WORDS], 0.9, 0.4),
        "Porter2 stems": (lambda s: stemmer.stemWords(plain(s)), 0.9, 0.4),
    }
    with tempfile.TemporaryDirectory() as folder:
        build_world(Path(folder), WorldConfig(test=arguments.questions))
        corpus = load_corpus(Path(folder) / "corpus.jsonl")
        tries = cases(Path(folder), corpus)
    rows = {contents.split("\n")[0].strip('"'): row for row, contents in enumerate(corpus.contents)}
    print(f"{len(corpus)} passages; right passage at rank 1 / in the top 3")
    for name, (tokens, k1, b) in variants.items():
        bm25.tokenize = tokens
        retriever = bm25.BM25Retriever(corpus.contents, k1, b)
        ranks: dict[str, list[int | None]] = {}
        for kind, query, title in tries:
            hits = [row for row, _ in retriever.search(query, 3)]
            ranks.setdefault(kind, []).append(hits.index(rows[title]) if rows[title] in hits else None)
        print(f"{name}:")
        for kind, found in ranks.items():
            first, three = found.count(0) / len(found), 1 - found.count(None) / len(found)
            print(f"  {kind} ({len(found)}): {first:.3f} / {three:.4f}")


if __name__ == "__main__":
    main()
