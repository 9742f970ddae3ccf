"""A very small world for end-to-end runs: four questions, a corpus, protocols, and a student that acts.

The student is a tiny Qwen3 trained for some seconds to search (or not) and to answer one of two cities at
random, so that groups hold successes and failures and every advantage is real.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from mapd_verl.privilege import privileged_prompt_ids
from protocol_cache.question_id import question_id
from protocol_cache.store import ProtocolStore, Provenance, Record

from .harness import make_model_folder

SOURCE = "small_world"
ANSWERS = ("city", "country")
QUESTIONS = [f"what is the answer of plan {letter}" for letter in "abcd"]


def targets() -> list[str]:
    return [ANSWERS[i % 2] for i in range(len(QUESTIONS))]


def write_files(folder: Path) -> None:
    """``corpus.jsonl``, ``train.parquet``, ``val.parquet`` and ``protocols.sqlite`` (for the first half only)."""
    with (folder / "corpus.jsonl").open("w") as corpus:
        for i, (question, target) in enumerate(zip(QUESTIONS, targets(), strict=True)):
            contents = f'"{question}"\nthe answer is {target}.'
            corpus.write(json.dumps({"id": f"p{i}", "contents": contents}) + "\n")
    for split in ("train", "val"):
        rows = [
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": question}],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": [target]}},
                "extra_info": {"split": split, "index": i, "kind": "single_hop", "question": question},
                "id": f"{split}-{i}",
                "question": question,
                "golden_answers": [target],
                "question_id": question_id(question, SOURCE, split),
                "agent_name": "mapd_search",
            }
            for i, (question, target) in enumerate(zip(QUESTIONS, targets(), strict=True))
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    store = ProtocolStore(folder / "protocols.sqlite")
    for question, target in list(zip(QUESTIONS, targets(), strict=True))[: len(QUESTIONS) // 2]:
        text = f"the answer is {target}."
        contents = f'"{question}"\n{text}'
        protocol = {
            "schema_version": "1",
            "variant": "succeeded",
            "task_type": "single_hop",
            "reasoning_plan": ["search the plan"],
            "grounding_facts": [
                {
                    "passage_id": f"p{QUESTIONS.index(question)}",
                    "text": text,
                    "start": contents.index(text),
                    "end": len(contents),
                }
            ],
            "answer": target,
            "answer_grounded": True,
        }
        store.put(
            Record(
                question_id(question, SOURCE, "train"),
                question,
                SOURCE,
                "train",
                "passed",
                Provenance("test", "1", "none", "1"),
                protocol,
            )
        )


def write_student(folder: Path, steps: int = 150) -> Path:
    """A student folder whose model searches every other time and answers one of two words."""
    make_model_folder(folder, hidden=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    chooser = random.Random(0)
    for _ in range(steps):
        rows, labels = [], []
        for _ in range(8):
            i = chooser.randrange(len(QUESTIONS))
            prompt = privileged_prompt_ids(tokenizer, [{"role": "user", "content": QUESTIONS[i]}], None)
            parts = [(1, f"<answer>{chooser.choice(ANSWERS)}</answer>")]
            if chooser.random() < 0.5:
                passage = (
                    f'\n\n<information>Doc 1(Title: "{QUESTIONS[i]}") the answer is {targets()[i]}.\n</information>\n\n'
                )
                parts = [(1, "<search>search the plan</search>"), (0, passage), *parts]
            ids, keep = list(prompt), [-100] * len(prompt)
            for own, text in parts:
                piece = tokenizer.encode(text, add_special_tokens=False)
                ids += piece
                keep += piece if own else [-100] * len(piece)
            rows.append(torch.tensor(ids))
            labels.append(torch.tensor(keep))
        pad = torch.nn.utils.rnn.pad_sequence
        batch = pad(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        attention = torch.arange(batch.shape[1]) < lengths[:, None]
        loss = model(
            input_ids=batch,
            attention_mask=attention,
            labels=pad(labels, batch_first=True, padding_value=-100),
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
