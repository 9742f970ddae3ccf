import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl.privilege import privileged_messages, privileged_prompt_ids, truncate_context

from .harness import make_tokenizer

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is {x} of 東京?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def plain(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("context", ["", None])
def test_an_empty_context_is_the_students_prompt_id_for_id(tokenizer, context):
    assert privileged_prompt_ids(tokenizer, QUESTION, context) == plain(tokenizer, QUESTION)


def test_the_context_ends_the_last_user_message(tokenizer):
    ids = privileged_prompt_ids(tokenizer, QUESTION, "Plan: {a}", template="\n\nHint: {context}.")
    changed = [QUESTION[0], {"role": "user", "content": QUESTION[1]["content"] + "\n\nHint: Plan: {a}."}]
    assert ids == plain(tokenizer, changed)


def test_the_input_is_not_modified():
    messages = [dict(m) for m in QUESTION]
    privileged_messages(messages, "z", "{context}")
    assert messages == QUESTION


@settings(max_examples=60, deadline=None)
@given(context=st.text(min_size=1, max_size=60), limit=st.integers(1, 30))
def test_only_the_contexts_end_is_cut(context, limit):
    tokenizer = make_tokenizer_once()
    cut = truncate_context(tokenizer, context, limit)
    ids = tokenizer.encode(context, add_special_tokens=False)
    if len(ids) <= limit:
        assert cut == context
    else:
        # A character split by the cut is dropped; one that was U+FFFD in the source may go with it.
        assert context.startswith(cut.rstrip("\ufffd"))
        assert len(cut) < len(context)
    prompt = tokenizer.decode(privileged_prompt_ids(tokenizer, QUESTION, context, max_context_tokens=limit))
    assert QUESTION[1]["content"] in prompt


_TOKENIZERS: list = []


def make_tokenizer_once():
    if not _TOKENIZERS:
        _TOKENIZERS.append(make_tokenizer())
    return _TOKENIZERS[0]


def test_bad_input_is_named(tokenizer):
    with pytest.raises(ValueError, match="max_context_tokens"):
        truncate_context(tokenizer, "x", 0)
    with pytest.raises(ValueError, match="user message to join"):
        privileged_messages([{"role": "system", "content": "s"}], "z", "{context}")
    with pytest.raises(ValueError, match="plain text"):
        privileged_messages([{"role": "user", "content": [{"type": "image"}]}], "z", "{context}")
    with pytest.raises(ValueError, match=r"\{context\}"):
        privileged_messages(QUESTION, "z", "no place")
