"""The best checkpoint of a run, kept beside verl's rotating ones: ``default_local_dir/best/global_step_N``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path


class BestCheckpoint:
    """One folder, replaced when a better score comes; a run that dies midway leaves the old one or the new one.

    Args:
        run_folder: ``trainer.default_local_dir``.
        resumed: go on from what is there; a run from scratch has no best yet and replaces the folder at its first.
    """

    def __init__(self, run_folder: str | Path, resumed: bool) -> None:
        self.folder = Path(run_folder) / "best"
        self.score: float | None = None
        self.step: int | None = None
        made = self.folder.with_name("best.new")
        if not self.folder.exists() and (made / "best.json").is_file():
            made.rename(self.folder)  # the last run died between the two renames of offer()
        card = self.folder / "best.json"
        if resumed and card.is_file():
            facts = json.loads(card.read_text())
            self.score, self.step = float(facts["score"]), int(facts["step"])

    @property
    def path(self) -> Path | None:
        """What ``trainer.resume_from_path`` takes; None before the first."""
        return None if self.step is None else self.folder / f"global_step_{self.step}"

    def offer(self, step: int, score: float, save: Callable[[Path], None]) -> bool:
        """Keep step ``step`` if it beats the best so far (NaN never does).

        Args:
            score: higher is better.
            save: writes the checkpoint into the folder that it is given.

        Returns:
            whether it was kept.
        """
        if not (self.score is None or score > self.score) or score != score:
            return False
        made = self.folder.with_name("best.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        save(made / f"global_step_{step}")
        (made / "best.json").write_text(json.dumps({"step": step, "score": score}) + "\n")
        old = self.folder.with_name("best.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        made.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self.score, self.step = score, step
        return True
