"""Supervised training of the tiny student on scripted searches.

Cross entropy on the policy's tokens only; passages, prompts and untrained mistakes are context. Batches
are of similar lengths and right-padded, so causal attention needs no mask. Everything is determined by
``ColdstartConfig`` up to floating point.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mapd_verl.coldstart.behaviour import Mixture
from mapd_verl.coldstart.examples import Example, ExampleStream, Shares

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(frozen=True)
class ModelConfig:
    """A tiny Qwen3."""

    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    max_positions: int = 2048
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class StageConfig:
    """One stage of training: so many tokens (prompt and passages included) of one mixture."""

    tokens: int
    lr: float = 2e-3
    #: Share of made-up places.
    made_up: float = 0.75
    shares: Shares = field(default_factory=Shares)
    mixture: Mixture = field(default_factory=Mixture)
    warmup: float = 0.02
    #: How often each relation is asked; None: as in the questions themselves.
    relations: dict[str, int] | None = None
    #: The learning rate ends at this share of its peak (cosine).
    final_lr: float = 0.05
    #: End the stage at this many tokens, on the schedule of ``tokens``.
    stop: int | None = None


@dataclass(frozen=True)
class ColdstartConfig:
    """The recipe that rebuilds the student; stored beside the checkpoint."""

    stages: tuple[StageConfig, ...]
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    batch_tokens: int = 4096
    weight_decay: float = 0.05
    clip: float = 1.0
    threads: int = 1
    #: Run matrix products in bfloat16 (parameters stay fp32).
    bf16: bool = True
    compile: bool = False
    cities: int = 9600


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights; its vocabulary is exactly the tokenizer's (or verl's log-probs differ)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if len(tokenizer) != config.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}")
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def batches(stream: Iterator[Example], batch_tokens: int, pool: int = 256) -> Iterator[list[Example]]:
    """Batches of similar lengths, each at most ``batch_tokens`` padded tokens, in shuffled order."""
    import random

    rng = random.Random(0)
    while True:
        examples = sorted(itertools.islice(stream, pool), key=lambda e: len(e.input_ids))
        made: list[list[Example]] = [[]]
        for example in examples:
            if (len(made[-1]) + 1) * len(example.input_ids) > batch_tokens and made[-1]:
                made.append([])
            made[-1].append(example)
        rng.shuffle(made)
        yield from made


def collate(examples: list[Example], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ``input_ids`` and ``loss_mask``, both [B, L]."""
    import torch

    length = max(len(e.input_ids) for e in examples)
    ids = torch.full((len(examples), length), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        mask[row, : len(example.loss_mask)] = torch.tensor(example.loss_mask, dtype=torch.bool)
    return ids, mask


def token_losses(model: Qwen3ForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token under loss, [N] in the order of ``mask[:, 1:].nonzero()``.

    Only those positions go through the output head: most tokens are passages.
    """
    import torch.nn.functional as F

    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    chosen = mask[:, 1:]
    logits = model.lm_head(hidden[chosen])
    return F.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")


def learning_rate(stage: StageConfig, seen: int) -> float:
    """Linear warm-up, then cosine, by tokens seen in the stage."""
    progress = min(1.0, seen / stage.tokens)
    if progress < stage.warmup:
        return stage.lr * max(progress / stage.warmup, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - stage.warmup) / (1 - stage.warmup)))
    return stage.lr * (stage.final_lr + (1 - stage.final_lr) * cosine)


def train_stage(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: ExampleStream,
    stage: StageConfig,
    config: ColdstartConfig,
    out: Path,
    name: str,
) -> None:
    """Train one stage in place; progress goes to ``out/coldstart.jsonl``, weights to ``out`` now and then."""
    import torch

    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=stage.lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    losses = torch.compile(token_losses, dynamic=True) if config.compile else token_losses
    model.train()
    seen, step, started, saved = 0, 0, time.monotonic(), time.monotonic()
    group_loss: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    with (out / "coldstart.jsonl").open("a") as log:
        for batch in batches(iter(stream), config.batch_tokens):
            if seen >= (stage.tokens if stage.stop is None else stage.stop):
                break
            lr = learning_rate(stage, seen)
            for group in optimizer.param_groups:
                group["lr"] = lr
            ids, mask = collate(batch, tokenizer.pad_token_id)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
                each = losses(model, ids, mask)
            each.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen += sum(len(e.input_ids) for e in batch)
            step += 1
            for example, part in zip(batch, each.detach().split(mask[:, 1:].sum(1).tolist()), strict=True):
                group_loss[example.group][0] += float(part.sum())
                group_loss[example.group][1] += len(part)
            if step % 50 == 0:
                row = {"stage": name, "step": step, "tokens": seen, "lr": lr, "seconds": time.monotonic() - started}
                row |= {g: round(total / max(count, 1), 4) for g, (total, count) in sorted(group_loss.items())}
                group_loss.clear()
                log.write(json.dumps(row) + "\n")
                log.flush()
            if time.monotonic() - saved > 300:
                model.save_pretrained(out)
                saved = time.monotonic()
    model.save_pretrained(out)


def save_recipe(config: ColdstartConfig, out: Path) -> None:
    """``out/recipe.json``: everything that rebuilds the checkpoint."""
    (out / "recipe.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
