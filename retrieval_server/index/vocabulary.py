"""Tokens to numbers without a dictionary in memory: a sorted list in a mapped file."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np


class Vocabulary:
    """Tokens sorted by their UTF-8 bytes; a token's number is its place.

    Args:
        folder: with ``tokens.bin`` (all tokens end to end) and ``token_offsets.npy`` (``[V + 1]`` int64).
    """

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "token_offsets.npy", mmap_mode="r")
        size = (folder / "tokens.bin").stat().st_size
        self._bytes = np.memmap(folder / "tokens.bin", np.uint8, "r", shape=(size,)) if size else np.zeros(0, np.uint8)
        self.find = lru_cache(maxsize=65536)(self._find)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _find(self, token: str) -> int:
        """The token's number, -1 for an unknown one."""
        wanted = token.encode("utf-8", "surrogatepass")
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._token(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._token(low) == wanted else -1

    def _token(self, number: int) -> bytes:
        return self._bytes[self._offsets[number] : self._offsets[number + 1]].tobytes()

    @staticmethod
    def write(folder: Path, tokens: Iterable[bytes]) -> int:
        """Write sorted tokens as they come; returns their number."""
        offsets = [0]
        with (folder / "tokens.bin").open("wb") as file:
            for token in tokens:
                file.write(token)
                offsets.append(offsets[-1] + len(token))
        np.save(folder / "token_offsets.npy", np.asarray(offsets, np.int64))
        return len(offsets) - 1
