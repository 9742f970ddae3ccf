"""verl's V1 trainers with privileged contexts: one mixin before each of verl's modes, thin on purpose.

Between the rewards and the update it chooses each rollout's context (``privilege/``), writes the teacher's
prompts beside the batch, and afterwards folds what the loss reported into the step's metrics. Everything
else is verl's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from mapd_verl import metrics as step_metrics
from mapd_verl import sampled_signal
from mapd_verl.agent.metrics import agent_metrics
from mapd_verl.config import MapdConfig
from mapd_verl.errors import UserError
from mapd_verl.insight import TASKS
from mapd_verl.loss import WEIGHT
from mapd_verl.objectives import AdvantageObjective, RewardObjective, make_objective
from mapd_verl.plugin import assert_loaded
from mapd_verl.privilege import SOURCE_IDS, Rollout, Source, choose_contexts, make_source, privileged_prompt_ids
from mapd_verl.schedule import factor
from mapd_verl.trainer_watch import WatchedSteps
from mapd_verl.verl_seams import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    Role,
    keep_trainer_mode,
    marked_timer,
    register_trainer,
    set_poll_interval,
    tq,
)
from mapd_verl.views import ragged
from mapd_verl.worker import MapdActorRolloutRefWorker, MapdDetachActorWorker

if TYPE_CHECKING:

    class _Base:
        """The part of verl's ``PPOTrainer`` that the mixin stands on."""

        config: Any
        tokenizer: Any
        timing_raw: dict
        train_dataset: Any
        role_worker_mapping: dict
        actor_rollout_wg: Any

        def __init__(self, config: Any) -> None: ...
        def _init_resource_pool_mgr(self) -> None: ...

        global_steps: int
        total_training_steps: int

        def _load_checkpoint(self) -> None: ...
        def on_init_end(self) -> None: ...
        def _compute_advantage(self, batch: Any, metrics: dict) -> Any: ...
        def _update_actor(self, batch: Any, metrics: dict) -> Any: ...
        def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None: ...
        def _dump_generations(
            self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict, dump_path: str
        ) -> None: ...

else:
    _Base = object


class MapdSteps(_Base):
    """What every mode adds to verl's trainer.

    Raises:
        UserError: the ``mapd`` section is wrong, or asks for something the rest of the recipe rules out.
    """

    #: verl's own name of the mode that the subclass is built on.
    mode = "sync"
    worker: type = MapdActorRolloutRefWorker

    def __init__(self, config: Any) -> None:
        assert_loaded()
        section = OmegaConf.to_container(config.get("mapd") or OmegaConf.create({}), resolve=True)
        self.mapd = MapdConfig.from_mapping(section)  # type: ignore[arg-type]  # a mapping, as the schema checks
        self._section = section
        self.objective = make_objective(self.mapd.objective)
        keep_trainer_mode(config, self.mode)
        super().__init__(config)
        set_poll_interval(self, self.mapd.poll_interval)
        self.sources: list[Source] = []
        #: Of the step at hand: queue key -> what the rollout dump says beyond verl's own columns.
        self._contexts: dict[str, dict[str, Any]] = {}
        self._dump_columns: dict[str, dict[str, Any]] = {}

    # ----------------------------------------------------------------- wiring

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker)

    def _load_checkpoint(self) -> None:
        # Before any checkpoint: a teacher may be the policy as it was before training.
        self.actor_rollout_wg.set_mapd(self._section, str(self.config.trainer.default_local_dir))
        super()._load_checkpoint()

    def on_init_end(self) -> None:
        super().on_init_end()
        names = dict.fromkeys((self.mapd.privilege.context, self.mapd.privilege.fallback))
        self.sources = [make_source(name, self._decode, self.mapd.privilege.success_score) for name in names]

    def _decode(self, ids: Sequence[int]) -> str:
        """Text of response ids with the agent's tags (they may be special tokens) but no end marker."""
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        kept = list(ids)
        while kept and kept[-1] in ends:
            kept.pop()
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    # ----------------------------------------------------------------- the step

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        objective = self.objective
        if not objective.needs_teacher:
            return super()._compute_advantage(batch, metrics)
        with marked_timer("privilege", self.timing_raw):
            batch = self._put_contexts(batch, metrics)
        if not objective.needs_signal:
            return super()._compute_advantage(batch, metrics)
        with marked_timer("teacher_log_prob", self.timing_raw):
            batch = sampled_signal.score(
                self.actor_rollout_wg, batch, self.config.actor_rollout_ref.rollout.temperature
            )
        if isinstance(objective, RewardObjective):
            with sampled_signal.changed_rewards(batch, objective, self._weight(), self.mapd, metrics):
                return super()._compute_advantage(batch, metrics)
        batch = super()._compute_advantage(batch, metrics)
        if isinstance(objective, AdvantageObjective):
            batch = sampled_signal.change_advantages(batch, objective, self._weight(), self.mapd, metrics)
        return batch

    def _weight(self) -> float:
        """Lambda at this step."""
        return self.objective.weight * factor(self.mapd.schedule, self.global_steps, self.total_training_steps)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        self._agent_metrics(batch, metrics)
        if self.objective.needs_teacher:
            metrics["distillation/weight"] = batch.extra_info[WEIGHT] = self._weight()
        if self.objective.in_update and self.mapd.teacher.kind == "snapshot":
            self.actor_rollout_wg.snapshot_teacher()
        batch = super()._update_actor(batch, metrics)
        actor = self.config.actor_rollout_ref.actor
        mini_batch = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        step_metrics.fold_raw_sums(metrics, updates=actor.ppo_epochs * len(batch) // mini_batch)
        return batch

    def _put_contexts(self, batch: Any, metrics: dict) -> Any:
        """Choose a context for every rollout and write the teacher's prompts to the queue.

        Returns the batch's new handle: workers fetch only the fields that a handle lists.

        Padding rows are copies of a real row's custom fields at that row's length (verl's padding_utils);
        they get fields of their own here: no context, and a prompt that is never read.
        """
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS)
        prompts = [row.tolist() for row in data["prompts"].unbind()]
        rollouts = self._rollouts(batch, data, prompts)
        messages = _column(data, "raw_prompt", len(batch))
        made: dict[tuple[str, str], list[int]] = {}
        teacher_prompts, numbers = [], []
        self._contexts = {}
        chosen = _choose_in_order(batch.keys, rollouts, self.sources)
        for i, (name, context) in enumerate(chosen):
            if context is None or not (context.text or context.prompt_ids is not None):
                ids = prompts[i]
            elif context.prompt_ids is not None:
                ids = list(context.prompt_ids)
            else:
                key = (rollouts[i].group, context.text)
                if key not in made:
                    made[key] = self._privileged_prompt(messages[i], context.text)
                ids = made[key]
            teacher_prompts.append(torch.tensor(ids, dtype=torch.int64))
            numbers.append(SOURCE_IDS[name])
            self._contexts[batch.keys[i]] = {
                "privilege_source": name,
                "teacher_prompt": self.tokenizer.decode(ids) if context is not None else None,
            }
        fields = {"teacher_prompt_ids": ragged(teacher_prompts), "privilege_source": torch.tensor(numbers)}
        fields["task_ids"] = torch.tensor([_task_id(task) for task in _column(data, "task_type", len(batch))])
        fields |= _trim_padding(data, rollouts)
        batch = tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
        )
        real = [name for (name, _), rollout in zip(chosen, rollouts, strict=True) if not rollout.is_padding]
        configured = {"protocol", "own_rollout", "none", self.mapd.privilege.context, self.mapd.privilege.fallback}
        metrics.update(step_metrics.source_shares(real, configured))
        lengths = [float(len(ids)) for ids, n in zip(teacher_prompts, numbers, strict=True) if n > 0]
        metrics.update(step_metrics.mean_min_max("distillation/teacher_prompt_length", lengths))
        return batch

    def _privileged_prompt(self, messages: Any, context: str) -> list[int]:
        if messages is None:
            raise UserError("the batch lacks 'raw_prompt': a privileged prompt needs the question's chat messages")
        kwargs = self.config.data.get("apply_chat_template_kwargs") or {}
        privilege = self.mapd.privilege
        return privileged_prompt_ids(
            self.tokenizer, messages, context, privilege.template, privilege.max_context_tokens, kwargs
        )

    def _rollouts(self, batch: Any, data: TensorDict, prompts: list[list[int]]) -> list[Rollout]:
        """The batch's rows as the sources see them."""
        n = len(batch)
        has_protocol = _column(data, "has_protocol", n)
        ready = data["teacher_prompt_ids"].unbind() if "teacher_prompt_ids" in data else [None] * n
        columns = zip(
            batch.tags,
            _column(data, "uid", n),
            _column(data, "question_id", n),
            data["rm_scores"].unbind(),
            data["responses"].unbind(),
            _column(data, "protocol", n),
            has_protocol,
            ready,
            _column(data, "reward_model", n),
            strict=True,
        )
        return [
            Rollout(
                group=str(uid),
                question_id=str(uid if question_id is None else question_id),
                score=float(scores.sum()),
                response_ids=response.tolist(),
                protocol=text or None,
                protocol_prompt_ids=prompt.tolist() if prompt is not None and bool(flag) else None,
                answer=_first_target(reward_model),
                is_padding=bool(tag.get("is_padding", False)),
            )
            for tag, uid, question_id, scores, response, text, flag, prompt, reward_model in columns
        ]

    def _reports(self, batch: Any) -> list[dict[str, Any]]:
        """What the agent loop reported of each rollout (``reward_extra_info``); empty dicts where it did not."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        columns = _column(data, "extra_fields", len(batch))
        return [(fields or {}).get("reward_extra_info") or {} for fields in columns]

    def _agent_metrics(self, batch: Any, metrics: dict) -> None:
        """Searches per question, policy tokens and the like, where the agent loop reports them."""
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        metrics["agent/rollouts"] = sum(real)
        reports = [report for report, is_real in zip(self._reports(batch), real, strict=True) if is_real and report]
        if reports and "searches" in reports[0]:
            metrics.update(agent_metrics(reports))
        if self.mapd.protocols.path is not None:
            fields = ["uid", "protocol_state"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            columns = zip(_column(data, "uid", len(batch)), _column(data, "protocol_state", len(batch)), strict=True)
            known = [(str(uid), str(s)) for (uid, s), is_real in zip(columns, real, strict=True) if is_real]
            join = getattr(self.train_dataset, "join", None)
            metrics.update(step_metrics.protocol_states([u for u, _ in known], [s for _, s in known], join))

    # ------------------------------------------------------------------ records

    def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None:
        """verl's dump of a step's rollouts names neither question nor context; these columns are added."""
        self._dump_columns = {
            key: report | self._contexts.get(key, {})
            for key, report in zip(batch.keys, self._reports(batch), strict=True)
        }
        try:
            super()._log_rollout_data(batch, timing_raw, rollout_data_dir)
        finally:
            self._dump_columns = {}

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict, dump_path: str
    ) -> None:
        rows = [self._dump_columns.get(key, {}) for key in reward_extra_infos_dict["uid"]]
        names = dict.fromkeys(name for row in rows for name in row)
        extra = {name: [row.get(name) for row in rows] for name in names}
        super()._dump_generations(inputs, outputs, gts, scores, extra | reward_extra_infos_dict, dump_path)


@register_trainer("mapd_sync")
class MapdTrainer(WatchedSteps, MapdSteps, PPOTrainerSync):
    """``trainer.v1.trainer_mode=mapd_sync``: rollouts and update take turns on the same devices."""


@register_trainer("mapd_colocate_async")
class MapdTrainerColocateAsync(WatchedSteps, MapdSteps, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=mapd_colocate_async``: a step takes the groups that are ready; the others' requests
    are aborted at the update and go on with the new weights."""

    mode = "colocate_async"


@register_trainer("mapd_separate_async")
class MapdTrainerSeparateAsync(WatchedSteps, MapdSteps, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=mapd_separate_async``: rollouts on devices of their own, beside the update."""

    mode = "separate_async"
    worker = MapdDetachActorWorker


_FIELDS = [
    "uid",
    "raw_prompt",
    "prompts",
    "responses",
    "rm_scores",
    "turn_ids",
    "action_ids",
    "teacher_prompt_ids",
    "has_protocol",
    "protocol",
    "question_id",
    "reward_model",
    "task_type",
]


def _choose_in_order(keys: Sequence[str], rollouts: Sequence[Rollout], sources: Sequence[Source]) -> list:
    """:func:`choose_contexts` on the rollouts in an order that a rerun repeats; the result is in the given one.

    The queue hands rollouts over as they finished, and groups under random names.
    """

    def place(i: int) -> tuple[str, int]:
        # verl's key: {uid}_{session}_{index}; the session counts the rollouts of a question.
        return rollouts[i].question_id, int(keys[i].rsplit("_", 2)[1])

    order = sorted(range(len(rollouts)), key=place)
    chosen: list = [None] * len(rollouts)
    for i, choice in zip(order, choose_contexts([rollouts[i] for i in order], sources), strict=True):
        chosen[i] = choice
    return chosen


def _column(data: TensorDict, name: str, rows: int) -> list[Any]:
    """A field that may be absent, one entry a row (verl hands non-tensor fields over in several wrappings)."""
    if name not in data:
        return [None] * rows
    value = data[name]
    if isinstance(value, torch.Tensor):
        # The queue hands one-element rows back as a nested tensor.
        return [row.reshape(-1)[0].item() for row in value.unbind()]
    return [getattr(entry, "data", entry) for entry in (value.tolist() if hasattr(value, "tolist") else list(value))]


def _task_id(task_type: str | None) -> int:
    """Its place in ``insight.TASKS``."""
    return TASKS.index(task_type) if task_type in TASKS else TASKS.index("no_protocol")


def _first_target(reward_model: Any) -> str | None:
    """The first gold answer of a Search-R1 ``reward_model`` column."""
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else truth
    if isinstance(target, str) or target is None:
        return target
    return str(target[0]) if len(target) else None


def _trim_padding(data: TensorDict, rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """Turn and action ids whose padding rows fit their one-token response; nothing if there is none."""
    if not any(rollout.is_padding for rollout in rollouts):
        return {}
    trimmed = {}
    for name in ("turn_ids", "action_ids"):
        if name in data:
            rows = data[name].unbind()
            trimmed[name] = ragged(
                [
                    row.new_full((len(rollout.response_ids),), -1) if rollout.is_padding else row
                    for row, rollout in zip(rows, rollouts, strict=True)
                ]
            )
    return trimmed
