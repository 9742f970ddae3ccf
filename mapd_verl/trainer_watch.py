"""The trainer's side of the collapse alarm and of the best checkpoint; a mixin before verl's trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mapd_verl.best import BestCheckpoint
from mapd_verl.config import MapdConfig
from mapd_verl.errors import UserError
from mapd_verl.watch import CollapseWatch, validation_score

if TYPE_CHECKING:

    class _Base:
        """The part of verl's ``PPOTrainer`` that the mixin stands on."""

        config: Any
        mapd: MapdConfig
        global_steps: int
        total_training_steps: int
        actor_rollout_wg: Any
        train_dataloader: Any

        def on_init_end(self) -> None: ...
        def fit(self, agent_loop_manager: Any) -> None: ...
        def _validate(self) -> dict[str, float]: ...
        def _save_checkpoint(self) -> None: ...
        def _compute_metrics(
            self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int
        ) -> None: ...

else:
    _Base = object

#: Beside verl's files in each checkpoint.
STATE_FILE = "watch.json"


class WatchedSteps(_Base):
    """Looks at each step's metrics when they are complete, and at each validation.

    ``fit`` raises ``UserError`` after a stop, so that the process ends with code 2 and one line.
    """

    _stopped: str | None = None

    def on_init_end(self) -> None:
        super().on_init_end()
        folder = Path(self.config.trainer.default_local_dir)
        self.watch = CollapseWatch(self.mapd.watch)
        self.best = BestCheckpoint(folder, resumed=self.global_steps > 0)
        state = self._checkpoint_folder() / STATE_FILE
        if self.global_steps > 0 and state.is_file():
            self.watch.load_state_dict(json.loads(state.read_text()))
        self._told = False

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        if self._stopped:
            kept = f"the best checkpoint, {self.best.path}, " if self.best.path else "no validated checkpoint "
            raise UserError(f"stopped at step {self.global_steps - 1}: {self._stopped}; {kept}was kept")

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        score = validation_score(metrics)
        if self.mapd.watch.keep_best:
            if score is None:
                raise UserError("mapd.watch.keep_best: validation reported no val-core score to compare")
            if self.best.offer(self.global_steps, score, self._save_best):
                print(f"mapd.watch: step {self.global_steps} validates best so far, {score:.4f}; kept", flush=True)
            metrics["watch/best_score"] = float(self.best.score or 0.0)
        return metrics

    def _save_best(self, folder: Path) -> None:
        self.actor_rollout_wg.save_best(str(folder / "actor"), self.global_steps)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
        self._save_watch(folder)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._save_watch(self._checkpoint_folder())

    def _save_watch(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(json.dumps(self.watch.state_dict()) + "\n")

    def _checkpoint_folder(self) -> Path:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path" and Path(str(trainer.resume_from_path)).name.endswith(
            f"global_step_{self.global_steps}"
        ):
            return Path(trainer.resume_from_path)
        return Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self._look(metrics)

    def _look(self, metrics: dict[str, Any]) -> None:
        action = self.mapd.watch.action
        if action == "off":
            return
        numbers: Mapping[str, float] = metrics
        if not self._told:
            self._told = True
            missing = self.watch.unwatched(numbers)
            if missing:
                print(f"mapd.watch: nothing logged here for the rules {', '.join(missing)}", flush=True)
        alarms = self.watch.observe(numbers)
        metrics["watch/alarm"] = float(len(alarms))
        for alarm in alarms:
            print(f"mapd.watch: step {self.global_steps}: {alarm.text}", flush=True)
        if alarms and action == "stop" and self._stopped is None:
            self._stopped = alarms[0].text
            # fit() runs while the step's number is not above this.
            self.total_training_steps = self.global_steps
