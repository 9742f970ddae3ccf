"""What an index was made from and what it consists of: ``manifest.json``, and the checks against it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import StartupError
from ..tokenizer import TOKENIZER

FORMAT = 1
NAME = "manifest.json"
_BLOCK = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class IndexFault(StartupError):
    """The index can't be used; the message names it and what disagrees."""


@dataclass
class FileFacts:
    """``sample`` hashes the head, the tail and 64 blocks between them: what a start can afford to read."""

    bytes: int
    sha256: str
    sample: str


@dataclass
class Manifest:
    """Everything a start compares.

    Attributes:
        corpus: ``path`` (absolute; relative where it lies inside the index), ``rows``, ``untitled``, the file's facts.
        backends: name -> settings and counts (``bm25``: k1, b, tokenizer; ``dense``: encoder, prefixes, pooling,
            dimension, metric, factory).
        files: relative path -> facts.
        versions: of what wrote it.
    """

    corpus: dict[str, Any]
    backends: dict[str, dict[str, Any]]
    files: dict[str, FileFacts] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """``manifest.json`` in ``folder``."""
        (folder / NAME).write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises IndexFault for a folder that holds no index, a broken manifest or one of another format."""
        path = folder / NAME
        if not folder.is_dir():
            raise IndexFault(f"index {folder}: no such folder")
        if not path.is_file():
            raise IndexFault(f"index {folder}: holds no {NAME}; build one with `python -m retrieval_server build`")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("format") != FORMAT:
                raise IndexFault(
                    f"index {folder}: format {data.get('format')!r}, this version reads {FORMAT}; rebuild it"
                )
            files = {name: FileFacts(**facts) for name, facts in data["files"].items()}
            return cls(data["corpus"], data["backends"], files, data["versions"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexFault(f"index {folder}: {NAME} is broken ({type(error).__name__}: {error})") from error

    def corpus_path(self, folder: Path) -> Path:
        """Where the corpus lies."""
        return folder / self.corpus["path"]


def facts_of(path: Path, progress: Callable[[int], None] = lambda n: None) -> FileFacts:
    """Read a whole file once; ``progress`` hears of bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return FileFacts(path.stat().st_size, digest.hexdigest(), sample_of(path))


def sample_of(path: Path) -> str:
    """SHA-256 of a file's sampled blocks."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for i in range(_SAMPLES + 1):
            file.seek(max(0, (size - _SAMPLE_BYTES) * i // _SAMPLES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check(folder: Path, manifest: Manifest, thorough: bool, progress: Callable[[int], None] = lambda n: None) -> None:
    """Compare every file with the manifest; ``thorough`` reads them whole.

    Raises:
        IndexFault: naming the file and what disagrees.
    """
    facts = {name: (folder / name, known) for name, known in manifest.files.items()}
    corpus = FileFacts(*(manifest.corpus[key] for key in ("bytes", "sha256", "sample")))
    facts["the corpus"] = (manifest.corpus_path(folder), corpus)
    for name, (path, known) in facts.items():
        shown = f"index {folder}: {name}" if name != "the corpus" else f"index {folder}: the corpus {path}"
        if not path.is_file():
            raise IndexFault(f"{shown} is missing")
        size = path.stat().st_size
        if size != known.bytes:
            raise IndexFault(f"{shown} has {size} bytes, was built with {known.bytes}; restore it or rebuild")
        if thorough:
            if facts_of(path, progress).sha256 != known.sha256:
                raise IndexFault(f"{shown} has changed since the build (SHA-256 differs); restore it or rebuild")
        elif sample_of(path) != known.sample:
            raise IndexFault(f"{shown} has changed since the build; restore it or rebuild")
    bm25 = manifest.backends.get("bm25")
    if bm25 is not None and bm25["tokenizer"] != TOKENIZER:
        raise IndexFault(
            f"index {folder}: made with the tokenizer {bm25['tokenizer']!r}, this version has {TOKENIZER!r}; rebuild it"
        )
    for name, settings in manifest.backends.items():
        if settings["passages"] != manifest.corpus["rows"]:
            raise IndexFault(
                f"index {folder}: {name} holds {settings['passages']} passages, "
                f"the corpus {manifest.corpus['rows']} rows"
            )


def versions() -> dict[str, str]:
    """Of this package and of what decides an index's bytes."""
    found = {"python": platform.python_version()}
    for name in ("mapd-verl", "numpy", "faiss-cpu", "faiss-gpu-cu12", "transformers", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
