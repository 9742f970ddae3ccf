"""What a run has done already: ``RUN/state.json``, one entry for each finished stage.

A stage is done when its entry's fingerprint equals that of its inputs now and its outputs still exist.
So a second run takes up after the last finished stage, and a changed seed, recipe or program redoes
what depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError


def fingerprint(*inputs: Any) -> str:
    """A hash of values and files: a :class:`Path` counts by its bytes (a folder by all of its files).

    Raises:
        FileNotFoundError: an input file is missing.
    """
    digest = hashlib.sha256()
    for value in inputs:
        if isinstance(value, Path):
            files = sorted(p for p in value.rglob("*") if p.is_file()) if value.is_dir() else [value]
            for file in files:
                if "__pycache__" not in file.parts:
                    digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        else:
            digest.update(json.dumps(value, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()[:16]


class RunState:
    """The record of one run folder.

    Raises:
        UserError: ``state.json`` is not a record of this program (remedy: ``--fresh``).
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "state.json"
        self.stages: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                self.stages = json.loads(self.path.read_text())["stages"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}: not readable as a run's state; start over with --fresh") from error

    def done(self, name: str, print_of_inputs: str, outputs: tuple[Path, ...] = ()) -> bool:
        """Whether stage ``name`` has finished with these inputs and its outputs are still there."""
        entry = self.stages.get(name)
        return entry is not None and entry["inputs"] == print_of_inputs and all(p.exists() for p in outputs)

    def stage(
        self, name: str, print_of_inputs: str, outputs: tuple[Path, ...], work: Callable[[], dict[str, Any] | None]
    ) -> dict[str, Any]:
        """Do ``work`` unless it is done, and return its entry: ``seconds``, ``result``, ``inputs``.

        Raises:
            UserError: the work ended without leaving one of its outputs.
        """
        if self.done(name, print_of_inputs, outputs):
            return {**self.stages[name], "resumed": True}
        begin = time.monotonic()
        result = work()
        for output in outputs:
            if not output.exists():
                raise UserError(f"stage '{name}' ended without writing {output}")
        self.stages[name] = {
            "inputs": print_of_inputs,
            "seconds": round(time.monotonic() - begin, 2),
            "result": result or {},
        }
        self._write()
        return {**self.stages[name], "resumed": False}

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".tmp{os.getpid()}")
        temporary.write_text(json.dumps({"version": 1, "stages": self.stages}, indent=1) + "\n")
        os.replace(temporary, self.path)
