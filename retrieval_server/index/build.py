"""Building an index: several processes, any size of corpus, resumable, and nothing visible until it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..corpus import check_corpus_path
from ..errors import CorpusError, StartupError
from ..tokenizer import TOKENIZER
from . import bm25_merge, bm25_parts
from .manifest import Manifest, facts_of, versions

# prctl(2), from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1

#: ``(what, total)`` -> a context that yields a function to call with each piece done.
Bar = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class DenseOptions:
    """How passages become vectors and vectors an index; ``encoder`` is a folder or a hub id."""

    encoder: str
    factory: str = "Flat"
    batch: int = 64
    max_tokens: int = 256


@dataclass(frozen=True)
class BuildOptions:
    """What to build. ``slice_bytes`` is the unit of work, and of what a killed build does again."""

    corpus: str
    index: str
    backends: tuple[str, ...] = ("bm25",)
    workers: int = 1
    k1: float = 0.9
    b: float = 0.4
    dense: DenseOptions | None = None
    slice_bytes: int = 32 << 20
    allow_duplicate_ids: bool = False

    def spec(self) -> dict[str, Any]:
        """What decides every byte of the parts; a build resumes only where this is equal."""
        stat = Path(self.corpus).stat()
        kept = {k: v for k, v in asdict(self).items() if k not in ("index", "workers", "allow_duplicate_ids")}
        return kept | {
            "corpus": str(Path(self.corpus).resolve()),
            "corpus_bytes": stat.st_size,
            "corpus_mtime_ns": stat.st_mtime_ns,
            "tokenizer": TOKENIZER,
            "backends": list(self.backends),
        }


def build(
    options: BuildOptions,
    bar: Bar,
    say: Callable[[str], None],
    add: Callable[[Path, int], dict[str, dict[str, Any]]] | None = None,
) -> Manifest:
    """Build ``options.index``, a folder that must not exist yet.

    ``add`` puts backends made elsewhere into the folder, given it and the number of rows.

    Work goes on in ``INDEX.building``; a build that was killed takes up there when it is started again.

    Raises:
        StartupError: one line that names what is wrong (``CorpusError`` for a bad line, with file and line).
    """
    corpus = check_corpus_path(options.corpus)
    target = Path(options.index)
    if target.exists():
        raise StartupError(f"index {target}: exists already; remove it, or name another")
    staging = target.with_name(target.name + ".building")
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"index {target}: {error.strerror}") from error
    with _only_one(staging):
        _resume_or_clear(staging, options.spec(), say)
        plain = _plain_corpus(corpus, staging, bar)
        parts = _make_parts(options, corpus, plain, staging, bar)
        rows, untitled = _write_rows(parts, staging, corpus, options.allow_duplicate_ids)
        backends: dict[str, dict[str, Any]] = {}
        if "bm25" in options.backends:
            backends["bm25"] = _bm25(options, parts, staging, rows, bar)
        if "dense" in options.backends:
            from .dense_build import build_dense

            assert options.dense is not None
            backends["dense"] = build_dense(options.dense, plain, staging, bar)
        if add is not None:
            backends |= add(staging, rows)
        manifest = _seal(staging, plain, corpus, rows, untitled, backends, bar)
        shutil.rmtree(staging / "parts")
        for name in ("spec.json", ".lock"):
            (staging / name).unlink(missing_ok=True)
        staging.rename(target)
    return manifest


@contextlib.contextmanager
def _only_one(staging: Path) -> Iterator[None]:
    with (staging / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"{staging}: another build is at work there") from None
        yield


def _resume_or_clear(staging: Path, spec: dict[str, Any], say: Callable[[str], None]) -> None:
    file = staging / "spec.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(file.read_text()) == json.loads(json.dumps(spec)):
            (staging / "parts").mkdir(exist_ok=True)  # a build that died in its last moments had removed it
            done = len(list((staging / "parts").glob("*.npz")))
            say(f"going on with {staging}: {done} parts are there")
            return
    for entry in staging.iterdir():
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (staging / "parts").mkdir()
    file.write_text(json.dumps(spec))


def _plain_corpus(corpus: Path, staging: Path, bar: Bar) -> Path:
    """The corpus as it can be mapped: itself, or unpacked into the index."""
    if corpus.suffix != ".gz":
        return corpus
    plain = staging / "corpus.jsonl"
    if plain.exists():
        return plain
    unfinished = staging / "corpus.part"
    with bar("unpacking", corpus.stat().st_size) as advance, corpus.open("rb") as raw:
        try:
            with gzip.GzipFile(fileobj=raw) as packed, unfinished.open("wb") as out:
                place = 0
                while block := packed.read(1 << 20):
                    out.write(block)
                    advance(raw.tell() - place)
                    place = raw.tell()
        except (OSError, EOFError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk, not the archive
            raise CorpusError(f"corpus {corpus}: unpacking failed ({error})") from error
    unfinished.replace(plain)
    return plain


def _make_parts(options: BuildOptions, corpus: Path, plain: Path, staging: Path, bar: Bar) -> list[Path]:
    pieces = bm25_parts.slices(plain, options.slice_bytes)
    targets = [staging / "parts" / f"{piece.number:05d}.npz" for piece in pieces]
    missing = [(piece, path) for piece, path in zip(pieces, targets, strict=True) if not path.exists()]
    total = sum(piece.end - piece.start for piece in pieces)
    context = multiprocessing.get_context("spawn")
    with bar("reading", total) as advance:
        advance(total - sum(piece.end - piece.start for piece, _ in missing))
        postings = "bm25" in options.backends
        if options.workers == 1 or len(missing) < 2:
            for piece, path in missing:
                try:
                    bm25_parts.make_part(plain, piece, path, postings)
                except bm25_parts.BadLine as fault:
                    raise _bad_line(fault, corpus, plain, piece) from None
                advance(piece.end - piece.start)
            return targets
        with ProcessPoolExecutor(
            min(options.workers, len(missing)), mp_context=context, initializer=_end_with_parent
        ) as pool:
            work = {pool.submit(bm25_parts.make_part, plain, piece, path, postings): piece for piece, path in missing}
            try:
                for done in as_completed(work):
                    done.result()
                    advance(work[done].end - work[done].start)
            except bm25_parts.BadLine as fault:
                raise _bad_line(fault, corpus, plain, work[done]) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    return targets


def _end_with_parent() -> None:
    """Runs in a worker: a build that is killed leaves none behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _bad_line(fault: bm25_parts.BadLine, corpus: Path, plain: Path, piece: bm25_parts.Slice) -> CorpusError:
    return CorpusError(f"{corpus}:{_line(plain, piece.start) + fault.line}: {fault.reason}")


def _line(path: Path, place: int) -> int:
    """Lines before ``place``."""
    lines = 0
    with path.open("rb") as file:
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            lines += block.count(b"\n")
            place -= len(block)
    return lines


def _write_rows(parts: list[Path], staging: Path, corpus: Path, allow_duplicates: bool) -> tuple[int, int]:
    """``starts.npy`` and ``lengths.npy``; returns the numbers of rows and of untitled ones."""
    loaded = [np.load(part) for part in parts]
    starts = np.concatenate([part["starts"] for part in loaded]) if loaded else np.zeros(0, np.int64)
    if not len(starts):
        raise CorpusError(f"corpus {corpus}: holds no passage, only blank lines")
    np.save(staging / "starts.npy", starts)
    np.save(staging / "lengths.npy", np.concatenate([part["lengths"] for part in loaded]))
    if not allow_duplicates:
        ids = np.concatenate([part["ids"] for part in loaded])
        order = np.argsort(ids, kind="stable")
        twins = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(twins):
            first, second = int(order[twins[0]]), int(order[twins[0] + 1])
            raise CorpusError(
                f"corpus {corpus}: rows {first + 1} and {second + 1} have the same id ({len(twins)} such rows); "
                "--allow-duplicate-ids takes them as they are"
            )
    return len(starts), int(sum(int(part["untitled"]) for part in loaded))


def _bm25(options: BuildOptions, parts: list[Path], staging: Path, rows: int, bar: Bar) -> dict[str, Any]:
    folder = staging / "bm25"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with bar("bm25", rows) as advance:
        counts = bm25_merge.merge(parts, folder, options.k1, options.b, advance)
    return {"k1": options.k1, "b": options.b, "tokenizer": TOKENIZER, **counts}


def _seal(
    staging: Path,
    plain: Path,
    corpus: Path,
    rows: int,
    untitled: int,
    backends: dict[str, dict[str, Any]],
    bar: Bar,
) -> Manifest:
    names = [
        str(path.relative_to(staging))
        for path in sorted(staging.rglob("*"))
        if path.is_file() and "parts" not in path.parts and path.name not in ("spec.json", ".lock", "corpus.jsonl")
    ]
    total = plain.stat().st_size + sum((staging / name).stat().st_size for name in names)
    with bar("hashing", total) as advance:
        facts = facts_of(plain, advance)
        files = {name: facts_of(staging / name, advance) for name in names}
    inside = plain.parent == staging
    about = {"path": plain.name if inside else str(plain.resolve()), "source": str(corpus.resolve())}
    manifest = Manifest(about | {"rows": rows, "untitled": untitled, **asdict(facts)}, backends, files, versions())
    manifest.write(staging)
    for path in staging.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return manifest
