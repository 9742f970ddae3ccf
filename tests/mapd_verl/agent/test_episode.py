"""Episodes: masks, spans, budgets, failures; tokens are those that were sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.agent.config import AgentConfig
from mapd_verl.agent.episode import STATUSES, run_episode
from mapd_verl.agent.observation import INVALID_ACTION
from mapd_verl.agent.reward import score
from mapd_verl.errors import UserError

from .conftest import LINES, Library, Script

CONFIG = AgentConfig(
    max_searches=3, max_turn_tokens=80, max_response_tokens=900, max_observation_tokens=300, max_passage_tokens=120
)
PROMPT = "<|im_start|>user\nIn which country does Paris lie? <answer> Rome</answer><|im_end|>\n"
GOOD = (
    "<think> Find the country.</think><search> country of Paris</search>",
    "<think> I have it.</think><answer> France</answer>",
)


def run(policy, search, tokenizer, config=CONFIG, prompt=PROMPT, **sampling):
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return asyncio.run(run_episode(policy, search, tokenizer, ids, config, sampling))


def policy_ids(episode):
    return [i for i, m in zip(episode.response_ids, episode.response_mask, strict=True) if m]


@pytest.mark.parametrize("name", ["tagged", "untagged"])
def test_search_then_answer(name, request, script, library):
    tokenizer = request.getfixturevalue(name)
    episode = run(script(tokenizer, *GOOD), library, tokenizer)
    assert (episode.status, episode.answer, episode.searches) == ("answered", "France", 1)
    assert library.queries == ["country of Paris"] == episode.queries
    assert score(episode, ["France"]) == 1.0 and score(episode, ["Rome"]) == 0.0
    title, body = LINES[0].split("\n")
    assert f"<information>Doc 1(Title: {title}) {body}\n" in tokenizer.decode(episode.response_ids)
    assert episode.policy_text.startswith(GOOD[0]) and "<information>" not in episode.policy_text
    assert episode.valid_turns == 2 and episode.failures == []


def test_masks_and_spans(tagged, script, library):
    episode = run(script(tagged, *GOOD), library, tagged)
    by_turn = {t: [i for i, x in enumerate(episode.turn_ids) if x == t] for t in (-1, 0, 1)}
    assert [episode.response_mask[i] for i in by_turn[-1]] == [0] * len(by_turn[-1])
    assert tagged.decode([episode.response_ids[i] for i in by_turn[0]]) == GOOD[0]
    assert tagged.decode([episode.response_ids[i] for i in by_turn[1]]) == GOOD[1]
    spans = {a: [x for x, b in zip(episode.response_ids, episode.action_ids, strict=True) if b == a] for a in (1, 2)}
    assert tagged.decode(spans[1]) == " country of Paris" and tagged.decode(spans[2]) == " France"
    assert all(a == -1 for a, m in zip(episode.action_ids, episode.response_mask, strict=True) if m == 0)
    assert all(p == 0.0 for p, m in zip(episode.log_probs, episode.response_mask, strict=True) if m == 0)
    assert all(p < 0.0 for p, m in zip(episode.log_probs, episode.response_mask, strict=True) if m)


def test_each_turn_reads_all_that_came_before(tagged, script, library):
    policy = script(tagged, *GOOD)
    episode = run(policy, library, tagged)
    first, second = policy.calls
    assert first["prompt_ids"] == episode.prompt_ids
    end_of_observation = max(i for i, m in enumerate(episode.response_mask) if m == 0) + 1
    assert second["prompt_ids"] == episode.prompt_ids + episode.response_ids[:end_of_observation]


def test_what_follows_the_action_is_never_kept(untagged, script, library):
    policy = script(untagged, GOOD[0] + " and <search> more</search>", GOOD[1] + " bye")
    episode = run(policy, library, untagged)
    assert library.queries == ["country of Paris"]
    assert "more" not in episode.policy_text and "bye" not in episode.policy_text
    # A prefix of what was sampled, with its own log-probabilities: nothing was encoded again.
    kept = policy_ids(episode)
    assert policy.sampled[: len(untagged.encode(GOOD[0]))] == kept[: len(untagged.encode(GOOD[0]))]
    kept_probs = [p for p, m in zip(episode.log_probs, episode.response_mask, strict=True) if m]
    position = {p: i for i, p in enumerate(-1.0 / (1 + k) for k in range(len(policy.sampled)))}
    assert [policy.sampled[position[p]] for p in kept_probs] == kept


def test_an_answer_inside_a_query_is_a_query(tagged, script, library):
    episode = run(script(tagged, "<search> a <answer> b</answer> c</search>", GOOD[1]), library, tagged)
    assert library.queries == ["a <answer> b</answer> c"] and episode.answer == "France"
    assert episode.failures[0].kind == "nested_tag"


def test_passages_cannot_answer(tagged, script, library):
    episode = run(
        script(tagged, "<search> trap</search>", "<think> hm</think>"),
        library,
        tagged,
        AgentConfig(max_searches=1, max_turn_tokens=40),
    )
    assert "Rome" in tagged.decode(episode.response_ids)
    assert episode.answer is None and score(episode, ["Rome"]) == 0.0


def test_empty_query_asks_nobody(tagged, script, library):
    episode = run(script(tagged, "<search> </search>", GOOD[1]), library, tagged)
    assert library.queries == [] and episode.searches == 0
    assert episode.turns[0].observation_kind == "empty_query" and episode.answer == "France"


def test_invalid_action_is_told_and_costs_a_turn(tagged, script, library):
    episode = run(script(tagged, "<think> no tags</think>", *GOOD), library, tagged)
    assert episode.turns[0].observation == INVALID_ACTION
    assert [t.action for t in episode.turns] == ["none", "search", "answer"]
    # The end of message that the policy sampled is kept and trained.
    assert episode.response_ids[len(tagged.encode("<think> no tags</think>"))] == tagged.eos_token_id


def test_the_last_turn_cannot_search(tagged, script, library):
    texts = ["<search> country of Paris</search>"] * 4
    episode = run(script(tagged, *texts), library, tagged)
    assert len(library.queries) == 3 == episode.searches and len(episode.turns) == 4
    assert episode.status == "no_answer" and episode.turns[-1].observation == ""


def test_unclosed_answer_is_truncated(tagged, script, library):
    episode = run(script(tagged, "<answer> Paris"), library, tagged, AgentConfig(max_searches=0))
    assert episode.status == "truncated" and score(episode, ["Paris"]) == 0.0


def test_failed_retrieval_is_excluded(tagged, script):
    episode = run(script(tagged, *GOOD), Library(failing=True), tagged)
    assert episode.status == "retrieval_failed" and episode.excluded
    assert episode.turns[-1].observation_kind == "retrieval_failed"
    assert "http://host:1" in episode.failures[-1].detail
    assert "http" not in tagged.decode(episode.response_ids)


def test_no_hits(tagged, script, library):
    episode = run(script(tagged, "<search> 北京</search>", GOOD[1]), library, tagged)
    assert episode.turns[0].observation_kind == "no_hits" and episode.searches == 1


def test_long_prompt_is_refused_not_cut(tagged, script, library):
    with pytest.raises(UserError, match=r"\d+ tokens, above .*max_prompt_tokens=5"):
        run(script(tagged, *GOOD), library, tagged, AgentConfig(max_prompt_tokens=5))
    with pytest.raises(UserError, match="no tokens"):
        asyncio.run(run_episode(script(tagged, *GOOD), library, tagged, [], CONFIG))


def test_seeds_differ_between_calls(tagged, script, library):
    policy = script(tagged, *GOOD)
    run(policy, library, tagged, seed=7, temperature=1.0)
    assert [c["seed"] for c in policy.calls] == [7, 8]


def test_aborted_generation_is_excluded(tagged, library):
    @dataclass
    class Aborted:
        token_ids: tuple = ()
        log_probs: tuple = ()
        stop_reason: str = "aborted"

    async def generate(**_):
        return Aborted()

    assert run(generate, library, tagged).excluded


def test_broken_generator_is_named(tagged, library):
    @dataclass
    class Broken:
        token_ids: tuple = (5, 6)
        log_probs: tuple = (0.0,)
        stop_reason: str = "stop"

    async def generate(**_):
        return Broken()

    with pytest.raises(ValueError, match="2 ids and 1 log-prob"):
        run(generate, library, tagged)


PIECES = st.lists(
    st.sampled_from(
        ["<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", " country of Paris", " é北", " x"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, min_size=4, max_size=4), st.integers(20, 400), st.integers(1, 40), st.integers(10, 200))
@pytest.mark.parametrize("name", ["tagged", "untagged"])
def test_every_episode_is_well_formed(name, tagged, untagged, texts, response, turn, observed):
    tokenizer = {"tagged": tagged, "untagged": untagged}[name]
    config = AgentConfig(
        max_searches=3,
        max_turn_tokens=turn,
        max_response_tokens=response,
        max_observation_tokens=observed,
        answer_reserve_tokens=8,
    )
    library = Library({"country of Paris": [LINES[0], LINES[1]]})
    policy = Script(tokenizer, texts)
    episode = run(policy, library, tokenizer, config)
    length = len(episode.response_ids)
    assert 0 < length <= response
    for values in (episode.response_mask, episode.log_probs, episode.turn_ids, episode.action_ids):
        assert len(values) == length
    assert episode.status in STATUSES and (episode.answer is not None) == (episode.status == "answered")
    for mask, t, a in zip(episode.response_mask, episode.turn_ids, episode.action_ids, strict=True):
        assert (mask == 0) == (t == -1) == (a == -1)
    # Policy ids are sampled ids, turn by turn, and each turn's text is theirs.
    for number, record in enumerate(episode.turns):
        ids = [i for i, t in zip(episode.response_ids, episode.turn_ids, strict=True) if t == number]
        kept = [i for i in ids if i != tokenizer.eos_token_id]
        assert tokenizer.decode(kept) == record.text
        if record.observation:
            assert record.observation.endswith("</information>\n\n")
    assert all(m == 1 for m in episode.response_mask[-1:]) or episode.status in ("truncated", "no_answer")
