"""Continuous batching end to end on a real (tiny, random) Qwen3."""

import asyncio
import threading

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mapd_verl.cpu.generation import BatchedGenerator

from .conftest import VOCABULARY, make_model

EOS = 1


@pytest.fixture
def generator(model):
    with BatchedGenerator(model, EOS, 0, max_batch=8, max_length=200, seed=0) as generator:
        yield generator


@pytest.fixture
def endless(model):
    """No end token: every request runs to its ``max_tokens``."""
    with BatchedGenerator(model, (), 0, max_batch=8, max_length=200, seed=0) as generator:
        yield generator


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_log_probs(model: Qwen3ForCausalLM, ids: list[int], new: list[int], temperature: float) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits / (temperature or 1.0), -1).gather(-1, torch.tensor(new)[:, None])[:, 0]


async def test_greedy_equals_transformers_generate_whatever_shares_the_batch(model, generator):
    prompts = [prompt(count, seed) for seed, count in enumerate((3, 17, 40, 64, 5, 90, 33, 12, 70, 20, 8, 50))]
    outputs = await asyncio.gather(*(generator.generate(ids, 20, temperature=0.0) for ids in prompts))
    for ids, out in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        assert out.token_ids == expected
        assert out.stop_reason == ("stop" if expected[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
async def test_log_probs_equal_the_forward_of_transformers(model, generator, temperature):
    prompts = [prompt(count, seed) for seed, count in enumerate((9, 30, 55, 4, 21))]
    outputs = await asyncio.gather(*(generator.generate(ids, 25, temperature=temperature) for ids in prompts))
    for ids, out in zip(prompts, outputs, strict=True):
        expected = reference_log_probs(model, ids, out.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=1e-5)


async def test_log_probs_stay_right_over_turns_that_reuse_the_cache(model, generator):
    async def episode(seed: int) -> None:
        ids = prompt(30, seed=seed % 3)  # three groups of equal prompts
        for turn in range(4):
            out = await generator.generate(ids, 12)
            expected = reference_log_probs(model, ids, out.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=1e-5)
            ids = ids + out.token_ids + prompt(7, seed=100 + turn)

    await asyncio.gather(*(episode(seed) for seed in range(9)))
    stats = generator.stats()
    assert stats["requests"] == 36
    # Turns 2-4 find their whole past but its last token: 3 x 9 x at least 30 tokens.
    assert stats["reused_prompt_tokens"] > 0.5 * stats["prompt_tokens"]


async def test_prompts_of_one_token(model, generator):
    outputs = await asyncio.gather(*(generator.generate([token], 6) for token in (5, 5, 9)))
    for token, out in zip((5, 5, 9), outputs, strict=True):
        expected = reference_log_probs(model, [token], out.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["_slots.place", "_slots.append", "_decoder.prefill", "_decoder.decode"])
async def test_whatever_fails_reaches_every_caller_and_the_next_request_works(generator, monkeypatch, part):
    owner, _, name = part.partition(".")

    def broken(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(generator, owner), name, broken)
        futures = [generator.generate(prompt(9, i), 50) for i in range(12)]
        results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 30)
    done = [result for result in results if not isinstance(result, MemoryError)]
    assert len(done) < 12 and all(out.token_ids[-1] == EOS for out in done)  # ended with their first token
    assert (await asyncio.wait_for(generator.generate(prompt(9), 5), 30)).token_ids


async def test_equal_prompts_share_one_prefill(generator):
    ids = prompt(60)
    await asyncio.gather(*(generator.generate(ids, 3) for _ in range(8)))
    assert generator.stats()["reused_prompt_tokens"] == 7 * 59


async def test_sampled_frequencies_follow_the_model(model, generator):
    ids = prompt(10)
    draws = await asyncio.gather(*(generator.generate(ids, 1) for _ in range(3000)))
    with torch.inference_mode():
        probs = torch.softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    counts = torch.bincount(torch.tensor([d.token_ids[0] for d in draws]), minlength=VOCABULARY) / 3000
    deviation = ((counts - probs).abs() / (probs * (1 - probs) / 3000).sqrt()).max()
    assert deviation < 5  # standard errors, largest of 97 cells


async def test_a_seed_fixes_the_draws_whatever_runs_beside_it(generator):
    ids = prompt(25)
    alone = await generator.generate(ids, 20, seed=7)
    crowd = await asyncio.gather(
        *(generator.generate(prompt(20 + i, seed=i), 15) for i in range(5)), generator.generate(ids, 20, seed=7)
    )
    other = await generator.generate(ids, 20, seed=8)
    assert crowd[-1].token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


async def test_more_requests_than_slots_and_mixed_settings(model, generator):
    async def one(index: int):
        return await generator.generate(
            prompt(5 + index % 40, seed=index),
            1 + index % 9,
            temperature=[0.0, 0.5, 1.0][index % 3],
            top_k=[-1, 3][index % 2],
            top_p=[1.0, 0.8][index % 5 == 0],
        )

    outputs = await asyncio.gather(*(one(i) for i in range(60)))
    assert all(1 <= len(out.token_ids) <= 1 + i % 9 for i, out in enumerate(outputs))
    assert all(len(out.token_ids) == len(out.log_probs) for out in outputs)


async def test_stop_tokens_end_a_request_and_belong_to_it(generator):
    ids = prompt(12)
    full = await generator.generate(ids, 20, temperature=0.0)
    stop = full.token_ids[4]
    cut = await generator.generate(ids, 20, temperature=0.0, stop_token_ids=[stop])
    first = full.token_ids.index(stop)
    assert cut.token_ids == full.token_ids[: first + 1]
    assert cut.stop_reason == "stop"


async def test_the_model_length_ends_a_request(generator):
    out = await generator.generate(prompt(198), 50, temperature=0.0)
    assert len(out.token_ids) <= 2
    assert out.stop_reason == ("stop" if out.token_ids[-1] == EOS else "length")


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {}, "prompt is empty"),
        ([5] * 200, {}, "max_length is 200"),
        ([VOCABULARY], {}, f"prompt token {VOCABULARY} is outside"),
        ([-1], {}, "prompt token -1"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"stop_token_ids": [VOCABULARY]}, "stop token"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 2.0}, "top_p"),
    ],
)
async def test_bad_requests_are_refused_and_harm_nobody(generator, ids, settings, message):
    fine = asyncio.create_task(generator.generate(prompt(9), 5))
    with pytest.raises(ValueError, match=message):
        await generator.generate(ids, **{"max_tokens": 4, **settings})
    assert 1 <= len((await fine).token_ids) <= 5


async def test_new_weights_take_effect_and_old_keys_are_not_reused(generator):
    other, ids = make_model(seed=5), prompt(40)
    await generator.generate(ids, 5)
    await generator.load_weights(other.state_dict())
    out = await generator.generate(ids, 15)
    expected = reference_log_probs(other, ids, out.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=1e-5)
    assert generator.stats()["reused_prompt_tokens"] == 0


async def test_bad_weights_leave_the_old_ones_in_place(model, generator):
    state = dict(make_model(seed=5).state_dict())
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing weight 'model\.norm\.weight'"):
        await generator.load_weights(state)
    ids = prompt(11)
    out = await generator.generate(ids, 5)
    expected = reference_log_probs(model, ids, out.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(out.log_probs), expected, atol=2e-5, rtol=1e-5)


async def test_weights_that_are_not_finite_reach_every_caller_and_good_ones_mend_it(model, generator):
    good = model.state_dict()
    await generator.load_weights({name: torch.full_like(value, torch.nan) for name, value in good.items()})
    results = await asyncio.gather(*(generator.generate(prompt(9, i), 5) for i in range(12)), return_exceptions=True)
    assert all(isinstance(result, FloatingPointError) for result in results)
    await generator.load_weights(good)
    ids = prompt(30)
    out = await generator.generate(ids, 10)
    torch.testing.assert_close(
        torch.tensor(out.log_probs), reference_log_probs(model, ids, out.token_ids, 1.0), atol=2e-5, rtol=1e-5
    )


async def test_weights_may_change_under_running_requests(generator):
    states = [make_model(seed=s).state_dict() for s in (1, 2)]
    running = [asyncio.create_task(generator.generate(prompt(20, i), 100)) for i in range(8)]
    for turn in range(6):
        await generator.load_weights(states[turn % 2])
    outputs = await asyncio.gather(*running)
    assert all(out.token_ids for out in outputs)


async def test_a_cancelled_request_leaves_the_batch(endless):
    running = [asyncio.create_task(endless.generate(prompt(20, i), 150)) for i in range(12)]
    await asyncio.sleep(0.01)
    for task in running[::2]:
        task.cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert all(result.token_ids for result in results[1::2])


async def test_abort_returns_what_there_is(endless):
    running = [asyncio.create_task(endless.generate(prompt(20, i), 180)) for i in range(12)]
    await asyncio.sleep(0.005)
    count = await endless.abort_all()
    outputs = await asyncio.gather(*running)
    aborted = [out for out in outputs if out.stop_reason == "aborted"]
    assert len(aborted) == count > 0
    assert all(len(out.token_ids) < 180 and len(out.token_ids) == len(out.log_probs) for out in aborted)
    assert (await endless.generate(prompt(5), 3)).token_ids


def test_several_event_loops_at_once(generator):
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        async def run():
            outs = await asyncio.gather(*(generator.generate(prompt(15, i), 10, seed=i) for i in range(4)))
            results[index] = [out.token_ids for out in outs]

        asyncio.run(run())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result == results[0] for result in results.values())


async def test_close_fails_what_is_under_way_and_refuses_more(model):
    generator = BatchedGenerator(model, (), 0, max_batch=2, max_length=200)
    running = [asyncio.create_task(generator.generate(prompt(20, i), 170)) for i in range(6)]
    await asyncio.sleep(0.005)
    generator.close()
    generator.close()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, RuntimeError) and "closed" in str(result) for result in results)
    with pytest.raises(RuntimeError, match="closed"):
        await generator.generate(prompt(3), 2)


def test_a_seeded_generator_repeats_itself(model):
    def outputs() -> list[list[int]]:
        with BatchedGenerator(model, EOS, 0, max_batch=4, max_length=100, seed=3) as generator:
            futures = [generator.submit(prompt(10, i), 10) for i in range(6)]
            return [future.result(timeout=60).token_ids for future in futures]

    assert outputs() == outputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"max_batch": 0}, "max_batch"), ({"max_batch": 4, "cache_slots": 3}, "cache_slots"), ({"eos": 97}, "eos")],
)
def test_bad_settings_are_named(model, arguments, message):
    eos = arguments.pop("eos", EOS)
    with pytest.raises(ValueError, match=message):
        BatchedGenerator(model, eos, 0, **arguments)
