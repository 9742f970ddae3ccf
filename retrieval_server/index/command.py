"""``python -m retrieval_server build | verify | import``."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..errors import StartupError

COMMANDS = ("build", "verify", "import")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"retrieval_server: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m retrieval_server", description="Build and check indexes")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    build = commands.add_parser("build", help="make an index of a corpus")
    build.add_argument("--corpus", "--corpus_path", required=True, help="JSON lines with id and contents (.gz too)")
    build.add_argument("--index", "--save_dir", required=True, help="folder to make")
    build.add_argument("--backend", choices=["bm25", "dense", "hybrid"], default="bm25", help="hybrid makes both")
    build.add_argument("--workers", type=_count, default=1, help="processes that read and tokenize (default: 1)")
    build.add_argument("--bm25-k1", type=float, default=0.9)
    build.add_argument("--bm25-b", type=float, default=0.4)
    build.add_argument("--encoder", "--model_path", help="dense: a folder or hub id")
    build.add_argument(
        "--faiss", "--faiss_type", default="Flat", help="dense: a faiss factory string (Flat, HNSW32, ...)"
    )
    build.add_argument("--batch", "--batch_size", type=_count, default=64)
    build.add_argument("--max-tokens", "--max_length", type=_count, default=256)
    build.add_argument("--allow-duplicate-ids", action="store_true")
    verify = commands.add_parser("verify", help="compare every byte of an index with its manifest")
    verify.add_argument("--index", required=True)
    imported = commands.add_parser("import", help="take over a faiss index of Search-R1's beside its corpus")
    imported.add_argument("--corpus", "--corpus_path", required=True)
    imported.add_argument("--faiss-index", "--index_path", required=True, help="e5_Flat.index, e5_HNSW64.index, ...")
    imported.add_argument("--encoder", "--retriever_model", required=True)
    imported.add_argument("--index", required=True, help="folder to make; the faiss file is linked into it")
    imported.add_argument("--workers", type=_count, default=1)
    imported.add_argument("--max-tokens", type=_count, default=256)
    imported.add_argument("--allow-duplicate-ids", action="store_true")
    return parser.parse_args(argv)


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit_scale=True, mininterval=0.5, disable=None) as bar:
        yield lambda n: bar.update(n) and None


def _say(message: str) -> None:
    print(f"retrieval_server: {message}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """0, or 2 with one line that says what is wrong."""
    arguments = _parse(argv)
    try:
        return {"build": _build, "verify": _verify, "import": _import}[arguments.command](arguments)
    except StartupError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        return 130
    except ImportError as error:
        _say(f"error: {error.name or error} is not installed; pip install 'mapd-verl[retrieval,dense]'")
        return 2
    except OSError as error:
        _say(f"error: {error.filename or ''}: {error.strerror or error}")
        return 2


def _options(arguments: argparse.Namespace, backends: tuple[str, ...], dense: Any = None) -> Any:
    from .build import BuildOptions

    return BuildOptions(
        arguments.corpus,
        arguments.index,
        backends,
        arguments.workers,
        getattr(arguments, "bm25_k1", 0.9),
        getattr(arguments, "bm25_b", 0.4),
        dense,
        allow_duplicate_ids=arguments.allow_duplicate_ids,
    )


def _build(arguments: argparse.Namespace) -> int:
    from .build import DenseOptions, build

    backends = ("bm25", "dense") if arguments.backend == "hybrid" else (arguments.backend,)
    dense = None
    if "dense" in backends:
        if arguments.encoder is None:
            raise StartupError(f"--backend {arguments.backend} needs --encoder")
        dense = DenseOptions(arguments.encoder, arguments.faiss, arguments.batch, arguments.max_tokens)
    manifest = build(_options(arguments, backends, dense), _bar, _say)
    size = sum(facts.bytes for facts in manifest.files.values())
    rows = manifest.corpus["rows"]
    _say(f"{arguments.index}: {rows} passages, {size} bytes beside the corpus ({size / rows:.0f} a passage)")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from .manifest import Manifest, check

    folder = Path(arguments.index)
    manifest = Manifest.read(folder)
    total = manifest.corpus["bytes"] + sum(facts.bytes for facts in manifest.files.values())
    with _bar("hashing", total) as advance:
        check(folder, manifest, True, advance)
    _say(f"{folder}: {manifest.corpus['rows']} passages, {', '.join(manifest.backends)}; all as it was built")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    import faiss

    from .build import build
    from .encoder import Encoder
    from .manifest import IndexFault

    source = Path(arguments.faiss_index)
    if not source.is_file():
        raise StartupError(f"--faiss-index {source}: no such file")
    try:
        index = faiss.read_index(str(source), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise StartupError(f"--faiss-index {source}: faiss can't read it ({str(error).splitlines()[-1]})") from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexFault(f"{source} was built for distances (metric {index.metric_type}), not inner products")
    encoder = Encoder(arguments.encoder, max_tokens=arguments.max_tokens)
    if encoder.dimension != index.d:
        raise IndexFault(f"{source} has {index.d}-dimensional vectors, the encoder {encoder.name} {encoder.dimension}")

    def add(staging: Path, rows: int) -> dict[str, dict[str, Any]]:
        if rows != index.ntotal:
            raise IndexFault(f"{source} holds {index.ntotal} vectors, {arguments.corpus} has {rows} rows")
        folder = staging / "dense"
        folder.mkdir(exist_ok=True)
        link = folder / "index.faiss"
        link.unlink(missing_ok=True)
        try:
            link.hardlink_to(source)
        except OSError:  # another file system
            shutil.copyfile(source, link)
        settings = {
            **encoder.settings(),
            "passages": rows,
            "factory": type(index).__name__,
            "metric": "inner_product",
            "file": "dense/index.faiss",
        }
        return {"dense": settings}

    manifest = build(_options(arguments, ()), _bar, _say, add)
    _say(f"{arguments.index}: {manifest.corpus['rows']} passages")
    return 0
