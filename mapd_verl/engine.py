"""The update's two forwards: verl's FSDP engine with a teacher branch and a head for policy tokens only.

Why here and not in the loss function or before the update: docs/decisions/0002-where-the-teacher-forward-sits.md.

A micro-batch goes through, in this order: the teacher's view without gradient and in evaluation mode, then
the student's view as verl runs it. Both use the parameters as they are at this moment. The per-token
divergence joins verl's model output under ``divergence``, in the layout of ``log_probs``; ``loss.py``
aggregates it.

``mapd.forward: lean`` leaves out, in every forward, what no loss reads; values change by rounding only:

* only policy tokens are projected onto the vocabulary, not the prompt and not the observations;
* rows that are padded on the right get no padding mask: under causal attention no token sees what follows
  it, so the mask changes padding alone, and without it attention takes its causal kernel;
* rows of like length share a micro-batch. Gradients are summed over micro-batches with counts of the whole
  mini-batch, so that which rows go together is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from mapd_verl import head, views
from mapd_verl.config.method import FilterConfig, TeacherConfig
from mapd_verl.divergence import Head, TeacherStates
from mapd_verl.errors import UserError
from mapd_verl.loss import MapdLoss
from mapd_verl.nan_guard import NanGuard
from mapd_verl.objectives.base import AuxiliaryLoss
from mapd_verl.teachers.base import Teacher
from mapd_verl.teachers.live import Live
from mapd_verl.token_filter import TokenFilter
from mapd_verl.verl_seams import EngineRegistry, get_device_id, get_device_name, tensordict_utils

#: Batch fields that the trainer writes before the update.
TEACHER_PROMPTS, SOURCE = "teacher_prompt_ids", "privilege_source"

#: Output switches of verl that want the logits of every position.
_FULL_LOGITS_SWITCHES = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "use_fused_kernels")

if TYPE_CHECKING:

    class _Base:
        """The part of verl's FSDP engine that the mixin stands on."""

        module: Any
        use_ulysses_sp: bool
        mode: str | None

        def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]: ...
        def prepare_model_outputs(
            self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
        ) -> dict[str, torch.Tensor]: ...
        def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any: ...
        def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool) -> Any: ...
        def get_data_parallel_size(self) -> int: ...
        def optimizer_step(self) -> float: ...
        def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None: ...
        def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None: ...

else:
    _Base = object


@dataclass
class _Plan:
    """What one micro-batch's forwards do beyond verl's."""

    selection: views.TokenSelection
    #: Where the selected tokens are predicted in the student's output, its first two dimensions flattened.
    positions: torch.Tensor
    lean: bool
    loss: MapdLoss | None
    #: What the teacher made of the tokens that it judges (stock: their logits, ``[M, V]``), and which of the selected
    #: tokens those are, ``[N]`` bool; None when there are none.
    teacher: tuple[Any, torch.Tensor] | None = None
    task: head.HeadTask | None = None
    teacher_seconds: float = 0.0

    @property
    def objective(self) -> AuxiliaryLoss | None:
        """What compares both views in this forward."""
        objective = None if self.loss is None else self.loss.objective
        return objective if isinstance(objective, AuxiliaryLoss) else None


class TwoViewEngine(_Base):
    """Mixin before one of verl's FSDP language-model engines."""

    #: Whether forwards leave out what no loss reads (``mapd.forward``).
    lean: bool = False
    #: Tokens whose logits exist at once (``mapd.objective.chunk_tokens``).
    chunk_tokens: int = 256
    #: Whose weights read the privileged context, and which tokens they judge.
    teacher: Teacher = Live(TeacherConfig())
    token_filter: TokenFilter = TokenFilter(FilterConfig())
    _plan: _Plan | None = None
    _causal_only: bool = False

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        order = self._order_by_length(data)
        if order is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        output = super().forward_backward_batch(
            tensordict_utils.index_select_tensor_dict(data, order), loss_function, forward_only
        )
        back = torch.argsort(order).tolist()
        for key, value in output["model_output"].items():
            rows = value.unbind()
            output["model_output"][key] = views.ragged([rows[i] for i in back])
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._causal_only and inputs["attention_mask"] is not None:
            rows, width = inputs["input_ids"].shape
            positions = torch.arange(width, device=inputs["input_ids"].device).expand(rows, width)
            if bool(((inputs["position_ids"] == positions) | (inputs["attention_mask"] == 0)).all()):
                # Positions run on through the padding: a fall back to 0 would read as several packed rows.
                inputs |= {"attention_mask": None, "position_ids": positions}
        return inputs, output_args

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool) -> Any:
        micro_batch = micro_batch.to(get_device_id())
        self._plan = plan = self._make_plan(micro_batch, loss_function, forward_only)
        try:
            if plan is None or not plan.lean:
                return super().forward_step(micro_batch, loss_function, forward_only)
            plan.task = task = self._head_task(micro_batch, plan, loss_function)
            with (
                self._without_padding_mask(),
                head.exchanged_head(self.module, plan.positions[task.tokens.order], task.compute),
            ):
                return super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self._plan = None

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        plan = self._plan
        if plan is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if plan.task is not None:
            model_output = plan.task.model_output(output.logits.squeeze(0))
        else:
            model_output = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if plan.loss is not None:
            seconds = 0.0 if plan.task is None else plan.task.seconds
            if plan.task is None:
                start = time.perf_counter()
                model_output |= self._from_logits(output.logits, micro_batch, plan)
                seconds = time.perf_counter() - start
            plan.loss.teacher_seconds, plan.loss.divergence_seconds = plan.teacher_seconds, seconds
        return model_output

    def _head_task(self, micro_batch: TensorDict, plan: _Plan, loss_function: Any) -> head.HeadTask:
        teacher, mask = (None, None) if plan.teacher is None else plan.teacher
        objective = plan.objective
        return head.HeadTask(
            micro_batch,
            head.Tokens.of(micro_batch, plan.selection, mask),
            chunk_tokens=self.chunk_tokens,
            teacher=teacher,
            divergence=None if objective is None else objective.of_distributions(),
            loss_function=loss_function,
            with_signals=objective is not None,
        )

    def _from_logits(self, logits: torch.Tensor, micro_batch: TensorDict, plan: _Plan) -> dict[str, torch.Tensor]:
        """``mapd.forward: stock``: verl has made the logits of all positions."""
        logits = head.full(logits)
        logits = head.scaled(
            logits.reshape(-1, logits.shape[-1])[plan.positions],
            head.temperature_of(micro_batch, plan.selection.rows),
        )
        return head.outputs_from_logits(
            logits,
            plan.teacher,
            micro_batch,
            plan.selection,
            None if plan.objective is None else plan.objective.of_distributions(),
            self.chunk_tokens,
        )

    # ---------------------------------------------------------------- the plan

    def _make_plan(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> _Plan | None:
        loss = loss_function if isinstance(loss_function, MapdLoss) and not forward_only else None
        if loss is not None and not loss.objective.in_update:
            loss = None  # the teacher has spoken before the update
        blocked = self._why_full_logits(micro_batch)
        if loss is not None and blocked:
            raise UserError(f"mapd.objective: a teacher branch does not work with {blocked}")
        if loss is None and (blocked or not self.lean):
            return None
        selection = views.select_tokens(micro_batch["response_mask"])
        plan = _Plan(
            selection=selection,
            positions=self._positions(micro_batch, micro_batch["prompts"], micro_batch["input_ids"], selection),
            lean=self.lean and not blocked,
            loss=loss,
        )
        if loss is not None:
            start = time.perf_counter()
            plan.teacher = self._teacher(micro_batch, selection)
            plan.teacher_seconds = time.perf_counter() - start
        return plan

    def _why_full_logits(self, micro_batch: TensorDict) -> str:
        """What stands against projecting selected tokens only; empty if nothing does."""
        for switch in _FULL_LOGITS_SWITCHES:
            if tensordict_utils.get_non_tensor_data(data=micro_batch, key=switch, default=False):
                return switch
        if getattr(self, "use_ulysses_sp", False):
            return "ulysses_sequence_parallel_size > 1"
        for name in ("response_mask", "prompts", "responses"):
            if name not in micro_batch or not micro_batch[name].is_nested:
                return f"a batch without nested {name}"
        if micro_batch["position_ids"].dim() == 3:
            return "multimodal position ids"
        return ""

    @staticmethod
    def _positions(
        micro_batch: TensorDict, prompts: torch.Tensor, input_ids: torch.Tensor, selection: views.TokenSelection
    ) -> torch.Tensor:
        packed = tensordict_utils.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        return (views.packed_positions if packed else views.padded_positions)(prompts, input_ids, selection)

    # -------------------------------------------------------------- the teacher

    def optimizer_step(self) -> float:
        grad_norm = super().optimizer_step()
        self.teacher.after_step(self)
        return grad_norm

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        state = self.teacher.state_dict()
        if state is not None and local_path is not None:
            torch.save(state, self._teacher_file(local_path))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Raises ``UserError`` where the teacher needs a state that the checkpoint lacks."""
        if self.teacher.state_dict() is not None and local_path is not None:
            file = self._teacher_file(local_path)
            if not file.is_file():
                raise UserError(f"mapd.teacher.kind={self.teacher.name}: no {file.name} in the checkpoint {local_path}")
            self.teacher.load_state_dict(torch.load(file, weights_only=True))
        super().load_checkpoint(local_path, *args, **kwargs)

    @staticmethod
    def _teacher_file(folder: str) -> Path:
        ranks = torch.distributed
        return Path(folder) / f"teacher_rank_{ranks.get_rank()}_of_{ranks.get_world_size()}.pt"

    def teacher_log_probs(self, data: TensorDict, rows_at_once: int) -> torch.Tensor:
        """The teacher's log-probabilities of the sampled tokens it judges, nested like ``responses``; 0 elsewhere.

        Call inside ``eval_mode``. Every rank must have as many rows.

        Raises:
            UserError: as in the update.
        """
        data = data.to(get_device_id())
        blocked = self._why_full_logits(data)
        if blocked:
            raise UserError(f"mapd.objective: a teacher does not work with {blocked}")
        scored: list[torch.Tensor] = []
        for start in range(0, len(data), rows_at_once):
            rows = torch.arange(start, min(start + rows_at_once, len(data)))
            micro_batch = tensordict_utils.index_select_tensor_dict(data, rows)
            responses, selection = micro_batch["responses"], views.select_tokens(micro_batch["response_mask"])
            made = self._teacher(micro_batch, selection, scores=True)
            values = torch.zeros(responses.values().shape[0], device=responses.device)
            if made is not None:
                judged = selection.keep(made[1])
                values[responses.offsets()[:-1][judged.rows] + judged.steps] = made[0].float().squeeze(-1)
            scored += torch.nested.nested_tensor_from_jagged(values, responses.offsets()).unbind()
        return views.ragged(scored)

    def _teacher(
        self, micro_batch: TensorDict, selection: views.TokenSelection, scores: bool = False
    ) -> tuple[Any, torch.Tensor] | None:
        """What the teacher makes of the selected tokens that it judges, and which those are; None if it judges none.

        That is :class:`TeacherStates`, or logits ``[M, V]`` with the temperature applied (``forward: stock``), or with
        ``scores`` the log-probabilities of the sampled tokens, ``[M, 1]``.
        """
        for name in (TEACHER_PROMPTS, SOURCE):
            if name not in micro_batch:
                raise UserError(f"the batch lacks '{name}': train with trainer.v1.trainer_mode=mapd_sync")
        view = views.teacher_view(
            micro_batch[TEACHER_PROMPTS],
            micro_batch["responses"],
            micro_batch[SOURCE].reshape(-1) > 0,
            selection,
            self.token_filter.selected(micro_batch, selection) if self.token_filter else None,
        )
        if view is None:
            if self.get_data_parallel_size() > 1:
                # Other ranks may have rows: FSDP's all-gathers must meet on every rank.
                first = views.ragged([micro_batch["prompts"].unbind()[0][:1]])
                nothing = views.TokenSelection(selection.rows[:0], selection.steps[:0])
                self._teacher_forward(micro_batch, first, first, torch.zeros_like(first), nothing)
            return None
        temperature = head.temperature_of(micro_batch, view.rows[view.selection.rows])
        labels = views.take(micro_batch["responses"], selection.keep(view.mask)) if scores else None
        made = self._teacher_forward(
            micro_batch,
            view.prompts,
            view.input_ids,
            view.position_ids,
            view.selection,
            None if labels is None else partial(head.label_scores, labels, temperature, self.chunk_tokens),
        )
        if isinstance(made, torch.Tensor) and not self.lean:
            made = head.scaled(made, temperature)
            if labels is not None:
                made = torch.log_softmax(made.float(), -1).gather(-1, labels.unsqueeze(-1))
        return made, view.mask

    def _teacher_forward(
        self,
        micro_batch: TensorDict,
        prompts: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        selection: views.TokenSelection,
        compute: Callable[[torch.Tensor, Head], torch.Tensor] | None = None,
    ) -> Any:
        """The teacher's view of ``selection``: its states (stock: logits ``[M, V]``), or what ``compute`` makes of its
        hidden states. No gradient, no dropout."""
        batch = TensorDict({"input_ids": input_ids, "position_ids": position_ids}, batch_size=[input_ids.shape[0]])
        switches = {
            key: tensordict_utils.get_non_tensor_data(data=micro_batch, key=key, default=default)
            for key, default in (("use_remove_padding", True), ("pad_token_id", 0))
        }
        # The temperature is applied afterwards.
        tensordict_utils.assign_non_tensor(batch, temperature=1.0, **switches)
        positions = self._positions(micro_batch, prompts, input_ids, selection)
        kept: list[Head] = []

        def states(hidden: torch.Tensor, of: Head) -> torch.Tensor:
            if self.teacher.head != "student":
                kept.append(of if self.teacher.head == "own" else of.clone())
            return hidden

        with self.teacher.module(self) as module:
            training = module.training
            module.eval()
            try:
                with torch.no_grad(), self._autocast(), self._teacher_head(module, positions, compute or states):
                    inputs, _ = self.prepare_model_inputs(batch)
                    made = head.full(module(**inputs, use_cache=False).logits).squeeze(0)
            finally:
                module.train(training)
        return TeacherStates(made, kept[0] if kept else None) if self.lean and compute is None else made

    def _autocast(self) -> AbstractContextManager:
        """As in verl's ``forward_step``: none for float32."""
        dtype = getattr(self, "_autocast_dtype", torch.bfloat16)
        return nullcontext() if dtype == torch.float32 else torch.autocast(device_type=get_device_name(), dtype=dtype)

    @contextmanager
    def _teacher_head(
        self,
        module: torch.nn.Module,
        positions: torch.Tensor,
        compute: Callable[[torch.Tensor, Head], torch.Tensor],
    ) -> Iterator[None]:
        if not self.lean:
            with head.selected_positions(module, positions):
                yield
            return
        with self._without_padding_mask(), head.exchanged_head(module, positions, compute):
            yield

    @contextmanager
    def _without_padding_mask(self) -> Iterator[None]:
        self._causal_only = True
        try:
            yield
        finally:
            self._causal_only = False

    def _order_by_length(self, data: TensorDict) -> torch.Tensor | None:
        """Row order for micro-batches of like length; None where verl's own order or balancing is to stay."""

        def switch(key: str, default: Any) -> Any:
            return tensordict_utils.get_non_tensor_data(data=data, key=key, default=default)

        if not self.lean or switch("use_dynamic_bsz", True) or switch("use_remove_padding", True):
            return None
        if switch("force_group_size", 1) != 1:
            return None
        return torch.argsort(views.lengths_of(data["input_ids"], "input_ids"), stable=True)


@lru_cache(maxsize=8)
def register_two_view_engine(model_type: str, backend: str) -> str:
    """Register the two-view version of the engine that verl would choose here; return its model type.

    Works for whatever engine the platform registered (cuda, npu, our cpu one), as it subclasses that.

    Raises:
        UserError: the backend's engine isn't an FSDP one.
    """
    base = EngineRegistry.get_engine_cls(model_type, backend)
    if not hasattr(base, "prepare_model_outputs"):
        raise UserError(f"actor.strategy={backend}: MAPD needs an FSDP engine (fsdp or fsdp2)")
    name = f"mapd_{model_type}"
    engine = type(f"TwoView{base.__name__}", (NanGuard, TwoViewEngine, base), {})
    EngineRegistry.register(model_type=name, backend=backend, device=get_device_name())(engine)
    return name
