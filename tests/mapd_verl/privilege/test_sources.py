from hypothesis import given
from hypothesis import strategies as st

from mapd_verl.config.schema import SOURCE_NAMES
from mapd_verl.privilege import SOURCE_IDS, SOURCES, Rollout, choose_contexts, make_source


def decode(ids):
    return " ".join(map(str, ids))


def sources(*names):
    return [make_source(name, decode, 1.0) for name in names]


def rollout(group, score=0.0, ids=(1,), **keys):
    return Rollout(group=group, question_id=f"q-{group}", score=score, response_ids=ids, **keys)


def choose(rollouts, *names):
    return [
        (name, context.text if context is not None else None)
        for name, context in choose_contexts(rollouts, sources(*names))
    ]


def test_the_schema_knows_the_registry():
    assert set(SOURCES) == set(SOURCE_NAMES)
    assert SOURCE_IDS["none"] == 0 and len(set(SOURCE_IDS.values())) == len(SOURCES)


def test_a_question_without_protocol_falls_back_to_a_sibling_and_then_to_nothing():
    rollouts = [
        rollout("a", protocol="plan a"),
        rollout("b", 1.0, (7, 8)),
        rollout("b", 0.0, (9,)),
        rollout("c", 0.0),
        rollout("pad", 1.0, protocol="x", is_padding=True),
    ]
    assert choose(rollouts, "protocol", "own_rollout") == [
        ("protocol", "plan a"),
        ("own_rollout", "7 8"),  # the group's only success reads itself
        ("own_rollout", "7 8"),
        ("none", None),
        ("none", None),
    ]
    assert choose(rollouts, "protocol")[1] == ("none", None)
    assert [name for name, _ in choose(rollouts, "none")] == ["none"] * 5


def test_a_ready_made_prompt_wins_over_the_text():
    ready = rollout("a", protocol="plan", protocol_prompt_ids=[4, 5])
    ((name, context),) = choose_contexts([ready], sources("protocol"))
    assert name == "protocol" and context.prompt_ids == [4, 5]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=10))
def test_own_rollouts_are_successes_of_the_group_and_others_where_possible(drawn):
    rollouts = [rollout(group, score, (i,)) for i, (group, score) in enumerate(drawn)]
    for i, (name, text) in enumerate(choose(rollouts, "own_rollout")):
        successes = {j for j, (group, score) in enumerate(drawn) if group == drawn[i][0] and score >= 1.0}
        if not successes:
            assert (name, text) == ("none", None)
            continue
        assert int(text) in successes
        if successes != {i}:
            assert int(text) != i


def test_shuffled_is_another_questions_protocol_the_same_for_the_whole_group():
    rollouts = [
        rollout("a", protocol="plan a"),
        rollout("b"),
        rollout("c", protocol="plan c"),
        rollout("a", protocol="plan a"),
    ]
    assert choose(rollouts, "shuffled") == [
        ("shuffled", "plan c"),
        ("shuffled", "plan c"),
        ("shuffled", "plan a"),
        ("shuffled", "plan c"),
    ]
    assert choose(rollouts[:1], "shuffled") == [("none", None)]


def test_shuffled_never_returns_to_the_same_question_asked_twice():
    twice = [
        Rollout(group="u1", question_id="q", score=0, protocol="plan"),
        Rollout(group="u2", question_id="q", score=0, protocol="plan"),
    ]
    assert choose(twice, "shuffled") == [("none", None)] * 2


def test_empty_is_a_context_and_answer_only_is_the_gold_answer():
    rollouts = [rollout("a", answer="Paris"), rollout("b")]
    assert choose(rollouts, "empty") == [("empty", "")] * 2
    assert choose(rollouts, "answer_only") == [("answer_only", "Answer: Paris"), ("none", None)]
