"""Writes run folders in the trainer's real formats, with figures that are made up but consistent."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mapd_verl.agent.metrics import agent_metrics, reward_extra_info
from mapd_verl.evaluation.records import Record, write_records
from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance
from protocol_cache import Record as Stored

KINDS = ("single_hop", "multi_hop", "comparison")


def episode_record(i: int, right: bool, searches: int = 1, split: str = "test") -> Record:
    city = f"Town{i}"
    segments = []
    for n in range(searches):
        segments.append(
            {
                "role": "policy",
                "kind": "search",
                "text": f"<think> Step {n}.</think><search> country of {city}</search>",
            }
        )
        seen = f'\n\n<information>Doc 1(Title: "{city}") The city of {city} lies in Land{i}.</information>\n\n'
        segments.append({"role": "observation", "kind": "passages", "text": seen})
    prediction = f"Land{i}" if right else "Nowhere <b>&"
    segments.append(
        {"role": "policy", "kind": "answer", "text": f"<think> Done.</think><answer> {prediction}</answer>"}
    )
    return Record(
        question_id=f"{split}{i}",
        kind=KINDS[i % 3],
        question=f"In which country does the city of {city} lie?",
        targets=(f"Land{i}",),
        prediction=prediction,
        em=float(right),
        f1=float(right),
        status="answered",
        searches=searches,
        response_tokens=30 + 40 * searches,
        policy_tokens=30 + 8 * searches,
        turns=searches + 1,
        valid_turns=searches + (i % 5 != 0),
        segments=tuple(segments),
    )


def dump(path: Path, records: list[Record], step: int, source: str | None = None) -> None:
    """As verl's ``_dump_generations`` writes it, with the agent loop's columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for i, r in enumerate(records):
            base = {
                "input": f"user\n{r.question}",
                "output": "".join(s["text"] for s in r.segments),
                "gts": {"target": list(r.targets)},
                "score": r.em,
                "step": step,
                "uid": f"u{i}_0_0",
            }
            more = {"privilege_source": source if i % 4 else "own_rollout"} if source else {}
            out.write(json.dumps({**base, **reward_extra_info(r), **more}) + "\n")


def make_run(
    folder: Path, seed: int = 0, steps: int = 20, gain: float = 0.4, kl: bool = True, tensorboard: bool = False
):
    """A run that starts at 30% EM and gains ``gain``; 60 held-out questions, 8 rollouts a step."""
    rng = random.Random(seed)
    metrics: dict[int, dict[str, float]] = {}
    for step in range(0, steps + 1):
        share = 0.3 + gain * step / steps
        if step:
            rollouts = [episode_record(i, rng.random() < share, 1 + (rng.random() < share), "train") for i in range(24)]
            metrics[step] = agent_metrics([reward_extra_info(r) for r in rollouts])
            metrics[step] |= {"actor/kl_loss": 0.0005 * step, "timing_s/step": 6.0 + rng.random()}
            if kl:
                metrics[step] |= {
                    "distillation/kl": 0.5 - 0.015 * step + 0.05 * rng.random(),
                    "mapd/source/protocol": 0.8,
                    "mapd/source/own_rollout": 0.1 + 0.004 * step,
                    "mapd/source/none": 0.1 - 0.004 * step,
                }
            dump(folder / f"rollouts/{step}.jsonl", rollouts, step, "protocol" if kl else None)
        if step % 10 == 0:
            val = [episode_record(i, rng.random() < share, 1, "val") for i in range(60)]
            dump(folder / f"validation/{step}.jsonl", val, step)
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard")) as writer:
            for step, values in metrics.items():
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
    else:
        (folder / "metrics").mkdir(parents=True)
        lines = [json.dumps({"step": step, "data": values}) + "\n" for step, values in metrics.items()]
        (folder / "metrics/000.jsonl").write_text("".join(lines[:12]) + lines[12][:30])  # torn by an interruption
        (folder / "metrics/001.jsonl").write_text("".join(lines[12:]))
    (folder / "hydra/.hydra").mkdir(parents=True)
    (folder / "hydra/.hydra/config.yaml").write_text(
        "mapd:\n  objective: {name: reverse_kl, weight: 0.05}\n"
        "  privilege: {context: protocol, fallback: own_rollout}\n"
        "data: {train_batch_size: 8}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    )
    write_records(folder / "after.jsonl", [episode_record(i, rng.random() < 0.3 + gain) for i in range(60)])
    return metrics


def make_experiment(folder: Path) -> Path:
    """Two arms, MAPD with two seeds, a shared ``before.jsonl`` and a shared protocol cache."""
    for seed in (0, 1):
        make_run(folder / f"mapd-seed{seed}", seed)
    make_run(folder / "grpo-seed0", 5, gain=0.3, kl=False)
    rng = random.Random(99)
    write_records(folder / "before.jsonl", [episode_record(i, rng.random() < 0.3) for i in range(60)])
    with ProtocolStore(folder / "protocols.sqlite") as store:
        for i in range(0, 24, 2):
            protocol = {
                "schema_version": SCHEMA_VERSION,
                "variant": "succeeded",
                "task_type": KINDS[i % 3],
                "reasoning_plan": [f"Find the country of Town{i}."],
                "grounding_facts": [
                    {"passage_id": f"p{i}", "text": f"The city of Town{i} lies in Land{i}.", "start": 0, "end": 10}
                ],
                "answer": f"Land{i}",
                "answer_grounded": True,
            }
            origin = Provenance("rules", "1", "hash", SCHEMA_VERSION)
            store.put(Stored(f"train{i}", f"Town{i}?", "geonames", "train", "passed", origin, protocol))
    return folder
