"""Atomic files: whole or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol_cache.exchange.entry import ExchangeError
from protocol_cache.store import ProtocolStore

_SIDE_FILES = (".body", "-wal", "-shm", "-journal")


@contextmanager
def replacing(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path``; it takes its place when the block ends well, and goes when it does not.

    Raises:
        ExchangeError: ``path`` exists (unless ``overwrite``), or its folder does not.
    """
    if not path.parent.is_dir():
        raise ExchangeError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not overwrite:
        raise ExchangeError(f"{path}: exists already (--overwrite replaces it)")
    _sweep(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        # The log of a cache that stood here, left by a killed writer, would be replayed into the new one.
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        for end in ("", *_SIDE_FILES):
            partial.with_name(partial.name + end).unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what killed processes left of earlier tries at ``path``."""
    ends = "|".join(map(re.escape, _SIDE_FILES))
    pattern = re.compile(re.escape(f".{path.name}.") + rf"(\d+)\.partial(?:{ends})?")
    for left in path.parent.iterdir():
        found = pattern.fullmatch(left.name)
        if found and not _alive(int(found.group(1))):
            left.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


class FillingStore(ProtocolStore):
    """A new cache that is filled in one go, under a temporary name: no single commit has to be on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.execute("PRAGMA synchronous = OFF")
