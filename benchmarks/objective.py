"""What MAPD's term costs beside plain GRPO: time of a whole forward and backward, and peak resident memory.

    python benchmarks/objective.py --tokens 256 --rounds 3

Four variants of verl's FSDP2 engine on one random Qwen3, each in a child process of its own, run in turn:

* ``grpo``: verl's own forward; logits of every position.
* ``grpo_lean``: the chunked head, no teacher.
* ``mapd``: the chunked head with the teacher's branch, reverse KL over the whole vocabulary.
* ``naive``: verl's own forward, the teacher's logits and the divergence's gradient whole (``mapd.forward: stock``).

The batch is one row: a short prompt and ``T`` response tokens that all count, the hardest case for the chunked head,
which projects no others. Times are medians over rounds; peak memory is the process's high-water mark (``VmHWM``),
reset before the first round.

The floor is the ratio of multiplications: GRPO's forward and backward (3 products with each weight for each token, the
head's for tokens that count) against those and the teacher's forward.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 151_936
VARIANTS = ("grpo", "grpo_lean", "mapd", "naive")
TOKENIZER = Path(__file__).parents[1] / "recipes/laptop/student"


def model_config(hidden: int, layers: int) -> Any:
    """Qwen3-0.6B's proportions."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        tie_word_embeddings=True,
    )


def operations(config: Any, tokens: int, prompt: int, protocol: int) -> tuple[float, float]:
    """Multiplications of GRPO's forward and backward, and of the teacher's forward."""
    h, d = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = h * (2 * query + 2 * key) + 3 * h * config.intermediate_size

    def backbone(length: int) -> float:
        # Attention: two products of length x length, half of which causality leaves.
        return config.num_hidden_layers * (length * layer + length * length * query)

    head = tokens * h * config.vocab_size
    length = prompt + tokens
    return 3.0 * (backbone(length) + head), backbone(length + protocol) + head


def make_batch(tokens: int, prompt: int, protocol: int) -> Any:
    from tensordict import TensorDict

    from mapd_verl.verl_seams import tensordict_utils
    from mapd_verl.views import ragged

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, VOCABULARY, (protocol + prompt + tokens,), generator=generator)
    student, response = ids[protocol : protocol + prompt], ids[protocol + prompt :]
    ones = torch.ones(tokens, dtype=torch.int64)
    fields = {
        "prompts": student,
        "responses": response,
        "input_ids": ids[protocol:],
        "position_ids": torch.arange(prompt + tokens),
        "response_mask": ones,
        "loss_mask": ones,
        "advantages": torch.randn(tokens, generator=generator),
        "old_log_probs": torch.full((tokens,), -11.9),
        "teacher_prompt_ids": ids[: protocol + prompt],
    }
    columns: dict[str, Any] = {name: ragged([value]) for name, value in fields.items()}
    batch = TensorDict(columns | {"privilege_source": torch.tensor([1])}, batch_size=[1])
    tensordict_utils.assign_non_tensor(
        batch,
        temperature=1.0,
        global_batch_size=1,
        micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        calculate_entropy=False,
        use_remove_padding=False,
    )
    return batch


def make_engine(folder: str) -> Any:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorkerConfig

    from mapd_verl.worker import MapdTrainingWorker

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    worker = MapdTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=folder,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                mixed_precision=fp32,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=1,
                infer_micro_batch_size_per_gpu=1,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10),
            checkpoint_config=None,
        )
    )
    worker.reset()
    return worker.engine


def peak_memory() -> float:
    """The process's high-water mark, GB."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def child(variant: str, folder: str, arguments: argparse.Namespace, pipe: Any) -> None:
    """Build, say so, then one forward and backward for each message, answered with seconds and peak memory."""
    torch.set_num_threads(arguments.threads)
    from verl.workers.config import FSDPActorConfig

    from mapd_verl.config import ObjectiveConfig
    from mapd_verl.loss import MapdLoss
    from mapd_verl.objectives import AuxiliaryLoss, make_objective
    from mapd_verl.verl_seams import ppo_loss

    engine = make_engine(folder)
    engine.lean, engine.chunk_tokens = variant in ("grpo_lean", "mapd"), arguments.chunk_tokens
    actor = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1, rollout_n=1, use_torch_compile=False
    )
    loss: Any = partial(ppo_loss, config=actor)
    if variant in ("mapd", "naive"):
        objective = make_objective(ObjectiveConfig(chunk_tokens=arguments.chunk_tokens))
        assert isinstance(objective, AuxiliaryLoss)
        loss = MapdLoss(loss, objective)
    Path("/proc/self/clear_refs").write_text("5")
    pipe.send("ready")
    with engine.train_mode(zero_grad_on_exit=True):
        while pipe.recv():
            engine.optimizer_zero_grad()
            batch = make_batch(arguments.tokens, arguments.prompt, arguments.protocol)
            start = time.perf_counter()
            engine.forward_backward_batch(batch, loss, forward_only=False)
            pipe.send((time.perf_counter() - start, peak_memory()))
    torch.distributed.destroy_process_group()


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, tuple[float, float]]:
    """Median seconds and peak memory in GB of each variant."""
    context = mp.get_context("spawn")
    pipes, children = {}, []
    try:
        for variant in arguments.variants:
            pipes[variant], theirs = context.Pipe()
            children.append(context.Process(target=child, args=(variant, folder, arguments, theirs), daemon=True))
            children[-1].start()
            theirs.close()
        for pipe in pipes.values():
            pipe.recv()
        results: dict[str, list[tuple[float, float]]] = {variant: [] for variant in arguments.variants}
        for _ in range(arguments.warm_up + arguments.rounds):
            for variant, pipe in pipes.items():
                pipe.send(True)
                results[variant].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(False)
        for process in children:
            process.join(30)
    finally:
        for process in children:
            if process.is_alive():
                process.terminate()
    timed = {variant: rounds[arguments.warm_up :] for variant, rounds in results.items()}
    return {
        variant: (statistics.median(s for s, _ in rounds), max(memory for _, memory in rounds))
        for variant, rounds in timed.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=256, help="response tokens, all of which count")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens")
    parser.add_argument("--protocol", type=int, default=64, help="tokens that only the teacher reads")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    os.environ |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}

    from transformers import AutoModelForCausalLM

    config = model_config(arguments.hidden, arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for path in TOKENIZER.glob("*token*"):
            shutil.copy(path, folder)
        results = measure(arguments, folder)
    grpo, teacher = operations(config, arguments.tokens, arguments.prompt, arguments.protocol)
    floor = (grpo + teacher) / grpo
    print(
        f"V {VOCABULARY}, hidden {arguments.hidden}, layers {arguments.layers}, T {arguments.tokens}, "
        f"prompt {arguments.prompt}, protocol {arguments.protocol}, chunk {arguments.chunk_tokens}, "
        f"threads {arguments.threads}, rounds {arguments.rounds}"
    )
    print(f"operations: GRPO {2 * grpo / 1e9:.0f} GFLOP, teacher {2 * teacher / 1e9:.0f}; floor {floor:.3f} x GRPO")
    base = results.get("grpo")
    print(f"{'variant':<10} {'seconds':>8} {'x GRPO':>7} {'x floor':>8} {'peak GB':>8} {'x GRPO':>7}")
    for variant, (seconds, memory) in results.items():
        time_ratio = seconds / base[0] if base else float("nan")
        of_floor = f"{time_ratio / floor:8.3f}" if variant in ("mapd", "naive") else " " * 8
        memory_ratio = memory / base[1] if base else float("nan")
        print(f"{variant:<10} {seconds:8.2f} {time_ratio:7.3f} {of_floor} {memory:8.2f} {memory_ratio:7.3f}")


if __name__ == "__main__":
    main()
