"""Continuous batching for small models on a CPU: requests join at any step and leave when they are done.

One background thread owns the model and the cache; ``generate`` may be awaited from any event loop.
There is no time window: whatever waits when a step begins joins it. See ``decoder.py`` for the
arithmetic, ``slots.py`` for reuse of shared prefixes, ``sampling.py`` for the draws.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from mapd_verl.cpu.decoder import Chunk, Decoder, Weights
from mapd_verl.cpu.sampling import BatchSampling, SamplingParams
from mapd_verl.cpu.slots import SlotTable

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

#: Tokens of one packed prefill. From about two thousand on, the activations leave the core's cache and each
#: token gets a quarter dearer.
MAX_PREFILL_TOKENS = 1024

StopReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Generated:
    """What one request sampled.

    ``token_ids`` includes the stop token if one was sampled; ``log_probs`` has one value a token, natural
    log, under the whole distribution at the request's temperature. ``stop_reason`` is "stop" (end or stop
    token), "length" (``max_tokens`` or the model's length), or "aborted" (``abort_all``; what was sampled
    so far).
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason


@dataclass
class Stats:
    """Counts and seconds since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    weight_updates: int = 0


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    budget: int
    params: SamplingParams
    stop_ids: frozenset[int]
    uniforms: np.ndarray  # [budget]
    future: Future[Generated]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def result(self, reason: StopReason) -> Generated:
        return Generated(self.token_ids, self.log_probs, reason)


class BatchedGenerator:
    """Generates for many callers at once from one Qwen3 model in fp32.

    Args:
        model: a ``Qwen3ForCausalLM``; its weights are copied, so the module itself is not kept.
        eos_token_id: the id, or ids, that end every request.
        pad_token_id: checked against the vocabulary only; nothing is padded.
        max_batch: most requests decoded together; further ones wait.
        max_length: most tokens of prompt and output together; the model's ``max_position_embeddings`` if less.
        cache_slots: cache slots, at least ``max_batch``; those beyond the active ones keep finished requests
            for prefix reuse. Default ``2 * max_batch``. A used slot costs
            ``8 * layers * kv_heads * head_dim`` bytes a token.
        seed: seeds the requests that have no seed of their own; None takes fresh entropy.
        num_threads: torch threads of the compute thread; None leaves torch's setting.

    Raises ``ValueError`` for a model this forward does not compute, or an argument out of range.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        eos_token_id: int | Iterable[int],
        pad_token_id: int | None,
        max_batch: int = 64,
        *,
        max_length: int = 2048,
        cache_slots: int | None = None,
        seed: int | None = None,
        num_threads: int | None = None,
    ):
        config = model.config
        self.vocab_size = config.vocab_size
        self.eos_token_ids = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
        self._check_ids([*self.eos_token_ids, *([] if pad_token_id is None else [pad_token_id])], "eos/pad token")
        if max_batch < 1:
            raise ValueError(f"max_batch must be positive, got {max_batch}")
        slots = 2 * max_batch if cache_slots is None else cache_slots
        if slots < max_batch:
            raise ValueError(f"cache_slots ({slots}) must be at least max_batch ({max_batch})")
        self.max_batch, self.max_length = max_batch, min(max_length, config.max_position_embeddings)
        self._config, self._num_threads = config, num_threads
        self._weights = Weights.fuse(model.state_dict(), config)
        self._decoder = Decoder(config, slots, self.max_length)
        self._slots = SlotTable(self._decoder.cache)
        self._running: list[_Request] = []  # index = slot
        self._batch_sampling: BatchSampling | None = None
        self._stats = Stats()
        self._rng = np.random.default_rng(seed)
        self._waiting: deque[_Request] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="batched-generator", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_token_ids: Iterable[int] = (),
        seed: int | None = None,
    ) -> Generated:
        """Sample up to ``max_tokens`` ids after ``prompt_ids``; ``temperature`` 0 is greedy.

        With a ``seed`` the draws depend on it alone, whatever else runs beside it (up to rounding of the
        logits, which vary by about 1e-6 with the batch). Cancelling the await drops the request.

        Raises ``ValueError`` for an empty or too long prompt, an id outside the vocabulary or a setting out of
        range, ``RuntimeError`` after ``close``, and whatever stopped the computation.
        """
        return await asyncio.wrap_future(
            self.submit(prompt_ids, max_tokens, temperature, top_p, top_k, stop_token_ids, seed)
        )

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_token_ids: Iterable[int] = (),
        seed: int | None = None,
    ) -> Future[Generated]:
        """``generate`` for callers without an event loop."""
        prompt = [int(token) for token in prompt_ids]
        stops = [int(token) for token in stop_token_ids]
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.max_length:
            raise ValueError(f"the prompt has {len(prompt)} tokens, the generator's max_length is {self.max_length}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        self._check_ids(prompt, "prompt token")
        self._check_ids(stops, "stop token")
        budget = min(max_tokens, self.max_length - len(prompt))
        params = SamplingParams(temperature, top_p, top_k)
        future: Future[Generated] = Future()
        with self._wake:
            rng = self._rng if seed is None else np.random.default_rng(seed)
            uniforms = rng.random(budget)
            self._check_open()
            self._waiting.append(_Request(prompt, budget, params, self.eos_token_ids.union(stops), uniforms, future))
            self._wake.notify()
        return future

    async def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight between two steps; ``weights`` holds transformers names, any float dtype.

        The cache of earlier weights is forgotten. Requests under way go on with the new weights over the keys
        and values they have, so an on-policy caller waits for its requests first.

        Raises ``ValueError`` naming a missing, unknown or misshapen tensor; the old weights then stay.
        """
        fused = await asyncio.to_thread(Weights.fuse, weights, self._config)

        def swap() -> None:
            self._weights = fused
            self._slots.invalidate()
            self._stats.weight_updates += 1

        await asyncio.wrap_future(self._between_steps(swap))

    async def clear_cache(self) -> None:
        """Forget what finished requests left in the cache."""
        await asyncio.wrap_future(self._between_steps(self._slots.invalidate))

    async def abort_all(self) -> int:
        """End every waiting and running request with ``stop_reason`` "aborted"; returns how many."""
        count = 0

        def abort() -> None:
            nonlocal count
            with self._wake:
                waiting = list(self._waiting)
                self._waiting.clear()
            count = len(waiting) + len(self._running)
            for request in waiting:
                _resolve(request.future, request.result("aborted"))
            while self._running:
                self._finish(len(self._running) - 1, "aborted")

        await asyncio.wrap_future(self._between_steps(abort))
        return count

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start (see ``Stats``)."""
        return asdict(self._stats)

    def close(self) -> None:
        """Stop the compute thread; requests under way fail with ``RuntimeError``. Safe to call twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> BatchedGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_ids(self, ids: Iterable[int], what: str) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{what} {token} is outside the model's vocabulary of {self.vocab_size}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the generator is closed")

    def _between_steps(self, action: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                _fail(done, error)
            else:
                _resolve(done, None)

        with self._wake:
            self._check_open()
            self._commands.append(run)
            self._wake.notify()
        return done

    # Everything below runs on the compute thread.

    def _loop(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._commands or self._waiting or self._running)
                    if self._closed:
                        break
                try:
                    self._step()
                except Exception as error:  # delivered to every caller; the thread lives on
                    self._fail_all(error)
        self._fail_all(RuntimeError("the generator was closed while the request was under way"))
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> None:
        while self._commands:
            self._commands.popleft()()
        for slot in reversed(range(len(self._running))):
            if self._running[slot].future.cancelled():
                self._leave(slot)
        while (chunks := self._admit()) is not None:
            self._prefill(chunks)
        if self._running:
            self._decode()

    def _admit(self) -> list[Chunk] | None:
        """Give waiting requests a slot, as many as fit one prefill; None if none can join now."""
        chunks: list[Chunk] = []
        postponed: list[_Request] = []
        tokens = 0
        while len(self._running) < self.max_batch and tokens < MAX_PREFILL_TOKENS:
            with self._wake:
                if not self._waiting:
                    break
                request = self._waiting.popleft()
            if request.future.cancelled():
                continue
            try:
                placed = self._slots.place(request.prompt)
            except Exception as error:
                _fail(request.future, error)  # in neither queue just now, so _fail_all would miss it
                raise
            if placed is None:
                postponed.append(request)
                continue
            self._running.append(request)
            new = request.prompt[placed.cached :]
            chunks.append(Chunk(placed.slot, placed.cached, new))
            tokens += len(new)
            self._stats.requests += 1
            self._stats.prompt_tokens += len(request.prompt)
            self._stats.reused_prompt_tokens += placed.cached
        with self._wake:
            self._waiting.extendleft(reversed(postponed))
        return chunks or None

    def _prefill(self, chunks: list[Chunk]) -> None:
        began = time.perf_counter()
        first = len(self._running) - len(chunks)
        logits = self._decoder.prefill(self._weights, chunks)
        self._slots.prefilled()
        joined = self._running[first:]
        self._accept(first, BatchSampling([r.params for r in joined]), logits)
        self._batch_sampling = None
        self._stats.prefill_seconds += time.perf_counter() - began

    def _decode(self) -> None:
        began = time.perf_counter()
        if self._batch_sampling is None:
            self._batch_sampling = BatchSampling([r.params for r in self._running])
        tokens = np.array([r.token_ids[-1] for r in self._running])
        lengths = torch.from_numpy(self._slots.length[: len(tokens)].copy())
        logits = self._decoder.decode(self._weights, torch.from_numpy(tokens), lengths)
        self._slots.append(tokens)
        self._stats.decode_steps += 1
        self._accept(0, self._batch_sampling, logits)
        self._stats.decode_seconds += time.perf_counter() - began

    def _accept(self, first: int, sampling: BatchSampling, logits: torch.Tensor) -> None:
        """Sample for slots ``first ..`` and let the requests that are done leave."""
        requests = self._running[first:]
        uniform = torch.tensor([r.uniforms[len(r.token_ids)] for r in requests], dtype=torch.float64)
        ids, log_probs = sampling(logits, uniform)
        done: list[tuple[int, StopReason]] = []
        for offset, (request, token, log_prob) in enumerate(
            zip(requests, ids.tolist(), log_probs.tolist(), strict=True)
        ):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            if token in request.stop_ids:
                done.append((first + offset, "stop"))
            elif len(request.token_ids) == request.budget:
                done.append((first + offset, "length"))
        self._stats.generated_tokens += len(requests)
        for slot, reason in reversed(done):  # from the back, so that a slot still to leave is never moved
            self._finish(slot, reason)

    def _finish(self, slot: int, reason: StopReason) -> None:
        request = self._leave(slot)
        _resolve(request.future, request.result(reason))

    def _leave(self, slot: int) -> _Request:
        request = self._running[slot]
        last = self._slots.finish(slot)
        self._running[slot] = self._running[last]
        self._running.pop()
        self._batch_sampling = None
        return request

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            requests = [*self._running, *self._waiting]
            self._waiting.clear()
        self._running.clear()
        self._batch_sampling = None
        self._slots.clear()
        for request in requests:
            _fail(request.future, error)


def _resolve(future: Future[Any], value: object) -> None:
    try:
        future.set_result(value)
    except InvalidStateError:  # cancelled meanwhile
        assert future.cancelled()


def _fail(future: Future[Any], error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        assert future.cancelled()
