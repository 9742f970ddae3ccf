"""Vectors of all passages, then a faiss index of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StartupError
from .encoder import Encoder
from .rows import MappedRows

if TYPE_CHECKING:
    from .build import Bar, DenseOptions

#: Passages between two notes of how far the encoding has come.
_CHUNK = 1024
#: faiss wants some dozens of vectors for each of its centroids.
_TRAINING = 200_000


def build_dense(options: DenseOptions, corpus: Path, staging: Path, bar: Bar) -> dict[str, Any]:
    """Write ``dense/`` in ``staging``; goes on where a killed build stopped. Returns the manifest's settings.

    Raises:
        StartupError: no such encoder, or faiss does not know the kind of index.
    """
    import faiss

    folder = staging / "dense"
    folder.mkdir(exist_ok=True)
    rows = MappedRows(corpus, np.load(staging / "starts.npy", mmap_mode="r"), np.load(staging / "lengths.npy"))
    encoder = Encoder(options.encoder, max_tokens=options.max_tokens)
    vectors = _vectors(encoder, rows, folder, options.batch, bar)
    try:
        index = faiss.index_factory(encoder.dimension, options.factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise StartupError(f"--faiss {options.factory}: faiss doesn't know it ({_last_line(error)})") from error
    with bar("faiss", len(rows)) as advance:
        if not index.is_trained:
            chosen = np.random.default_rng(0).permutation(len(rows))[:_TRAINING]
            try:
                index.train(np.ascontiguousarray(vectors[np.sort(chosen)]))
            except RuntimeError as error:
                raise StartupError(
                    f"--faiss {options.factory}: can't be trained on {len(rows)} passages ({_last_line(error)})"
                ) from error
        for first in range(0, len(rows), _CHUNK):
            block = np.ascontiguousarray(vectors[first : first + _CHUNK])
            index.add(block)
            advance(len(block))
    faiss.write_index(index, str(folder / "index.faiss"))
    del vectors
    for name in ("vectors.bin", "progress.json"):
        (folder / name).unlink()
    rows.close()
    return {
        **encoder.settings(),
        "passages": int(index.ntotal),
        "factory": options.factory,
        "metric": "inner_product",
        "file": "dense/index.faiss",
    }


def _vectors(encoder: Encoder, rows: MappedRows, folder: Path, batch: int, bar: Bar) -> np.ndarray:
    path, note = folder / "vectors.bin", folder / "progress.json"
    done = json.loads(note.read_text())["done"] if note.exists() and path.exists() else 0
    vectors = np.memmap(path, np.float32, "r+" if path.exists() else "w+", shape=(len(rows), encoder.dimension))
    with bar("encoding", len(rows)) as advance:
        advance(done)
        for first in range(done, len(rows), _CHUNK):
            last = min(first + _CHUNK, len(rows))
            texts = [rows.contents(row) for row in range(first, last)]
            vectors[first:last] = encoder.passages(texts)
            vectors.flush()
            unfinished = note.with_suffix(".part")
            unfinished.write_text(json.dumps({"done": last}))
            unfinished.replace(note)
            advance(last - first)
    return vectors


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
