"""Rollout throughput: many requests at once against one at a time, on one thread.

    python benchmarks/rollout.py [--model FOLDER] [--concurrency 32] [--repeats 5]

Both arms do the same work in pairs, alternating, each from an empty cache; medians and the median of the
paired ratios are printed. Three workloads, since they answer different questions:

- decode:  short prompts, long outputs. What batching itself gives.
- group:   8 rollouts of each question, one turn. Adds what one prefill for the group gives.
- agent:   the same over 3 turns with observations between. One at a time also reuses its own past here.

Generated tokens per second; observations and prompts are not counted. Without ``--model`` a random Qwen3 of
2.8 M parameters is used (its weights don't change the arithmetic).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import torch

from mapd_verl.cpu.generation import BatchedGenerator

GROUP, TURNS = 8, 3


def load(folder: str | None):
    """The model of ``folder``, or a random one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if folder is not None:
        return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


class Workloads:
    """Each returns one coroutine per trajectory; it resolves to the number of tokens generated."""

    def __init__(self, generator: BatchedGenerator, count: int, seed: int):
        self.generator, self.count = generator, count
        self.random = random.Random(seed)

    def ids(self, length: int) -> list[int]:
        return [self.random.randrange(8, self.generator.vocab_size) for _ in range(length)]

    def decode(self) -> list[Callable[[], Awaitable[int]]]:
        prompts = [self.ids(24) for _ in range(self.count)]
        return [lambda p=p: self.turns(p, 64, []) for p in prompts]

    def group(self) -> list[Callable[[], Awaitable[int]]]:
        questions = [self.ids(80) for _ in range(self.count // GROUP)]
        return [lambda q=q: self.turns(q, 48, []) for q in questions for _ in range(GROUP)]

    def agent(self) -> list[Callable[[], Awaitable[int]]]:
        questions = [self.ids(80) for _ in range(self.count // GROUP)]
        observations = [[self.ids(90) for _ in range(TURNS - 1)] for _ in range(self.count)]
        return [
            lambda q=q, o=observations[i * GROUP + j]: self.turns(q, 24, o)
            for i, q in enumerate(questions)
            for j in range(GROUP)
        ]

    async def turns(self, ids: list[int], length: int, observations: list[list[int]]) -> int:
        total = 0
        for observation in [*observations, []]:
            out = await self.generator.generate(ids, length)
            total += len(out.token_ids)
            ids = ids + out.token_ids + observation
        return total


async def measure(generator: BatchedGenerator, jobs: list[Callable[[], Awaitable[int]]], concurrency: int) -> float:
    """Generated tokens per second."""
    await generator.clear_cache()
    gate = asyncio.Semaphore(concurrency)

    async def run(job: Callable[[], Awaitable[int]]) -> int:
        async with gate:
            return await job()

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(run(job) for job in jobs)))
    return tokens / (time.perf_counter() - began)


async def benchmark(generator: BatchedGenerator, concurrency: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median tokens per second of both arms, and the median paired ratio, by workload."""
    results = {}
    for name in ("decode", "group", "agent"):
        pairs = []
        for repeat in range(repeats + 1):
            jobs = getattr(Workloads(generator, concurrency, repeat), name)()
            # One at a time needs fewer trajectories for a steady figure; whole groups, so that it shares as much.
            alone = await measure(generator, jobs[:GROUP], 1)
            together = await measure(generator, jobs, concurrency)
            if repeat:  # the first warms up
                pairs.append((alone, together))
        results[name] = {
            "one_at_a_time": statistics.median(a for a, _ in pairs),
            "together": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(b / a for a, b in pairs),
        }
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Qwen3 checkpoint")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.concurrency < GROUP or args.concurrency % GROUP:
        parser.error(f"--concurrency must be a multiple of {GROUP}")
    torch.set_num_threads(1)
    model = load(args.model)
    # No end token, so that both arms generate equally many tokens.
    with BatchedGenerator(model, (), None, max_batch=args.concurrency, max_length=512, num_threads=1) as generator:
        results = asyncio.run(benchmark(generator, args.concurrency, args.repeats))
    if args.json:
        print(json.dumps(results))
        return
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.1f} M parameters, 1 thread, {args.concurrency} concurrent, median of {args.repeats} pairs")
    print(f"{'workload':10}{'one at a time':>16}{'together':>12}{'ratio':>8}   generated tokens/s")
    for name, row in results.items():
        print(f"{name:10}{row['one_at_a_time']:16.0f}{row['together']:12.0f}{row['ratio']:8.1f}")


if __name__ == "__main__":
    main()
