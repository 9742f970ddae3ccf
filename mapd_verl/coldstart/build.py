"""`mapd coldstart`: from nothing to the tiny student, with the recipe and the hash that rebuild it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from mapd_verl.coldstart.behaviour import Mixture
from mapd_verl.coldstart.examples import ExampleStream, Shares
from mapd_verl.coldstart.tokenizer import corpus_lines, train_tokenizer
from mapd_verl.coldstart.train import ColdstartConfig, StageConfig, build_model, save_recipe, train_stage
from mapd_verl.coldstart.worlds import Places, namer_for
from mapd_verl.data.geonames.build import WorldConfig, build_world
from mapd_verl.data.geonames.facts import load_cities
from mapd_verl.data.geonames.questions import split_of
from mapd_verl.errors import UserError

#: Copying first: with nothing else to learn, attention to earlier occurrences forms within a million tokens.
DRILLS = Shares(
    plain=0.04, other_protocol=0.0, own_protocol=0.04, own_rollout=0.0, copy_drill=0.7, reading_drill=0.2,
    compare_drill=0.02,
)  # fmt: skip

#: While skills form, most plain questions are answered well: reading is learned from them.
SKILLED = Mixture(
    single_hop={"good": 0.60, "direct": 0.16, "whole_question": 0.12, "ignore": 0.04, "broken": 0.08},
    multi_hop={"good": 0.56, "direct": 0.12, "first_hop": 0.14, "whole_question": 0.10, "ignore": 0.02, "broken": 0.06},
    comparison={"good": 0.60, "direct": 0.14, "first_hop": 0.10, "whole_question": 0.10, "broken": 0.06},
)

#: Last, the behaviour: plain questions in the poor mixture, protocols followed.
BEHAVIOUR = Shares(
    plain=0.36, other_protocol=0.14, own_protocol=0.42, own_rollout=0.04, copy_drill=0.015, reading_drill=0.02,
    compare_drill=0.005,
)  # fmt: skip

#: After the behaviour stage what still failed was reading digits (population 4 of 28): more of that.
DIGITS = Shares(
    plain=0.22, other_protocol=0.12, own_protocol=0.34, own_rollout=0.02, copy_drill=0.06, reading_drill=0.16,
    compare_drill=0.08,
)  # fmt: skip
DIGIT_RELATIONS = {
    "country": 3, "timezone": 3, "population": 14, "capital": 4, "currency": 4, "phone": 5, "continent": 3,
    "comparison": 12,
}  # fmt: skip

#: More of all of it, with more foreign protocols: reading became perfect (population 19 to 28 of 28).
READING = Shares(
    plain=0.24, other_protocol=0.28, own_protocol=0.26, own_rollout=0.02, copy_drill=0.05, reading_drill=0.07,
    compare_drill=0.08,
)  # fmt: skip

#: The shipped student.
DEFAULT = ColdstartConfig(
    stages=(
        StageConfig(tokens=1_500_000, shares=DRILLS, final_lr=1.0),
        StageConfig(tokens=24_000_000, stop=19_400_000, mixture=SKILLED, final_lr=0.1),
        StageConfig(tokens=4_000_000, lr=6e-4, made_up=0.6, shares=BEHAVIOUR, final_lr=0.02),
        StageConfig(tokens=3_200_000, lr=6e-4, shares=DIGITS, relations=DIGIT_RELATIONS, final_lr=0.01),
        StageConfig(tokens=10_000_000, lr=6e-4, shares=READING, relations=DIGIT_RELATIONS, final_lr=0.01),
    ),
    compile=True,
)


def coldstart(out: Path, config: ColdstartConfig = DEFAULT, start: Path | None = None, first_stage: int = 0) -> dict:
    """Build the student into ``out`` (an HF folder) and return its card.

    ``start`` continues from an earlier checkpoint at stage ``first_stage``; the result is then the same as
    in one go, since each stage has its own optimizer, schedule and examples.

    Raises:
        UserError: when ``start`` holds no checkpoint, or ``first_stage`` is not a stage.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if not 0 <= first_stage < len(config.stages):
        raise UserError(f"coldstart: stage {first_stage} is none of the {len(config.stages)} stages")
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    cities = load_cities(config.cities)
    if start is None:
        with tempfile.TemporaryDirectory() as folder:
            build_world(Path(folder), WorldConfig(cities=config.cities))
            tokenizer = train_tokenizer(corpus_lines(Path(folder) / "corpus.jsonl"), config.model.vocab_size)
        model = build_model(config.model, tokenizer, config.seed)
    else:
        if not (start / "model.safetensors").is_file():
            raise UserError(f"coldstart: no checkpoint in {start}")
        tokenizer = AutoTokenizer.from_pretrained(start)
        model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer.save_pretrained(out)
    save_recipe(config, out)
    namer = namer_for(tokenizer, [city.name for city in cities if split_of(city) == "train"])
    for index, stage in enumerate(config.stages):
        if index < first_stage:
            continue
        places = Places(cities, namer, stage.made_up)
        stream = ExampleStream(
            tokenizer, places, namer, stage.shares, stage.mixture, config.seed * 1000 + index, stage.relations
        )
        train_stage(model, tokenizer, stream, stage, config, out, f"{index}")
        model.save_pretrained(out / f"stage{index}")
        tokenizer.save_pretrained(out / f"stage{index}")
    return write_card(out)


def write_card(out: Path) -> dict:
    """``out/card.json``: size and SHA-256 of the weights and of the tokenizer."""
    names = ("model.safetensors", "tokenizer.json", "config.json")
    card = {
        "bytes": {name: (out / name).stat().st_size for name in names},
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names},
        "recipe": "recipe.json",
    }
    temporary = out / f".card.{os.getpid()}"
    temporary.write_text(json.dumps(card, indent=1) + "\n")
    os.replace(temporary, out / "card.json")
    return card
