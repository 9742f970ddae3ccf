"""The one place where a teacher model is called: LiteLLM, our timeout, our retries, our accounts."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mapd_verl.errors import UserError
from protocol_cache.calls import Bound, BudgetReached, CallLog, Reply, call_key
from protocol_cache.prompts import Prompts, user_message
from protocol_cache.synthesis.rate import RateLimit
from protocol_cache.synthesis.reply import parse_reply, reply_problem
from protocol_cache.synthesis.state import SynthesisError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


#: Seconds between two looks at a budget that calls under way hold.
_LOOK_AGAIN = 0.05


class TeacherError(SynthesisError):
    """The teacher did not give a usable reply for this question."""


class TeacherUnreachable(TeacherError):
    """The request failed after all retries: nothing is known about the question, a later run may succeed."""


class TeacherUnusable(UserError):
    """The teacher cannot be used at all (wrong key, no such model): the run stops."""


@dataclass
class Account:
    """What one question has used so far. ``cost_usd`` stays None while no call had a known price."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    def add(self, prompt_tokens: int, completion_tokens: int, cost_usd: float | None) -> None:
        """One more call that came back."""
        self.calls += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + cost_usd


@dataclass(frozen=True)
class TeacherConfig:
    """How to reach the teacher."""

    model: str
    """LiteLLM's name, provider first: ``openai/gpt-...``, ``anthropic/claude-...``."""
    api_base: str | None = None
    """URL of an OpenAI-compatible server; None means the provider's own."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None means the one that LiteLLM reads for the provider."""
    timeout: float = 120.0
    """Seconds for one request."""
    retries: int = 4
    """Further tries after a timeout, a refused connection, a 429 or a 5xx."""
    backoff: float = 0.5
    """Seconds before the first further try; doubled each time, up to 30, with jitter."""
    concurrency: int = 16
    """Requests in flight at once."""
    reasks: int = 2
    """Further asks after a reply that cannot be used, each with the reason."""
    temperature: float = 0.0
    max_tokens: int = 2048
    """Tokens of one reply."""
    schema_mode: bool | None = None
    """Ask for the reply's JSON schema: None where LiteLLM says that the provider's model takes one."""
    rpm: float | None = None
    """Requests a minute that the provider allows; kept to ahead of time."""
    tpm: float | None = None
    """Tokens a minute, likewise."""
    prices: tuple[float, float] | None = None
    """US dollars for a million prompt and completion tokens, for models that LiteLLM has no price for."""


class Teacher:
    """Asks a model in a role and returns a checked JSON object.

    Raises:
        TeacherUnusable: the key's variable is not set, LiteLLM is not installed, or a budget in dollars meets a model
            without a known price.

    Args:
        calls: where finished calls are kept and looked up, and money is accounted for; None keeps nothing.
    """

    def __init__(self, config: TeacherConfig, prompts: Prompts, calls: CallLog | None = None) -> None:
        self.config = config
        self.prompts = prompts
        self._calls = calls
        self._rate = RateLimit(config.rpm, config.tpm)
        #: Equal calls at the same time are one call.
        self._flying: dict[str, asyncio.Task[Reply]] = {}
        self._litellm = _import_litellm()
        # The root of all of LiteLLM's exceptions, whatever the provider, is in the client that it builds on.
        self._any_api_error: type[Exception] = importlib.import_module("openai").OpenAIError
        self._options: dict[str, Any] = {
            "model": config.model,
            "timeout": config.timeout,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            # Retries are ours: LiteLLM and the client beneath it would each multiply them.
            "num_retries": 0,
            "max_retries": 0,
        }
        if config.api_base:
            self._options["api_base"] = config.api_base
        if key := _api_key(config):
            self._options["api_key"] = key
        self._slots = asyncio.Semaphore(config.concurrency)
        self._priced = config.prices is None and self._has_price()
        if not self._priced:
            self._list_model()
        # A server of one's own says nothing of what it can do: its replies are mended and checked.
        self._schema_mode = config.schema_mode
        if self._schema_mode is None:
            self._schema_mode = not config.api_base and self._litellm.supports_response_schema(config.model)
        if calls is not None and calls.budget.usd is not None and not (self._priced or config.prices):
            raise TeacherUnusable(f"--budget-usd: the price of {config.model} is not known; give --price")

    async def ask(
        self,
        role: str,
        inputs: dict[str, Any],
        validator: Validator,
        account: Account,
        check: Callable[[dict[str, Any]], str | None] = lambda reply: None,
        **values: Any,
    ) -> dict[str, Any]:
        """One reply of ``role`` to ``inputs`` that fits the schema and passes ``check``.

        Args:
            values: what the role's prompt file is filled with.
            check: what a schema cannot say; returns the problem in one line, or None.

        Raises:
            TeacherError: no usable reply after the retries and re-asks; the message names the role.
            TeacherUnusable: the provider refuses the key or does not know the model.
        """
        messages = [
            {"role": "system", "content": self.prompts.system(role, **values)},
            {"role": "user", "content": user_message(inputs)},
        ]
        problem: str | None = None
        for _ in range(self.config.reasks + 1):
            content, finish_reason = await self._complete(role, messages, account, self._format(role, validator))
            reply, problem = parse_reply(content, finish_reason)
            if reply is not None:
                problem = reply_problem(reply, validator) or check(reply)
                if problem is None:
                    return reply
            messages = [
                *messages[:2],  # only the last failure is shown: the prompt stays small
                {"role": "assistant", "content": content or "(empty)"},
                {"role": "user", "content": self.prompts.system("reask", problem=problem)},
            ]
        raise TeacherError(f"teacher as {role}: {problem} ({self.config.reasks + 1} replies)")

    async def close(self) -> None:
        """Let requests under way end, so that what was paid for is kept; close LiteLLM's client sessions."""
        await asyncio.gather(*self._flying.values(), return_exceptions=True)
        await self._litellm.close_litellm_async_clients()

    def _format(self, role: str, validator: Validator) -> dict[str, Any] | None:
        """The provider's schema mode, where LiteLLM knows that it has one; the reply is checked all the same."""
        if not self._schema_mode:
            return None
        # Not strict: our schemas say things (lengths, either-or) that providers' strict modes refuse.
        return {"type": "json_schema", "json_schema": {"name": role, "schema": validator.schema, "strict": False}}

    async def _complete(
        self, role: str, messages: list[dict[str, str]], account: Account, response_format: dict[str, Any] | None
    ) -> tuple[str | None, str | None]:
        reply = await self._once(role, messages, response_format)
        account.add(reply.prompt_tokens, reply.completion_tokens, reply.cost_usd)
        return reply.content, reply.finish_reason

    async def _once(self, role: str, messages: list[dict[str, str]], response_format: dict[str, Any] | None) -> Reply:
        """The reply to a call: one that was made before, one that is being made, or a new one."""
        if self._calls is None:
            return await self._request(role, messages, "", response_format)
        parameters: dict[str, Any] = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        if response_format is not None:
            parameters["response_format"] = response_format
        key = call_key(role, self.prompts.version, self.config.model, parameters, messages)
        found = self._calls.find(key)
        if found is not None:
            return found
        task = self._flying.get(key)
        if task is None:
            task = self._flying[key] = asyncio.ensure_future(self._request(role, messages, key, response_format))
            task.add_done_callback(lambda _: self._flying.pop(key))
        # Shielded: who waits may be cancelled (its sibling failed), but a request that was sent is paid for and kept.
        return await asyncio.shield(task)

    async def _request(
        self, role: str, messages: list[dict[str, str]], key: str, response_format: dict[str, Any] | None
    ) -> Reply:
        delay = self.config.backoff
        bound = self._bound(messages)
        for left in range(self.config.retries, -1, -1):
            async with self._slots:
                await self._rate.wait(bound.prompt_tokens + bound.completion_tokens)
                reservation = await self._reserve(role, bound)
                reply, error = await self._send(role, messages, reservation, response_format)
            if reply is not None:
                self._rate.correct(
                    bound.prompt_tokens + bound.completion_tokens, reply.prompt_tokens + reply.completion_tokens
                )
                if self._calls and reservation is not None:
                    self._calls.settle(reservation, key, role, self.config.model, reply)
                return reply
            assert error is not None
            if not left:
                tries = self.config.retries + 1
                raise TeacherUnreachable(f"teacher as {role}: {_brief(error)} ({tries} tries)") from error
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(30.0, 2 * delay)
        raise AssertionError("unreachable")

    async def _reserve(self, role: str, bound: Bound) -> int | None:
        """Once the budget has room; what is under way holds its bound, most of which comes back."""
        if self._calls is None:
            return None
        while True:
            try:
                return self._calls.reserve(role, self.config.model, bound)
            except BudgetReached as error:
                if not error.waiting:
                    raise
            await asyncio.sleep(_LOOK_AGAIN)

    async def _send(
        self,
        role: str,
        messages: list[dict[str, str]],
        reservation: int | None,
        response_format: dict[str, Any] | None,
    ) -> tuple[Reply | None, Exception | None]:
        """One try: a reply, or an error after which another try may help. The reservation is settled by the caller."""
        charged = True  # until the server has said no
        try:
            # LiteLLM's timeout covers each step of the connection, ours the whole request.
            async with asyncio.timeout(self.config.timeout + 5):
                extra = {} if response_format is None else {"response_format": response_format}
                response = await self._litellm.acompletion(messages=messages, **self._options, **extra)
            if response is None:  # LiteLLM's outcome of a 422 with drop_params
                charged = False
                raise TeacherError(f"teacher as {role}: the server refused the request as invalid (HTTP 422)")
            reply = self._read(response)
            charged = False
            return reply, None
        except UnicodeEncodeError as error:  # half a surrogate pair, from a question or a passage
            charged = False
            raise TeacherError(f"teacher as {role}: the request cannot be written as UTF-8: {error}") from error
        except (TimeoutError, self._any_api_error) as error:
            status = getattr(error, "status_code", None)
            # A timeout or a broken connection tells nothing; neither do LiteLLM's own 408 and 500 for those.
            charged = not isinstance(status, int) or status in (408, 500)
            if not charged and self._calls and reservation is not None:
                self._calls.release(reservation)
                reservation = None
            self._give_up(error, role)
            return None, error
        finally:
            if reservation is not None and self._calls and charged:
                self._calls.write_off(reservation)

    def _bound(self, messages: list[dict[str, str]]) -> Bound:
        """The most that a call can use: no tokenizer makes more than a token of two bytes of this kind of text."""
        prompt = sum(len(m["content"].encode("utf-8", "replace")) // 2 + 16 for m in messages)
        return Bound(prompt, self.config.max_tokens, self._cost(prompt, self.config.max_tokens) or 0.0)

    def _cost(self, prompt: int, completion: int) -> float | None:
        if self.config.prices:
            return (prompt * self.config.prices[0] + completion * self.config.prices[1]) / 1e6
        if not self._priced:
            return None
        return sum(
            self._litellm.cost_per_token(model=self.config.model, prompt_tokens=prompt, completion_tokens=completion)
        )

    def _give_up(self, error: Exception, role: str) -> None:
        """Raise where another try cannot help; HTTP statuses, since LiteLLM's classes don't tell all apart."""
        status = getattr(error, "status_code", None)
        text = str(error)
        if "LLM Provider NOT provided" in text:
            raise TeacherUnusable(
                f"teacher {self.config.model}: the model's name must start with its provider, as in openai/NAME"
            ) from error
        if status in (401, 402, 403, 404) or "insufficient_quota" in text:
            raise TeacherUnusable(f"teacher {self.config.model}: {_brief(error)}") from error
        if status in (400, 413, 422):
            raise TeacherError(f"teacher as {role}: request refused: {_brief(error)}") from error

    def _read(self, response: Any) -> Reply:
        usage = getattr(response, "usage", None)
        prompt = getattr(usage, "prompt_tokens", 0) or 0
        completion = getattr(usage, "completion_tokens", 0) or 0
        cost = self._cost(prompt, completion) if self.config.prices else None
        if self._priced and usage is not None:
            # By the name that was asked for: the one in the response is the server's own affair.
            cost = sum(self._litellm.cost_per_token(model=self.config.model, usage_object=usage))
        choices = getattr(response, "choices", None) or []
        content = choices[0].message.content if choices else None
        finish_reason = choices[0].finish_reason if choices else None
        return Reply(content if isinstance(content, str) else None, finish_reason, prompt, completion, cost)

    def _list_model(self) -> None:
        """Enter the model in LiteLLM's list: for one that is not there it searches by patterns in every call.

        The zero price serves LiteLLM's own bookkeeping only; ours says that the price is not known.
        """
        entry: dict[str, Any] = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0, "mode": "chat"}
        entry |= {"cache_creation_input_token_cost": 0.0, "cache_read_input_token_cost": 0.0}
        provider, _, name = self.config.model.rpartition("/")
        if provider:
            entry |= {"litellm_provider": provider.split("/")[0]}
        self._litellm.register_model({self.config.model: entry, name: entry})

    def _has_price(self) -> bool:
        try:
            info = self._litellm.get_model_info(self.config.model)
        except Exception as error:  # LiteLLM raises a bare Exception for a model that it does not know
            if "isn't mapped" in str(error) or "not mapped" in str(error):
                return False
            raise
        return bool(info.get("input_cost_per_token") or info.get("output_cost_per_token"))


def _quiet_known_warning() -> None:
    # When a request is cancelled (its sibling failed, Ctrl-C) LiteLLM drops a coroutine that it had made ahead.
    warnings.filterwarnings("ignore", message=r"coroutine '\w+\.acompletion' was never awaited")


def _import_litellm() -> Any:
    # The price list is LiteLLM's own copy: nothing is fetched at import.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    try:
        import litellm
    except ImportError as error:
        raise TeacherUnusable(f"synthesis needs litellm: pip install 'mapd-verl[synthesis]' ({error})") from error
    _quiet_known_warning()
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    litellm.drop_params = True  # a reasoning model that knows no temperature is still usable
    return litellm


def _api_key(config: TeacherConfig) -> str | None:
    if config.api_key_env:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise TeacherUnusable(f"teacher {config.model}: environment variable {config.api_key_env} is not set")
        return key
    # A server on this machine gets no real key unless it was named; the client insists on some text.
    return "unused" if config.api_base and _is_loopback(config.api_base) else None


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
