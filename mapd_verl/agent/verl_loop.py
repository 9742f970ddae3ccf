"""The search agent as verl's agent loop ``mapd_search``: one call, one trajectory, ids from end to end.

Beside verl's own fields each trajectory carries, as top-level int64 tensors that reach the loss:

- ``turn_ids``, ``action_ids`` [T]: see ``episode.py``;
- ``teacher_prompt_ids`` [P']: the prompt with the question's protocol, or the student's own where it has none;
- ``has_protocol`` [1]: 1 if it has one.

The reward is set here, from policy tokens, so that verl's reward loop (which decodes observations too) does
not run. An excluded trajectory (its retrieval failed after bounded retries) is left out of the batch: verl
takes an empty list for "this session gave nothing", and the group's baseline is that of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from uuid import uuid4

import torch

from mapd_verl.agent.config import AgentConfig
from mapd_verl.agent.episode import Episode, Tools, run_episode
from mapd_verl.agent.metrics import chat_turns, reward_extra_info
from mapd_verl.agent.search import make_client
from mapd_verl.config.schema import MapdConfig
from mapd_verl.data.rows import read_row
from mapd_verl.evaluation.records import Record
from mapd_verl.privilege import privileged_prompt_ids
from mapd_verl.verl_seams import AgentLoopBase, AgentLoopOutput, register_agent_loop

logger = logging.getLogger(__name__)

SPANS = ("turn_ids", "action_ids", "teacher_prompt_ids", "has_protocol")

# How an engine is asked to stop at a text, for tokenizers whose closing tags are several tokens.
_STOP_TEXTS = {
    "vllm": {"stop": ["</search>", "</answer>"], "include_stop_str_in_output": True},
    "sglang": {"stop": ["</search>", "</answer>"], "no_stop_trim": True},
}


class SearchLoopOutput(AgentLoopOutput):
    """verl's output with our per-token and per-trajectory tensors."""

    turn_ids: list[int]
    action_ids: list[int]
    teacher_prompt_ids: list[int]
    has_protocol: list[int]

    def as_dict(self) -> dict[str, Any]:
        """verl's fields, and ours as int64 tensors."""
        fields = super().as_dict()
        for name in SPANS:
            fields[name] = torch.tensor(fields.pop(name), dtype=torch.int64)
        return fields


@dataclass(frozen=True)
class _Sampled:
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None


# verl makes a loop object for every trajectory; what they share is kept per process.
@lru_cache(maxsize=4)
def _shared_client(config: AgentConfig):
    return make_client(config)


@lru_cache(maxsize=4)
def _shared_tools(tokenizer: Any, config: AgentConfig) -> Tools:
    return Tools(tokenizer, config)


@register_agent_loop("mapd_search")
class SearchAgentLoop(AgentLoopBase):
    """Think, search, read, answer. Configured by ``mapd.agent``; lengths are verl's ``rollout`` ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mapd, self._agent = _sections(self.config)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """One trajectory of the row in ``kwargs``; an empty list if it is excluded.

        Raises:
            UserError: for a bad row, or a prompt longer than ``rollout.prompt_length``.
        """
        where = f"question {kwargs.get('question_id') or kwargs.get('index')}"
        row = read_row(kwargs, where)
        prompt_ids = self._prompt(kwargs["raw_prompt"], None)
        protocol = kwargs.get("protocol") or ""
        teacher_prompt_ids = self._prompt(kwargs["raw_prompt"], protocol) if protocol else prompt_ids

        engine = _Engine(self.server_manager, self.rollout_config.name, sampling_params)
        client = _shared_client(self._agent)
        search_seconds = 0.0

        async def search(query: str):
            nonlocal search_seconds
            result = await client.search(query)
            search_seconds += result.seconds
            return result

        tools = _shared_tools(self.tokenizer, self._agent)
        episode = await run_episode(engine.generate, search, self.tokenizer, prompt_ids, self._agent, {}, tools)
        if episode.excluded or not episode.response_ids:
            reasons = "; ".join(f"{f.kind}: {f.detail}" for f in episode.failures if f.detail) or episode.status
            logger.error("%s: trajectory left out (%s)", where, reasons)
            return []
        return self._output(
            episode,
            Record.from_episode(row, episode, self._agent.reward_mode),
            engine,
            search_seconds,
            teacher_prompt_ids=teacher_prompt_ids,
            has_protocol=[int(bool(protocol))],
        )

    def _prompt(self, messages: Any, context: str | None) -> list[int]:
        # Student and teacher prompts come from one function, so that without a context they are equal.
        privilege = self._mapd.privilege
        return privileged_prompt_ids(
            self.tokenizer,
            list(messages),
            context,
            privilege.template,
            privilege.max_context_tokens,
            self.apply_chat_template_kwargs,
        )

    def _output(
        self, episode: Episode, record: Record, engine: _Engine, search_seconds: float, **privilege: list[int]
    ) -> SearchLoopOutput:
        return SearchLoopOutput(
            prompt_ids=episode.prompt_ids,
            response_ids=episode.response_ids,
            response_mask=episode.response_mask,
            response_logprobs=episode.log_probs if engine.has_log_probs else None,
            reward_score=record.em,
            num_turns=chat_turns(episode),
            metrics={
                "generate_sequences": engine.seconds,
                "tool_calls": search_seconds,
                "num_preempted": engine.preempted,
            },
            extra_fields={
                "min_global_steps": engine.min_global_steps,
                "max_global_steps": engine.max_global_steps,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": reward_extra_info(record),
            },
            turn_ids=episode.turn_ids,
            action_ids=episode.action_ids,
            **privilege,
        )


class _Engine:
    """verl's server manager behind ``run_episode``'s ``generate``, for one trajectory."""

    def __init__(self, server_manager: Any, name: str, sampling_params: Mapping[str, Any]) -> None:
        self._server_manager, self._name, self._params = server_manager, name, dict(sampling_params)
        self._request_id = uuid4().hex  # one id, so that all turns meet the same server and its prefix cache
        self.seconds, self.preempted, self.has_log_probs = 0.0, -1, True
        self.min_global_steps: int | None = None
        self.max_global_steps: int | None = None

    async def generate(self, prompt_ids: list[int], max_tokens: int, stop_token_ids: Sequence[int]) -> _Sampled:
        stops: Mapping[str, Any] = (
            {"stop_token_ids": list(stop_token_ids)} if stop_token_ids else _STOP_TEXTS.get(self._name, {})
        )
        started = time.monotonic()
        out = await self._server_manager.generate(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling_params={**self._params, **stops, "max_tokens": max_tokens},
        )
        self.seconds += time.monotonic() - started
        if out.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + out.num_preempted
        if self.min_global_steps is None:
            self.min_global_steps = out.extra_fields.get("min_global_steps")
        self.max_global_steps = out.extra_fields.get("max_global_steps")
        if out.token_ids and not out.log_probs:
            self.has_log_probs = False
        return _Sampled(out.token_ids, out.log_probs or None, out.stop_reason)


# By the identity of the config object, which the entry keeps alive: its hash would cost a walk of it all.
_SECTIONS: dict[int, tuple[Any, MapdConfig, AgentConfig]] = {}


def _sections(config: Any) -> tuple[MapdConfig, AgentConfig]:
    """Our sections of the trainer's config, read once per process."""
    from omegaconf import OmegaConf

    if id(config) not in _SECTIONS:
        mapd = MapdConfig.from_mapping(OmegaConf.select(config, "mapd"))
        rollout = config.actor_rollout_ref.rollout
        agent = AgentConfig.from_mapping(
            mapd.agent, max_response_tokens=rollout.response_length, max_prompt_tokens=rollout.prompt_length
        )
        _SECTIONS[id(config)] = (config, mapd, agent)
    return _SECTIONS[id(config)][1:]
