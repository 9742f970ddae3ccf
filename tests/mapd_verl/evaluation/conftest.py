"""A tiny random Qwen3 with a tagged tokenizer as a Hugging Face folder, a corpus and its questions."""

from __future__ import annotations

import json

import pytest

PLACES = {"Paris": ("France", "2,138,551"), "Oslo": ("Norway", "580,000"), "Rome": ("Italy", "2,318,895")}


def passage(city):
    country, people = PLACES[city]
    return (
        f'"{city}"\nThe city of {city} lies in {country}. Its time zone is Europe/{city}. Its population is {people}.'
    )


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    lines = [json.dumps({"id": f"city-{i}", "contents": passage(c)}) + "\n" for i, c in enumerate(PLACES)]
    (folder / "corpus.jsonl").write_text("".join(lines))
    rows = [
        {
            "data_source": "geonames",
            "prompt": [{"role": "user", "content": f"In which country does the city of {city} lie?"}],
            "question": f"In which country does the city of {city} lie?",
            "reward_model": {"style": "rule", "ground_truth": {"target": [PLACES[city][0]]}},
            "extra_info": {"split": "test", "index": i, "kind": kind},
            "question_id": f"q{i}",
        }
        for i, (city, kind) in enumerate(zip(PLACES, ("single_hop", "single_hop", "comparison"), strict=True))
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="session")
def model_folder(world, tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from mapd_verl.coldstart.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([passage(c) for c in PLACES] * 5, 1500)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sidecar(world):
    pytest.importorskip("bm25s")
    from retrieval_server.launch import start_sidecar

    with start_sidecar(world / "corpus.jsonl") as server:
        yield server.url
