"""verl's real FSDP2 engine around a tiny random Qwen3, in this process, with batches as verl makes them."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mapd_verl.views import ragged

VOCAB = 512
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with the search tags as single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[*special, *tags], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words = ["what", "is", "the", "capital", "of", "country", "where", "city", "lies", "answer", "plan", "facts"]
    chooser = random.Random(0)
    tokenizer.train_from_iterator([" ".join(chooser.choices(words, k=12)) for _ in range(500)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    assert len(fast) <= VOCAB
    return fast


def make_model_folder(
    folder: Path, *, hidden: int = 32, layers: int = 2, vocab: int = VOCAB, seed: int = 0, tied: bool = True
) -> Path:
    """A Hugging Face folder with a random Qwen3 and its tokenizer. Weights are large enough to disagree."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_worker(
    folder: Path, *, lean: bool = True, rank: int = 0, world: int = 1, port: int | None = None, lora_rank: int = 0
):
    """Our training worker over verl's, model built, no Ray."""
    import torch.distributed as dist
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorkerConfig

    from mapd_verl import verl_seams
    from mapd_verl.worker import MapdTrainingWorker

    if not dist.is_initialized():
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        # What Ray sets for a worker; verl reads it even where the group stands already.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    assert verl_seams.get_device_name() == "cpu"
    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        lora_rank=lora_rank,
        target_modules=["q_proj", "v_proj", "up_proj"],
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
    )
    worker = MapdTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10, weight_decay=0.0, clip_grad=1e9),
            checkpoint_config=None,
        )
    )
    worker.reset()
    worker.engine.lean = lean
    return worker


def base_loss(loss_agg_mode: str = "token-mean", **keys):
    """verl's own actor loss as its worker builds it."""
    from verl.workers.config import FSDPActorConfig

    from mapd_verl.verl_seams import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=2,
        ppo_mini_batch_size=4,
        rollout_n=1,
        loss_agg_mode=loss_agg_mode,
        use_torch_compile=False,
        **keys,
    )
    return partial(ppo_loss, config=config)


@dataclass
class Row:
    """One rollout: a prompt, turns of policy tokens with observations between, perhaps a privileged prompt."""

    prompt: list[int]
    turns: list[tuple[int, list[int]]]  # (1 policy | 0 observation, ids)
    teacher_prompt: list[int] | None = None
    advantage: float = 0.5
    source: int | None = None
    old_log_prob: float = -6.0
    response: list[int] = field(init=False)
    mask: list[int] = field(init=False)
    turn_ids: list[int] = field(init=False)
    action_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.response = [i for _, ids in self.turns for i in ids]
        self.mask = [kind for kind, ids in self.turns for _ in ids]
        self.turn_ids, self.action_ids, turn = [], [], 0
        for kind, ids in self.turns:
            self.turn_ids += [turn if kind else -1] * len(ids)
            self.action_ids += [turn % 3 if kind else -1] * len(ids)
            turn += kind


def random_rows(seed: int, count: int = 4, with_context: float = 1.0) -> list[Row]:
    """Rows of random ids with random turns, prompts and contexts."""
    chooser = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [chooser.randrange(20, VOCAB) for _ in range(chooser.randint(low, high))]

    rows = []
    for _ in range(count):
        turns: list[tuple[int, list[int]]] = []
        for _ in range(chooser.randint(1, 3)):
            turns += [(1, ids(1, 6)), (0, ids(0, 5))]
        prompt = ids(1, 8)
        teacher = ids(1, 9) + prompt if chooser.random() < with_context else None
        rows.append(Row(prompt, turns, teacher, advantage=chooser.uniform(-1, 1)))
    return rows


def make_batch(rows: list[Row], micro_batch_size: int, temperature: float = 1.0, **switches: bool) -> TensorDict:
    """The TensorDict that reaches ``TrainingWorker.train_batch``."""
    from mapd_verl.verl_seams import tensordict_utils

    def nested(values, dtype=torch.int64):
        return ragged([torch.tensor(v, dtype=dtype) for v in values])

    fields = {
        "prompts": nested([r.prompt for r in rows]),
        "responses": nested([r.response for r in rows]),
        "input_ids": nested([r.prompt + r.response for r in rows]),
        "position_ids": nested([list(range(len(r.prompt) + len(r.response))) for r in rows]),
        "response_mask": nested([r.mask for r in rows]),
        "loss_mask": nested([r.mask for r in rows]),
        "advantages": nested([[r.advantage * m for m in r.mask] for r in rows], torch.float32),
        "old_log_probs": nested([[r.old_log_prob] * len(r.mask) for r in rows], torch.float32),
        "turn_ids": nested([r.turn_ids for r in rows]),
        "action_ids": nested([r.action_ids for r in rows]),
        "teacher_prompt_ids": nested([r.teacher_prompt or r.prompt for r in rows]),
        "privilege_source": torch.tensor(
            [r.source if r.source is not None else int(r.teacher_prompt is not None) for r in rows]
        ),
    }
    batch = TensorDict(fields, batch_size=[len(rows)])
    tensordict_utils.assign_non_tensor(
        batch,
        temperature=temperature,
        global_batch_size=len(rows),
        micro_batch_size_per_gpu=micro_batch_size,
        use_dynamic_bsz=False,
        **{"calculate_entropy": False, "use_remove_padding": False, **switches},
    )
    return batch


def run(worker, loss, batch: TensorDict) -> tuple[float, dict[str, torch.Tensor], dict]:
    """One update's loss, gradients (full tensors by name) and metrics; the optimizer does not step."""
    engine = worker.engine
    with engine.train_mode(zero_grad_on_exit=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss, forward_only=False)
        gradients = {
            name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters() if p.grad is not None
        }
    return sum(output["loss"]), gradients, output["metrics"]
