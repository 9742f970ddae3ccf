"""verl's workers with the two-view engine; thin on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from mapd_verl.config import MapdConfig
from mapd_verl.engine import register_two_view_engine
from mapd_verl.loss import TEACHER_LOG_PROBS, MapdLoss
from mapd_verl.objectives import AuxiliaryLoss, GatedLoss, make_objective
from mapd_verl.plugin import assert_loaded
from mapd_verl.teachers import make_teacher
from mapd_verl.token_filter import TokenFilter
from mapd_verl.verl_seams import (
    ActorRolloutRefWorker,
    DetachActorWorker,
    Dispatch,
    TrainingWorker,
    get_device_name,
    make_nd_compute_dataproto_dispatch_fn,
    register_worker_method,
    tensordict_utils,
)


class MapdTrainingWorker(TrainingWorker):
    """A training worker whose engine is :class:`mapd_verl.engine.TwoViewEngine` over verl's."""

    def __init__(self, config: Any) -> None:
        assert_loaded()
        engine = register_two_view_engine(config.model_type, config.engine_config.strategy)
        super().__init__(replace(config, model_type=engine))
        # verl chooses the engine by this name and, when the model is built, the kind of model to load.
        self.model_config.model_type = config.model_type


class MapdActorRolloutRefWorker(ActorRolloutRefWorker):
    """The colocated worker; the trainer tells it the objective once the models stand."""

    actor_worker_cls = MapdTrainingWorker
    ref_worker_cls = MapdTrainingWorker

    @register_worker_method(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_mapd(self, section: dict[str, Any], run_folder: str) -> None:
        """Take the recipe's ``mapd`` section (plain containers). With no active objective verl's loss stays.

        Args:
            run_folder: ``trainer.default_local_dir``.
        """
        config = MapdConfig.from_mapping(section)
        for worker in (self.actor, self.ref):
            if worker is not None:
                worker.engine.lean = config.forward == "lean"
                worker.engine.chunk_tokens = config.objective.chunk_tokens
        self.actor.engine.nan_guard = config.nan_guard
        self.actor.engine.nan_folder = Path(config.nan_guard.folder or Path(run_folder) / "nan")
        objective, token_filter = make_objective(config.objective), TokenFilter(config.filter)
        if objective.needs_teacher:
            self.actor.engine.token_filter = token_filter
            self.actor.engine.teacher = teacher = make_teacher(config.teacher)
            teacher.prepare(self.actor.engine)
        if isinstance(objective, AuxiliaryLoss | GatedLoss):
            self.actor.set_loss_fn(MapdLoss(self.loss_fn, objective, token_filter))
        else:
            self.actor.set_loss_fn(self.loss_fn)

    @register_worker_method(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_teacher(self) -> None:
        """The policy is now the snapshot teacher."""
        self.actor.engine.teacher.before_update(self.actor.engine)

    @register_worker_method(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_teacher_log_prob(self, data: TensorDict) -> TensorDict:
        """``teacher_log_probs`` of the batch: the teacher's of each policy token of a row with a context, else 0.

        Nested like ``responses``; the temperature is the batch's.
        """
        engine = self.actor.engine
        tensordict_utils.assign_non_tensor(data, use_remove_padding=self.actor.model_config.use_remove_padding)
        with engine.eval_mode(), torch.no_grad():
            scored = engine.teacher_log_probs(data, self.actor.engine_config.infer_micro_batch_size_per_gpu)
        return TensorDict({TEACHER_LOG_PROBS: scored.cpu()}, batch_size=[len(data)])

    @register_worker_method(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_best(self, path: str, global_step: int) -> None:
        """Save a checkpoint that the rotation of ``max_actor_ckpt_to_keep`` neither counts nor removes.

        Args:
            path: folder to make.
        """
        self.actor.save_checkpoint(path, None, global_step, max_ckpt_to_keep=None)
        manager = self.actor.engine.checkpoint_manager
        manager.previous_saved_paths = [saved for saved in manager.previous_saved_paths if saved != path]


class MapdDetachActorWorker(MapdActorRolloutRefWorker, DetachActorWorker):
    """The same with verl's parameter snapshots, which its separate-async trainer takes and restores."""

    @property
    def copy_handler(self) -> Any:
        """Upstream's bug on CPU: ``.cpu()`` of a tensor that is there already is that tensor, so that the snapshot
        would follow the training."""
        copy = super().copy_handler

        def snapshot(module: Any) -> Any:
            state = copy(module)
            shards, rest = state if isinstance(state, tuple) else (state, None)
            fresh = {
                name: (value[0].clone(), *value[1:]) if isinstance(value, tuple) else value.clone()
                for name, value in shards.items()
            }
            return (fresh, rest) if isinstance(state, tuple) else fresh

        return snapshot if get_device_name() == "cpu" else copy
