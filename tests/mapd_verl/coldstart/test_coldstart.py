"""The cold start: a tokenizer made for copying, scripts that the agent's own parser reads, honest masks."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.agent.parser import parse
from mapd_verl.coldstart import behaviour as b
from mapd_verl.coldstart.build import coldstart, write_card
from mapd_verl.coldstart.context import full_protocol, protocol_of
from mapd_verl.coldstart.examples import ExampleStream, Shares
from mapd_verl.coldstart.tokenizer import TAGS, train_tokenizer
from mapd_verl.coldstart.train import (
    ColdstartConfig,
    ModelConfig,
    StageConfig,
    batches,
    build_model,
    collate,
    token_losses,
)
from mapd_verl.coldstart.worlds import Places, namer_for, passage_of
from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.facts import load_cities
from mapd_verl.data.geonames.questions import split_of
from mapd_verl.errors import UserError
from protocol_cache.schema import validate_protocol

VOCAB = 2048


@pytest.fixture(scope="module")
def cities():
    return load_cities(800)


@pytest.fixture(scope="module")
def tokenizer(cities):
    return train_tokenizer([passage_of(city) for city in cities], VOCAB)


@pytest.fixture(scope="module")
def places(cities, tokenizer):
    return Places(cities, namer_for(tokenizer, [c.name for c in cities]), made_up=0.5)


@pytest.fixture(scope="module")
def stream(cities, tokenizer, places):
    namer = namer_for(tokenizer, [c.name for c in cities])
    return ExampleStream(tokenizer, places, namer, Shares(), b.Mixture(), seed=7)


def test_tags_and_numbers_are_single_tokens_and_survive_decoding(tokenizer):
    assert len(tokenizer) == VOCAB
    for piece in [*TAGS, "0", "42", "007", "999"]:
        assert len(tokenizer.encode(piece)) == 1
        assert tokenizer.decode(tokenizer.encode(piece), skip_special_tokens=True) == piece


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_encoding_loses_nothing(tokenizer, written):
    written = written.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(written)) == written


@pytest.mark.parametrize("before", [" of", " in", "<answer>", "</think>", "Title:"])
def test_a_name_is_cut_alike_wherever_it_stands(tokenizer, before):
    for name in ("Zürich", "Port-au-Prince", "São Paulo", "Xqvwy"):
        alone = tokenizer.encode(f" {name}")
        assert tokenizer.encode(f"{before} {name}")[-len(alone) :] == alone


def test_good_solutions_are_read_by_the_agent_and_end_in_the_gold_answer(stream):
    for _ in range(200):
        question = stream.question()
        turns = b.good(question)
        actions = [parse(turn.text) for turn in turns]
        assert [a.kind for a in actions] == ["search"] * (len(turns) - 1) + ["answer"]
        assert actions[-1].text == question.answers[0]
        assert [a.malformed for a in actions] == [()] * len(turns)
        # The question is one that the world's own reader understands.
        parsed = text.parse_question(question.text)
        assert parsed.relation == question.relation


@pytest.mark.parametrize("name", list(b.BEHAVIOURS))
def test_each_behaviour_does_what_its_name_says(stream, places, name):
    rng = random.Random(3)
    for _ in range(100):
        question = stream.question()
        if name in ("first_hop",) and question.kind == "single_hop":
            continue
        turns = b.plain(question, name, places, rng)
        actions = [parse(turn.text) for turn in turns]
        searches = [a.text for a in actions if a.kind == "search"]
        assert actions[-1].kind == "answer"
        if name == "good":
            assert len(searches) == len(b.good_searches(question))
        elif name == "direct":
            assert not searches
        elif name == "first_hop":
            assert len(searches) == 1 < len(b.good_searches(question))
        elif name == "whole_question":
            assert searches[0] == question.text
        elif name == "ignore":
            assert len(searches) == len(b.good_searches(question))
        elif name == "broken":
            assert actions[0].kind == "none" and turns[0].invalid


def test_an_unknown_behaviour_and_a_mixture_off_one_are_errors(stream, places):
    with pytest.raises(ValueError, match="unknown behaviour"):
        b.plain(stream.question(), "lazy", places, random.Random(0))
    with pytest.raises(ValueError, match="sum to 1"):
        b.Mixture(single_hop={"good": 0.5})
    with pytest.raises(ValueError, match="behaviours of"):
        b.Mixture(single_hop={"lazy": 1.0})


def test_mistakes_to_recover_from_get_no_loss(stream, places):
    rng = random.Random(5)
    untrained = 0
    for _ in range(200):
        turns = b.recovery(stream.question(), places, rng)
        untrained += any(not t.trained for t in turns)
        assert turns[-1].trained and parse(turns[-1].text).kind == "answer"
    assert untrained > 100


def test_the_loss_mask_covers_policy_text_only(stream, tokenizer):
    for example in itertools.islice(iter(stream), 300):
        assert len(example.input_ids) == len(example.loss_mask)
        trained = tokenizer.decode([i for i, m in zip(example.input_ids, example.loss_mask, strict=True) if m])
        assert "<information>" not in trained and "Task:" not in trained and "<|im_start|>" not in trained
        assert any(example.loss_mask)


def test_the_stream_is_the_same_for_the_same_seed(tokenizer, places, cities):
    namer = namer_for(tokenizer, [c.name for c in cities])

    def head(seed):
        made = ExampleStream(tokenizer, places, namer, Shares(), b.Mixture(), seed)
        return list(itertools.islice(iter(made), 30))

    assert head(1) == head(1) != head(2)


def test_cold_start_protocols_are_valid_and_render_as_synthesised_ones(stream):
    for _ in range(100):
        question = stream.question()
        protocol = protocol_of(question)
        validate_protocol(protocol)
        assert full_protocol(question).split("\n")[0] == f"Task: {question.kind}"


def test_only_training_cities_are_real(places):
    assert {split_of(c) for c in places.real} == {"train"}


def test_losses_do_not_depend_on_padding(stream, tokenizer):
    import torch

    model = build_model(ModelConfig(vocab_size=VOCAB, hidden_size=32, layers=2, heads=2, kv_heads=1), tokenizer, 0)
    few = next(batches(iter(stream), 2000))[:4]
    together = token_losses(model, *collate(few, tokenizer.pad_token_id))
    alone = torch.cat([token_losses(model, *collate([e], tokenizer.pad_token_id)) for e in few])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_short_cold_start_learns_and_is_reproducible(tmp_path):
    import json

    config = ColdstartConfig(
        stages=(StageConfig(tokens=40_000, lr=3e-3), StageConfig(tokens=4_000)),
        model=ModelConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1),
        batch_tokens=2048,
        cities=800,
        bf16=False,
    )
    card = coldstart(tmp_path / "a", config)
    again = coldstart(tmp_path / "b", config)
    assert card["sha256"] == again["sha256"]
    assert json.loads((tmp_path / "a" / "recipe.json").read_text())["seed"] == 0
    assert write_card(tmp_path / "a") == card
    # The second stage alone, from the first one's checkpoint, gives the same weights.
    resumed = coldstart(tmp_path / "c", config, start=tmp_path / "a" / "stage0", first_stage=1)
    assert resumed["sha256"]["model.safetensors"] == card["sha256"]["model.safetensors"]


def test_bad_starts_are_named(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        coldstart(tmp_path / "out", start=tmp_path / "missing")
    with pytest.raises(UserError, match="stage 9"):
        coldstart(tmp_path / "out", first_stage=9)
    with pytest.raises(ValueError, match="tokens, the model"):
        build_model(ModelConfig(vocab_size=VOCAB + 1), type("T", (), {"__len__": lambda self: VOCAB})(), 0)
