"""What serving costs in memory, said before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from .manifest import IndexFault, Manifest

_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that this process may still take: the machine's, or its control group's where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free  # no control group of the second version
    return max(0, free)


def tiers(rows: int, dimension: int) -> dict[str, int]:
    """Bytes in memory of each kind of dense index, and of BM25 (mapped: what is touched, at most all of it)."""
    return {
        "Flat (fp32)": 4 * rows * dimension,
        "SQfp16": 2 * rows * dimension,
        "HNSW32": rows * (4 * dimension + 2 * 32 * 4 + 16),
        f"PQ{dimension // 8}": rows * (dimension // 8),
        "bm25 (mapped)": 661 * rows,
    }


def require(manifest: Manifest, folder: Path, free: int | None = None) -> None:
    """Refuse a dense index that won't fit.

    Raises:
        IndexFault: with both numbers and what would fit.
    """
    dense = manifest.backends["dense"]
    needed = manifest.files[dense["file"]].bytes
    free = available() if free is None else free
    if needed <= 0.9 * free:
        return
    fits = [
        f"{name} {_gib(size)}"
        for name, size in tiers(dense["passages"], dense["dimension"]).items()
        if size <= 0.9 * free
    ]
    raise IndexFault(
        f"index {folder}: the vectors take {_gib(needed)}, {_gib(free)} are free; "
        f"what would fit: {', '.join(fits) or 'nothing here'}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
