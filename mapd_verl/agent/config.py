"""What an episode may spend and how its text is read: one validated dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mapd_verl.errors import UserError

MODES = ("compat", "strict")


@dataclass(frozen=True)
class AgentConfig:
    """Budgets of one episode, in tokens unless a name says otherwise.

    Raises:
        ValueError: naming the field, for a value out of range or a budget that leaves no room to answer.
    """

    max_searches: int = 3
    """Turns that may search (Search-R1's ``max_turns``). One more turn follows, which can only answer.
    A turn without a usable action is spent all the same."""

    max_turn_tokens: int = 512
    """Most tokens that the policy samples in one turn."""

    max_response_tokens: int = 4096
    """Most tokens after the prompt: policy and observations together (verl's ``data.max_response_length``)."""

    max_prompt_tokens: int | None = None
    """A longer prompt is refused, never cut: the question must not fall out. None: no limit."""

    max_observation_tokens: int = 500
    """Most tokens of one observation, its tags included."""

    max_passage_tokens: int = 200
    """Most tokens of one passage inside an observation, its title included."""

    answer_reserve_tokens: int = 32
    """Tokens that an observation leaves of the response budget, so that the policy can still act."""

    topk: int = 3
    """Passages per query."""

    retriever_urls: tuple[str, ...] = ()
    """Base URLs of the retrieval service; with several, a failing one is passed over."""

    retriever_timeout_s: float = 10.0
    """Seconds before one HTTP request counts as failed."""

    retriever_attempts: int = 3
    """HTTP requests for one query before its search counts as failed."""

    action_mode: str = "compat"
    """``compat``: a stray closing tag ends the turn, as in Search-R1. ``strict``: it is passed over."""

    reward_mode: str = "compat"
    """``compat``: Search-R1's answer normalisation. ``strict``: Unicode, signs, decimals and ``C++`` are kept apart."""

    def __post_init__(self) -> None:
        for name in (
            "max_turn_tokens",
            "max_response_tokens",
            "max_observation_tokens",
            "max_passage_tokens",
            "answer_reserve_tokens",
            "topk",
            "retriever_attempts",
        ):
            _require_int(name, getattr(self, name), 1)
        _require_int("max_searches", self.max_searches, 0)
        if self.max_prompt_tokens is not None:
            _require_int("max_prompt_tokens", self.max_prompt_tokens, 1)
        if not 0 < self.retriever_timeout_s < float("inf"):
            raise ValueError(f"retriever_timeout_s: want seconds above 0, got {self.retriever_timeout_s!r}")
        for name in ("action_mode", "reward_mode"):
            if getattr(self, name) not in MODES:
                raise ValueError(f"{name}: want one of {list(MODES)}, got {getattr(self, name)!r}")
        if isinstance(self.retriever_urls, str):
            object.__setattr__(self, "retriever_urls", (self.retriever_urls,))
        urls = tuple(str(url).rstrip("/") for url in self.retriever_urls)
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"retriever_urls: want http:// or https:// URLs, got {url!r}")
        object.__setattr__(self, "retriever_urls", urls)
        if self.answer_reserve_tokens >= self.max_response_tokens:
            raise ValueError(
                f"answer_reserve_tokens={self.answer_reserve_tokens} leaves nothing of "
                f"max_response_tokens={self.max_response_tokens}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None, **overrides: Any) -> AgentConfig:
        """The recipe's ``mapd.agent`` section; ``overrides`` (what verl already knows) win over it.

        Raises:
            UserError: naming the key, for anything unknown or out of range.
        """
        merged = {**(values or {}), **overrides}
        known = [field.name for field in fields(cls)]
        for key in merged:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise UserError(f"mapd.agent.{key}: unknown key, {hint}")
        if isinstance(merged.get("retriever_urls"), list):
            merged["retriever_urls"] = tuple(merged["retriever_urls"])
        try:
            return cls(**merged)
        except ValueError as error:
            raise UserError(f"mapd.agent.{error}") from error


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: want a whole number of at least {least}, got {value!r}")
