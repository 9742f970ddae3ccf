"""A corpus of any size, addressed by row number without being loaded."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import orjson


class MappedRows:
    """``rows[i]`` is the i-th row's JSON as it stands in the file; the file and the offsets are mapped.

    Args:
        corpus: JSON lines, uncompressed.
        starts, lengths: ``[N]`` int64 and int32, bytes.
    """

    def __init__(self, corpus: str | Path, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._starts, self._lengths = starts, lengths
        self._file = Path(corpus).open("rb")  # noqa: SIM115  it lives as long as the map
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> bytes:
        start = int(self._starts[row])
        return self._map[start : start + int(self._lengths[row])]

    def contents(self, row: int) -> str:
        """The row's text."""
        return orjson.loads(self[row])["contents"]

    def close(self) -> None:
        """Give the map back; rows can't be read afterwards."""
        self._map.close()
        self._file.close()
