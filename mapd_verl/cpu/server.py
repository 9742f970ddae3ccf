"""The rollout server: a Ray actor around ``BatchedGenerator``.

It never imports verl, which would cost it ten seconds of start and a quarter of a gigabyte: what it
returns becomes verl's ``TokenOutput`` where it is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Sampling parameters that we apply, and the values of others that ask for nothing.
_APPLIED = frozenset({"temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "stop_token_ids", "seed"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_p": (0, None),
    "stop": (None, [], ()),
    "ignore_eos": (False, None),
    "prompt_logprobs": (None,),
    "n": (1, None),
}


@dataclass
class WireOutput:
    """Arrives as a ``verl`` ``TokenOutput``."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _token_output, (self.token_ids, self.log_probs, self.stop_reason, self.extra_fields)


def _token_output(token_ids: list[int], log_probs: list[float] | None, stop_reason: str, extra: dict) -> Any:
    from mapd_verl.verl_seams import TokenOutput

    return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields=extra)


@dataclass(frozen=True)
class ServerConfig:
    """What the server reads of verl's rollout config.

    ``seed`` None draws fresh randomness. With a seed every request's draws depend on it, the training step,
    the prompt and how many equal prompts came before it in that step: not on who was faster.
    """

    model_path: str
    prompt_length: int
    response_length: int
    max_num_seqs: int
    seed: int | None


class CPURolloutServer:
    """Serves generation requests of one replica; the methods are those that verl calls on its servers."""

    def __init__(self, config: ServerConfig):
        import torch

        # One actor of several on a few cores; more threads than one fight.
        torch.set_num_threads(1)
        from transformers import GenerationConfig, Qwen3ForCausalLM

        from mapd_verl.cpu.generation import BatchedGenerator

        self.config = config
        model = Qwen3ForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
        generation: GenerationConfig = model.generation_config
        eos = generation.eos_token_id if generation.eos_token_id is not None else model.config.eos_token_id
        if eos is None:
            raise ValueError(f"the model at {config.model_path} names no eos_token_id")
        self.generator = BatchedGenerator(
            model,
            eos,
            model.config.pad_token_id,
            max_batch=config.max_num_seqs,
            max_length=config.prompt_length + config.response_length,
            seed=config.seed,
            num_threads=1,
        )
        self.global_steps: int | None = None
        self._seen: Counter[bytes] = Counter()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
    ) -> WireOutput:
        """Sample from token ids to token ids.

        Raises ``ValueError`` for images, video, or a sampling parameter that this server does not apply.
        """
        if image_data or video_data:
            raise ValueError("the CPU rollout is for text only")
        params = dict(sampling_params)
        for name, value in params.items():
            if name not in _APPLIED and name != "logprobs" and value not in _NEUTRAL.get(name, ()):
                raise ValueError(f"the CPU rollout does not support the sampling parameter {name}={value!r}")
        room = self.config.prompt_length + self.config.response_length - len(prompt_ids)
        limit = params.get("max_tokens") or params.get("max_new_tokens") or min(self.config.response_length, room)
        seed = params.get("seed")
        out = await self.generator.generate(
            prompt_ids,
            limit,
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
            stop_token_ids=params.get("stop_token_ids") or (),
            seed=self._request_seed(prompt_ids, params) if seed is None else seed,
        )
        return WireOutput(
            out.token_ids,
            out.log_probs if params.get("logprobs") else None,
            "aborted" if out.stop_reason == "aborted" else "completed",
            {"global_steps": self.global_steps, "finish_reason": out.stop_reason},
        )

    def _request_seed(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> int | None:
        if self.config.seed is None:
            return None
        settings = json.dumps([self.config.seed, self.global_steps, sorted(params.items()), list(prompt_ids)])
        key = hashlib.blake2b(settings.encode(), digest_size=16).digest()
        self._seen[key] += 1
        return int.from_bytes(key, "little") + self._seen[key]

    async def load_weights(self, weights: Mapping[str, torch.Tensor], global_steps: int | None = None) -> None:
        """Replace all weights between two decoding steps (see ``BatchedGenerator.load_weights``)."""
        await self.generator.load_weights(weights)
        await self.set_global_steps(global_steps)

    async def set_global_steps(self, global_steps: int | None) -> None:
        """Name the version of the weights; outputs carry it."""
        self.global_steps = global_steps
        self._seen.clear()

    async def stats(self) -> dict[str, Any]:
        """Counts and seconds of the generator since its start."""
        return self.generator.stats()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with what it has; new ones are taken again at once."""
        return {"aborted_count": await self.generator.abort_all(), "request_ids": []}

    async def clear_kv_cache(self) -> None:
        """Forget the prefixes of finished requests."""
        await self.generator.clear_cache()

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Training and rollout share host memory: nothing to give back."""

    wake_up = release_kv_cache = resume_kv_cache = resume_generation = sleep
    start_profile = stop_profile = wait_for_requests_to_drain = sleep
