"""The rollout server without Ray: what verl sends it, and what comes back."""

import asyncio

import pytest

from mapd_verl.cpu.server import CPURolloutServer, ServerConfig

from .conftest import make_model

#: As verl's agent loop worker builds them.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_server(folder):
    servers = []

    def make(seed: int | None = 0) -> CPURolloutServer:
        servers.append(CPURolloutServer(ServerConfig(folder, 64, 32, max_num_seqs=16, seed=seed)))
        return servers[-1]

    yield make
    for server in servers:
        server.generator.close()


async def test_verls_sampling_parameters_are_understood(make_server):
    server = make_server()
    await server.set_global_steps(3)
    out = await server.generate("r", [5, 6, 7], SAMPLING)
    assert 1 <= len(out.token_ids) <= 32 and len(out.log_probs) == len(out.token_ids)
    assert out.stop_reason == "completed"
    assert out.extra_fields["global_steps"] == 3
    assert out.extra_fields["finish_reason"] in ("stop", "length")
    assert (await server.generate("r", [5], {**SAMPLING, "logprobs": False, "max_tokens": 2})).log_probs is None
    assert len((await server.generate("r", [5] * 90, {**SAMPLING, "temperature": 0})).token_ids) <= 6


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"stop": ["</search>"]}, "stop="),
        ({"bogus": 1}, "bogus=1"),
        ({"prompt_logprobs": 0}, "prompt_logprobs=0"),
    ],
)
async def test_a_parameter_that_would_be_ignored_is_refused(make_server, extra, message):
    with pytest.raises(ValueError, match=message):
        await make_server().generate("r", [5, 6], {**SAMPLING, **extra})


async def test_images_are_refused(make_server):
    with pytest.raises(ValueError, match="text only"):
        await make_server().generate("r", [5, 6], SAMPLING, image_data=[object()])


async def group(server: CPURolloutServer, prompts: list[list[int]]) -> list[tuple]:
    outputs = await asyncio.gather(*(server.generate(str(i), ids, SAMPLING) for i, ids in enumerate(prompts)))
    return sorted((ids, out.token_ids) for ids, out in zip(map(tuple, prompts), outputs, strict=True))


async def test_a_step_repeats_itself_whatever_the_order_of_arrival(make_server):
    prompts = [[5, 6, 7]] * 4 + [[8, 9]] * 4
    first, second = make_server(), make_server()
    await first.set_global_steps(1)
    await second.set_global_steps(1)
    one = await group(first, prompts)
    assert one == await group(second, prompts[::-1])
    assert len({tuple(tokens) for _, tokens in one}) > 4  # members of a group differ
    await second.set_global_steps(2)
    assert one != await group(second, prompts)  # and so do steps
    await second.set_global_steps(1)
    assert one == await group(second, prompts)
    assert one != await group(make_server(seed=1), prompts)


async def test_without_a_seed_nothing_repeats(make_server):
    prompts = [[5, 6, 7]] * 4
    assert await group(make_server(seed=None), prompts) != await group(make_server(seed=None), prompts)


async def test_new_weights_name_their_step(make_server):
    server = make_server()
    await server.load_weights(make_model(seed=9).state_dict(), 7)
    assert (await server.generate("r", [5], SAMPLING)).extra_fields["global_steps"] == 7


async def test_abort_leaves_partial_outputs(make_server):
    server = make_server()
    server.generator.eos_token_ids = frozenset()
    running = [asyncio.create_task(server.generate(str(i), [5, 6, i + 7], SAMPLING)) for i in range(40)]
    await asyncio.sleep(0.005)
    aborted = await server.abort_all_requests()
    reasons = [out.stop_reason for out in await asyncio.gather(*running)]
    assert aborted["aborted_count"] == reasons.count("aborted") > 0
