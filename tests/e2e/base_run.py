"""The smallest real run of verl on the CPU platform: stock trainer, stock single-turn loop, our rollout."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mapd_verl import processes

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Share of vowels: something that a random model varies in."""
    return sum(letter in "aeiou" for letter in solution_str) / (1 + len(solution_str))
'''


def write_assets(folder: Path) -> None:
    """``model/`` (random Qwen3 and its tokenizer), ``train.parquet``, ``val.parquet``, ``vowels.py``."""
    chooser = random.Random(0)
    words = ["what", "is", "the", "sum", "of", "plus", "minus", "one", "two", "number", "city", "river"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(chooser.choices(words, k=12)) for _ in range(300)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Far from the tame initial values, so that two ways to compute a probability could differ.
        initializer_range=0.2,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": f"what is the sum of {number} plus {number}"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(16)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:2]).to_parquet(folder / "val.parquet")
    (folder / "vowels.py").write_text(REWARD)


def overrides(folder: Path, steps: int) -> list[str]:
    """Hydra overrides on verl's ``ppo_trainer``."""
    fp32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
    return (
        f"""
        trainer.device=cpu
        trainer.n_gpus_per_node=1
        trainer.logger=[console]
        trainer.val_before_train=false
        trainer.test_freq=-1
        trainer.save_freq=-1
        trainer.total_training_steps={steps}
        trainer.total_epochs=1000
        trainer.resume_mode=disable
        trainer.balance_batch=false
        trainer.default_local_dir={folder}/run
        hydra.run.dir={folder}/hydra
        +ray_kwargs.ray_init.num_gpus=1
        ray_kwargs.ray_init.num_cpus=16
        +ray_kwargs.ray_init.include_dashboard=false
        +ray_kwargs.ray_init.object_store_memory=200000000
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        transfer_queue.backend.SimpleStorage.total_storage_size=1000
        algorithm.adv_estimator=grpo
        data.train_files={folder}/train.parquet
        data.val_files={folder}/val.parquet
        data.train_batch_size=4
        data.max_prompt_length=64
        data.max_response_length=32
        data.dataloader_num_workers=0
        actor_rollout_ref.model.path={folder}/model
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.model.use_remove_padding=false
        actor_rollout_ref.model.enable_gradient_checkpointing=false
        actor_rollout_ref.actor.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
        actor_rollout_ref.actor.use_torch_compile=false
        +actor_rollout_ref.actor.fsdp_config.mixed_precision={fp32}
        actor_rollout_ref.actor.use_kl_loss=true
        actor_rollout_ref.actor.ppo_mini_batch_size=4
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
        actor_rollout_ref.actor.optim.lr=1e-3
        actor_rollout_ref.ref.fsdp_config.strategy=fsdp2
        actor_rollout_ref.ref.fsdp_config.use_torch_compile=false
        actor_rollout_ref.ref.fsdp_config.model_dtype=fp32
        +actor_rollout_ref.ref.fsdp_config.mixed_precision={fp32}
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
        actor_rollout_ref.rollout.name=mapd_cpu
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
        actor_rollout_ref.rollout.max_num_seqs=64
        actor_rollout_ref.rollout.calculate_log_probs=true
        actor_rollout_ref.rollout.free_cache_engine=false
        actor_rollout_ref.rollout.agent.num_workers=1
        reward.num_workers=1
        reward.custom_reward_function.path={folder}/vowels.py
        reward.custom_reward_function.name=compute_score
    """.strip()
        .replace("        ", "")
        .splitlines()
    )


def start(folder: Path, steps: int, module: str = "mapd_verl.main", log: Path | None = None) -> subprocess.Popen:
    """Start a run with its output in ``log`` (default ``folder/log``)."""
    env = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", module, *overrides(folder, steps)]
    with (log or folder / "log").open("wb") as out:
        return processes.start(command, out, env)  # ends with this process, whatever ends it


def step_metrics(log: str) -> list[dict[str, float]]:
    """The console logger's lines, one dict a step."""
    number = r"(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?|nan)\)?"
    return [
        {name: float(value) for name, value in re.findall(rf"([\w/@.-]+):{number}(?= - |$)", line.strip())}
        for line in re.findall(r"^.*?\b(step:\d+ - .*)$", log, re.MULTILINE)
    ]
