"""Reading a Search-R1 corpus: JSON lines with ``id`` and ``contents``, plain or gzip."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from .errors import CorpusError

#: Called with a share of the file between 0 and 1; may raise to stop the load.
Progress = Callable[[float], None]

_LINES_BETWEEN_REPORTS = 1000


@dataclass(frozen=True)
class Corpus:
    """All passages of one file, in file order.

    ``rows[i]`` is the i-th row as JSON bytes, whole as it was in the file (also fields of the
    user's own), ready to be put into an answer; ``contents[i]`` is its text. ``untitled`` counts
    rows without a line break: their whole text is the title and their body is empty. ``sha256`` is the file's.
    """

    path: Path
    rows: list[bytes]
    contents: list[str]
    untitled: int
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)


def check_corpus_path(path: str | os.PathLike[str]) -> Path:
    """The path, once it is known to be a readable and non-empty file; raises CorpusError."""
    path = Path(path)
    if not path.exists():
        raise CorpusError(f"corpus {path}: no such file")
    if not path.is_file():
        raise CorpusError(f"corpus {path}: not a file")
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise CorpusError(f"corpus {path}: the file is empty")
    except OSError as error:
        raise CorpusError(f"corpus {path}: can't be read ({error.strerror})") from error
    return path


def parse_row(line: bytes, where: str) -> tuple[str, str]:
    """The id (as text) and the contents of one line; raises CorpusError."""
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise CorpusError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for field in ("id", "contents"):
        if field not in row:
            found = ", ".join(list(row)[:8]) or "none"
            raise CorpusError(f"{where}: field '{field}' is missing (fields there: {found})")
    identifier, contents = row["id"], row["contents"]
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise CorpusError(f"{where}: field 'id' must be a non-empty string, got {identifier!r}")
    if not isinstance(contents, str):
        raise CorpusError(f"{where}: field 'contents' must be a string, got {type(contents).__name__}")
    if not contents.strip():
        raise CorpusError(f"{where}: field 'contents' is blank (id {identifier!r})")
    return str(identifier), contents


def load_corpus(path: str | os.PathLike[str], progress: Progress = lambda share: None) -> Corpus:
    """Read and check a whole corpus; blank lines are skipped, a byte-order mark is allowed.

    Raises CorpusError for a missing or empty file, a malformed line, a wrong or missing field or a
    repeated id, naming the file and the line (counted from 1).
    """
    path = check_corpus_path(path)
    size = path.stat().st_size
    rows: list[bytes] = []
    texts: list[str] = []
    lines_of_ids: dict[str, int] = {}
    untitled = 0
    raw: BinaryIO
    with path.open("rb") as raw:
        file: Any = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for number, line in enumerate(file, start=1):
                if number % _LINES_BETWEEN_REPORTS == 0:
                    progress(min(1.0, raw.tell() / size))
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                line = line.strip()
                if not line:
                    continue
                where = f"{path}:{number}"
                identifier, contents = parse_row(line, where)
                if identifier in lines_of_ids:
                    raise CorpusError(f"{where}: id {identifier!r} is already used on line {lines_of_ids[identifier]}")
                lines_of_ids[identifier] = number
                untitled += "\n" not in contents.strip()
                rows.append(line)
                texts.append(contents)
        except (OSError, EOFError) as error:
            raise CorpusError(f"corpus {path}: reading failed after {len(rows)} rows ({error})") from error
    if not rows:
        raise CorpusError(f"corpus {path}: holds no passage, only blank lines")
    progress(1.0)
    with path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    return Corpus(path, rows, texts, untitled, digest)
