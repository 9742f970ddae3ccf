"""Built BM25 indexes: exact, resumable, bounded, refused when they disagree."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_server.bm25 import BM25Retriever
from retrieval_server.errors import CorpusError, StartupError
from retrieval_server.index import bm25_parts
from retrieval_server.index.bm25 import IndexedBM25
from retrieval_server.index.build import BuildOptions, build
from retrieval_server.index.kernel import top_k
from retrieval_server.index.manifest import IndexFault, Manifest, check, facts_of
from retrieval_server.index.open import Index
from retrieval_server.index.rows import MappedRows
from retrieval_server.tokenizer import tokenize

ROOT = Path(__file__).resolve().parents[3]


def nothing(*_: object) -> None:
    pass


class bar:
    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self):
        return nothing

    def __exit__(self, *_: object) -> None:
        pass


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"p{i}", "contents": t}) + "\n" for i, t in enumerate(texts)))
    return path


def make(corpus: Path, index: Path, **keys) -> Index:
    build(BuildOptions(str(corpus), str(index), **keys), bar, nothing)
    return Index(index)


WORDS = "paris lyon rome milan the of city river capital population is 1,204 東京 são".split()  # noqa: SIM905
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join), max_size=5), st.integers(1, 30))
def test_an_index_answers_as_the_in_memory_one_does(tmp_path_factory, texts, queries, topk):
    """Any slicing of the corpus gives the passages and the order of scoring everything."""
    folder = tmp_path_factory.mktemp("index")
    index = make(write(folder / "corpus.jsonl", texts), folder / "index", slice_bytes=120)
    plain = BM25Retriever(texts)
    for query in queries:
        expected, found = plain.search(query, topk), index.backend.search(query, topk)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)
        # bm25s rounds its scores elsewhere: rows may change places where scores agree to the last bit but one.
        assert len(found) == len(expected)
        assert found == full_scoring(index.backend, query, topk)
    index.close()


def full_scoring(backend: IndexedBM25, query: str, topk: int) -> list[tuple[int, float]]:
    counts = Counter(n for token in tokenize(query) if (n := backend._vocabulary.find(token)) >= 0)
    scores = np.zeros(len(backend), np.float32)
    for term, times in counts.items():
        span = slice(backend._indptr[term], backend._indptr[term + 1])
        scores[backend._rows[span]] += np.float32(times) * backend._impacts[span]
    order = np.lexsort((np.arange(len(scores)), -scores))[:topk]
    return [(int(row), float(scores[row])) for row in order if scores[row] > 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(1, 12), st.integers(1, 40))
def test_the_kernel_skips_nothing_that_counts(seed, passages, terms, k):
    """Random postings with many equal scores: the compiled top k is the full scoring's, ties by row."""
    g = np.random.default_rng(seed)
    rows, impacts, indptr = [], [], [0]
    for _ in range(terms):
        chosen = np.sort(g.choice(passages, g.integers(1, passages + 1), replace=False))
        rows.append(chosen.astype(np.int32))
        impacts.append(g.integers(1, 5, len(chosen)).astype(np.float32) / np.float32(4))
        indptr.append(indptr[-1] + len(chosen))
    maxima = np.array([i.max() for i in impacts], np.float32)
    weights = g.integers(1, 3, terms).astype(np.float32)
    best_rows, best_scores = np.empty(k, np.int64), np.empty(k, np.float32)
    arrays = (np.array(indptr, np.int64), np.concatenate(rows), np.concatenate(impacts), maxima)
    n = top_k(*arrays, np.arange(terms), weights, k, best_rows, best_scores)
    scores = np.zeros(passages, np.float32)
    for i in range(terms):
        scores[rows[i]] += weights[i] * impacts[i]
    order = np.lexsort((np.arange(passages), -scores))[:k]
    expected = [(int(r), float(scores[r])) for r in order if scores[r] > 0]
    assert list(zip(best_rows[:n].tolist(), best_scores[:n].tolist(), strict=True)) == expected


def test_rows_come_back_as_they_stand_in_the_file(tmp_path):
    lines = [
        '\ufeff{"id": "a", "contents": "\\"One\\"\\nfirst", "more": [1]}',
        "",
        '  {"id":"b","contents":"two"}  ',
        '{"id": 3, "contents": "ü"}',
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\r\n".join(lines), encoding="utf-8")
    index = make(corpus, tmp_path / "index", slice_bytes=30)
    assert [json.loads(index.rows[i])["id"] for i in range(len(index.rows))] == ["a", "b", 3]
    assert index.rows[1] == b'{"id":"b","contents":"two"}'
    assert index.manifest.corpus["untitled"] == 2
    assert isinstance(index.rows, MappedRows) and index.rows.contents(2) == "ü"


def test_a_packed_corpus_is_unpacked_into_the_index(tmp_path):
    plain = write(tmp_path / "c.jsonl", ["paris", "lyon"])
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    index = make(packed, tmp_path / "index")
    assert index.backend.search("lyon", 3)[0][0] == 1
    shutil.move(tmp_path / "index", tmp_path / "elsewhere")
    assert Index(tmp_path / "elsewhere", thorough=True).backend.search("paris", 1)[0][0] == 0
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(CorpusError, match="unpacking failed"):
        make(packed, tmp_path / "broken")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "not valid JSON"),
        ('{"id": "x"}', "field 'contents' is missing"),
        ('{"id": "x", "contents": 7}', "field 'contents' must be a string"),
        ("[1]", "expected a JSON object"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line_whatever_slice_it_is_in(tmp_path, line, said):
    corpus = write(tmp_path / "corpus.jsonl", ["paris is a city"] * 20)
    lines = corpus.read_text().splitlines()
    lines[13:13] = ["", line]
    corpus.write_text("\n".join(lines) + "\n")
    for workers in (1, 2):
        with pytest.raises(CorpusError, match=rf"corpus\.jsonl:15: {said}"):
            make(corpus, tmp_path / "index", slice_bytes=300, workers=workers)


def test_equal_ids_are_refused_or_taken_as_they_are(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        '{"id": "a", "contents": "one"}\n{"id": "b", "contents": "two"}\n{"id": "a", "contents": "three"}\n'
    )
    with pytest.raises(CorpusError, match="rows 1 and 3 have the same id"):
        make(corpus, tmp_path / "index")
    index = make(corpus, tmp_path / "index", allow_duplicate_ids=True)
    assert [row for row, _ in index.backend.search("three", 1)] == [2], "documents are found by row, never by id"


@pytest.fixture
def built(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", [f"city number {i} lies on a river" for i in range(200)])
    make(corpus, tmp_path / "index", slice_bytes=2000).close()
    return corpus, tmp_path / "index"


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["bm25/impacts.npy", "bm25/rows.npy", "bm25/tokens.bin", "starts.npy"])
def test_one_wrong_bit_or_a_missing_end_is_refused(built, name):
    _, folder = built
    for spoil, said in (
        (lambda path: damage(path, path.stat().st_size // 2), "has changed since the build"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes, was built with"),
        (lambda path: path.unlink(), "is missing"),
    ):
        kept = (folder / name).read_bytes()
        spoil(folder / name)
        with pytest.raises(IndexFault, match=said):
            Index(folder)
        (folder / name).write_bytes(kept)
    Index(folder, thorough=True).close()


def test_another_corpus_tokenizer_count_or_format_is_refused(built):
    corpus, folder = built
    kept = corpus.read_bytes()
    corpus.write_bytes(kept.replace(b"number 7 ", b"number 8 "))
    with pytest.raises(IndexFault, match=r"the corpus .* has changed"):
        Index(folder)
    corpus.write_bytes(kept)
    text = (folder / "manifest.json").read_text()
    for old, new, said in (
        ('"tokenizer": "names-1"', '"tokenizer": "names-0"', "tokenizer 'names-0'"),
        ('"passages": 200', '"passages": 199', "199 passages, the corpus 200 rows"),
        ('"format": 1', '"format": 9', "format 9"),
        ("{", "", "is broken"),
    ):
        (folder / "manifest.json").write_text(text.replace(old, new, 1))
        with pytest.raises(IndexFault, match=said):
            Index(folder)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(IndexFault, match="holds bm25, not dense"):
        Index(folder, "dense")
    with pytest.raises(IndexFault, match="no such folder"):
        Index(folder / "nowhere")


def test_a_change_that_a_start_does_not_read_is_found_by_verify(built):
    """A start reads samples; of a file beyond 4 MB some bytes lie between them."""
    _, folder = built
    path = folder / "big.bin"
    path.write_bytes(bytes(8 << 20))
    manifest = Manifest.read(folder)
    manifest.files["big.bin"] = facts_of(path)
    damage(path, ((8 << 20) - (1 << 16)) // 64 + (1 << 16) + 10)
    check(folder, manifest, thorough=False)
    with pytest.raises(IndexFault, match=r"big\.bin has changed since the build \(SHA-256 differs\)"):
        check(folder, manifest, thorough=True)


def test_two_builds_at_once_and_an_index_that_exists_are_refused(built, tmp_path):
    corpus, folder = built
    with pytest.raises(StartupError, match="exists already"):
        make(corpus, folder)
    staging = tmp_path / "twice.building"
    staging.mkdir()
    import fcntl

    with (staging / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match="another build is at work"):
            make(corpus, tmp_path / "twice")
    make(corpus, tmp_path / "twice").close()


def test_finished_parts_are_used_again_unless_the_corpus_changed(tmp_path, monkeypatch):
    corpus = write(tmp_path / "corpus.jsonl", [f"city {i}" for i in range(50)])
    real, made = bm25_parts.make_part, []
    pieces = bm25_parts.slices(corpus, 400)
    assert len(pieces) > 3
    staging = tmp_path / "index.building"
    options = BuildOptions(str(corpus), str(tmp_path / "index"), slice_bytes=400)
    (staging / "parts").mkdir(parents=True)
    (staging / "spec.json").write_text(json.dumps(options.spec()))
    for piece in pieces[:2]:
        real(corpus, piece, staging / f"parts/{piece.number:05d}.npz", True)
    before = {path.name: path.stat().st_mtime_ns for path in (staging / "parts").iterdir()}
    said: list[str] = []

    class Noting(bar):
        def __enter__(self):
            return made.append

    build(options, Noting, said.append)
    assert before and any("2 parts are there" in line for line in said)
    assert Index(tmp_path / "index", thorough=True).backend.search("37", 1)[0][0] == 37
    corpus.write_text(corpus.read_text() + '{"id": "new", "contents": "village"}\n')
    shutil.rmtree(tmp_path / "index")
    (staging / "parts").mkdir(parents=True)
    (staging / "spec.json").write_text(json.dumps(options.spec() | {"corpus_bytes": 1}))
    (staging / "parts/00000.npz").write_bytes(b"left over from another corpus")
    assert make(corpus, tmp_path / "index", slice_bytes=400).backend.search("village", 1)[0][0] == 50


def test_a_build_that_died_while_it_tidied_up_goes_on(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", ["paris", "lyon"])
    options = BuildOptions(str(corpus), str(tmp_path / "index"))
    (tmp_path / "index.building").mkdir()
    (tmp_path / "index.building/spec.json").write_text(json.dumps(options.spec()))
    build(options, bar, nothing)
    assert Index(tmp_path / "index").backend.search("lyon", 1)[0][0] == 1


@pytest.mark.e2e
def test_a_build_that_is_killed_goes_on_and_gives_the_same_bytes(tmp_path):
    texts = [" ".join(f"w{(i * 31 + j * j) % 9973}" for j in range(40)) for i in range(30_000)]
    corpus = write(tmp_path / "corpus.jsonl", texts)
    reference = build(BuildOptions(str(corpus), str(tmp_path / "reference"), slice_bytes=1 << 19), bar, nothing)
    script = (
        "from contextlib import contextmanager\n"
        "from retrieval_server.index.build import BuildOptions, build\n"
        "@contextmanager\ndef bar(what, total):\n    yield lambda n: None\n"
        "if __name__ == '__main__':\n"
        f"    build(BuildOptions({str(corpus)!r}, {str(tmp_path / 'index')!r}, slice_bytes=1 << 19), bar, print)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    kills, delay = 0, 1.0
    while True:
        child = subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.DEVNULL)
        try:
            assert child.wait(delay) == 0
            break
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
            delay += 0.7
            time.sleep(0.3)  # its worker notices and ends
            assert not (tmp_path / "index").exists(), "nothing is visible before it is whole"
    assert kills >= 2
    found = Manifest.read(tmp_path / "index")
    assert {n: f.sha256 for n, f in found.files.items()} == {n: f.sha256 for n, f in reference.files.items()}
    assert not (tmp_path / "index.building").exists()
    Index(tmp_path / "index", thorough=True).close()
