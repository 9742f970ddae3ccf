"""One episode: the policy thinks, searches, reads and answers, as token ids from end to end.

Needs no verl: the trainer's agent loop and the offline evaluation run the same function. Ids that the
policy sampled are kept as sampled; observations are encoded once, when they are written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mapd_verl.agent.config import AgentConfig
from mapd_verl.agent.observation import Observation, ObservationWriter, PassageLike
from mapd_verl.agent.parser import Action, TurnReader, is_closed, parse
from mapd_verl.errors import UserError

OBSERVATION = -1
ACTION_IDS = {"none": 0, "search": 1, "answer": 2}

#: How an episode can end. An excluded episode has no score and must enter no loss.
STATUSES = ("answered", "no_answer", "truncated", "retrieval_failed", "aborted")
EXCLUDED = ("retrieval_failed", "aborted")


class GeneratedLike(Protocol):
    """What a generator returns: sampled ids, their log-probabilities, and why it stopped."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float] | None: ...
    @property
    def stop_reason(self) -> str | None: ...


class SearchResultLike(Protocol):
    """What a search returns; see ``retrieval_server.client.SearchResult``."""

    @property
    def ok(self) -> bool: ...
    @property
    def passages(self) -> Sequence[PassageLike]: ...
    @property
    def error(self) -> str | None: ...
    @property
    def detail(self) -> str: ...


Generate = Callable[..., Awaitable[GeneratedLike]]
Search = Callable[[str], Awaitable[SearchResultLike]]


@dataclass(frozen=True)
class Failure:
    """Something that went wrong in one turn; ``kind`` is from a fixed vocabulary, ``detail`` is for people."""

    turn: int
    kind: str
    detail: str = ""


@dataclass
class Turn:
    """One turn as text, for people and reports; training reads only the ids."""

    text: str
    action: str
    content: str
    malformed: tuple[str, ...]
    observation: str = ""
    observation_kind: str = ""
    shortened_passages: int = 0


@dataclass
class Episode:
    """One trajectory. The per-token lists all have the response's length T.

    ``response_mask`` is 1 on policy tokens; ``log_probs`` are those of the sampling distribution, 0.0 on
    observations; ``turn_ids`` count turns from 0, -1 on observations; ``action_ids`` are 1 (search) or 2
    (answer) on the content of a complete action, tags excluded, 0 on other policy tokens, -1 on observations.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    action_ids: list[int] = field(default_factory=list)
    searches: int = 0
    """Queries that reached the retrieval service and came back."""
    answer: str | None = None
    status: str = "no_answer"
    failures: list[Failure] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def excluded(self) -> bool:
        """Whether the episode says nothing about the policy, so that it must enter no loss and no mean."""
        return self.status in EXCLUDED

    @property
    def policy_text(self) -> str:
        """All that the policy wrote, without prompt and observations."""
        return "".join(turn.text for turn in self.turns)

    @property
    def queries(self) -> list[str]:
        """The queries of all search actions, also of those that were not sent."""
        return [turn.content for turn in self.turns if turn.action == "search"]

    @property
    def valid_turns(self) -> int:
        """Turns with a complete action and nothing malformed about them."""
        return sum(turn.action != "none" and not turn.malformed for turn in self.turns)

    def _add_policy(
        self, ids: Sequence[int], log_probs: Sequence[float], turn: int, content: tuple[int, int], kind: str
    ) -> None:
        self.response_ids += [int(i) for i in ids]
        self.response_mask += [1] * len(ids)
        self.log_probs += [float(p) for p in log_probs]
        self.turn_ids += [turn] * len(ids)
        self.action_ids += [ACTION_IDS[kind] if content[0] <= i < content[1] else 0 for i in range(len(ids))]

    def _add_observation(self, observation: Observation) -> None:
        length = len(observation.ids)
        self.response_ids += observation.ids
        self.response_mask += [0] * length
        self.log_probs += [0.0] * length
        self.turn_ids += [OBSERVATION] * length
        self.action_ids += [OBSERVATION] * length
        self.turns[-1].observation = observation.text
        self.turns[-1].observation_kind = observation.kind
        self.turns[-1].shortened_passages = observation.shortened


class Tools:
    """What of an episode depends on the tokenizer only; make it once and share it between episodes."""

    def __init__(self, tokenizer: Any, config: AgentConfig) -> None:
        self.reader = TurnReader(tokenizer)
        self.writer = ObservationWriter(tokenizer, config.max_observation_tokens, config.max_passage_tokens)


async def run_episode(
    generate: Generate,
    search: Search,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    config: AgentConfig,
    sampling: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
) -> Episode:
    """Run one episode to its end.

    Args:
        generate: ``await generate(prompt_ids=, max_tokens=, stop_token_ids=, **sampling)``; the stop token is
            part of the returned ids (``mapd_verl/cpu/generation.py``).
        search: ``await search(query)``, which retries within bounds and reports failure instead of raising.
        tokenizer: a transformers tokenizer.
        prompt_ids: the whole prompt, [P].
        config: budgets.
        sampling: temperature, top_p, top_k, seed. With a seed, each call of ``generate`` gets its own.
        tools: a shared :class:`Tools` of the same tokenizer and config.

    Raises:
        UserError: if the prompt is empty or longer than ``config.max_prompt_tokens``.
        ValueError: if ``generate`` breaks its contract (ids and log-probabilities of different lengths, or more
            tokens than asked for).
    """
    if not prompt_ids:
        raise UserError("prompt: no tokens")
    if config.max_prompt_tokens is not None and len(prompt_ids) > config.max_prompt_tokens:
        raise UserError(
            f"prompt: {len(prompt_ids)} tokens, above agent.max_prompt_tokens={config.max_prompt_tokens}; "
            "raise the limit or drop the question (a prompt is never cut)"
        )
    runner = _Runner(generate, search, tools or Tools(tokenizer, config), config, dict(sampling or {}))
    return await runner.run(Episode(prompt_ids=[int(i) for i in prompt_ids]))


class _Runner:
    def __init__(
        self, generate: Generate, search: Search, tools: Tools, config: AgentConfig, sampling: dict[str, Any]
    ) -> None:
        self._generate, self._search, self._config, self._sampling = generate, search, config, sampling
        self._reader, self._writer = tools.reader, tools.writer
        self._calls = 0

    async def run(self, episode: Episode) -> Episode:
        for turn in range(self._config.max_searches + 1):
            action, stop_reason = await self._policy_turn(episode, turn)
            if stop_reason == "aborted":
                episode.status = "aborted"
                return episode
            if action.kind == "answer":
                episode.answer, episode.status = action.text, "answered"
                return episode
            if turn == self._config.max_searches or self._left(episode) <= 0:
                return self._end_without_answer(episode, turn, action)
            observation = await self._observe(episode, turn, action)
            if observation is None:
                episode.failures.append(Failure(turn, "no_room", "the response budget cannot hold an observation"))
                episode.status = "truncated"
                return episode
            episode._add_observation(observation)
            if observation.kind == "retrieval_failed":
                episode.status = "retrieval_failed"
                return episode
        raise AssertionError("the last turn always returns")

    def _left(self, episode: Episode) -> int:
        return self._config.max_response_tokens - len(episode.response_ids)

    async def _policy_turn(self, episode: Episode, turn: int) -> tuple[Action, str | None]:
        """Sample one turn, cut it at its action, and add it to the episode."""
        context = episode.prompt_ids + episode.response_ids
        budget = min(self._config.max_turn_tokens, self._left(episode))
        ids: list[int] = []
        log_probs: list[float] = []
        stop_reason: str | None = None
        while len(ids) < budget:
            out = await self._call(context + ids, budget - len(ids))
            new_ids = [int(i) for i in out.token_ids]
            new_log_probs = list(out.log_probs) if out.log_probs is not None else [0.0] * len(new_ids)
            if len(new_ids) != len(new_log_probs) or len(new_ids) > budget - len(ids):
                raise ValueError(
                    f"the generator returned {len(new_ids)} ids and {len(new_log_probs)} log-probabilities "
                    f"for at most {budget - len(ids)} tokens"
                )
            ids += new_ids
            log_probs += new_log_probs
            stop_reason = out.stop_reason
            # Paused at a closing tag that does not settle the action: sample on.
            paused = bool(new_ids) and new_ids[-1] in self._reader.stop_token_ids
            if not paused or is_closed(self._reader.decode(ids), self._config.action_mode):
                break
        text = self._reader.decode(ids)
        action = parse(text, self._config.action_mode)
        if action.cut < len(text):
            keep = self._reader.prefix_length(ids, text, action.cut)
            ids, log_probs, text = ids[:keep], log_probs[:keep], self._reader.decode(ids[:keep])
        episode._add_policy(ids, log_probs, turn, self._reader.content_span(ids, text, action), action.kind)
        episode.turns.append(Turn(text, action.kind, action.text, action.malformed))
        episode.failures += [Failure(turn, kind) for kind in action.malformed]
        return action, stop_reason

    async def _call(self, context: list[int], max_tokens: int) -> GeneratedLike:
        sampling = dict(self._sampling)
        if sampling.get("seed") is not None:
            sampling["seed"] += self._calls
        self._calls += 1
        return await self._generate(
            prompt_ids=context, max_tokens=max_tokens, stop_token_ids=self._reader.stop_token_ids, **sampling
        )

    async def _observe(self, episode: Episode, turn: int, action: Action) -> Observation | None:
        budget = min(self._left(episode) - self._config.answer_reserve_tokens, self._config.max_observation_tokens)
        if action.kind == "none":
            episode.failures.append(Failure(turn, "invalid_action"))
            return self._writer.notice("invalid_action", budget)
        if not action.text:
            return self._writer.notice("empty_query", budget)
        result = await self._search(action.text)
        if not result.ok:
            episode.failures.append(Failure(turn, "retrieval_failed", f"{result.error}: {result.detail}"))
            # The notice fits any sane budget; the failure must not be lost where it does not.
            return self._writer.notice("retrieval_failed", budget) or Observation("retrieval_failed", "", ())
        episode.searches += 1
        return self._writer.passages(result.passages, budget)

    def _end_without_answer(self, episode: Episode, turn: int, action: Action) -> Episode:
        out_of_tokens = self._left(episode) <= 0
        episode.status = "truncated" if out_of_tokens or "unclosed_answer" in action.malformed else "no_answer"
        detail = "the response budget is used up" if out_of_tokens else f"the last turn asked for {action.kind!r}"
        episode.failures.append(Failure(turn, episode.status, detail))
        return episode
