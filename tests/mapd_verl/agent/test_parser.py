"""Actions as Search-R1 reads them, and cuts that keep sampled tokens as they are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapd_verl.agent.parser import TurnReader, is_closed, parse

PIECES = st.lists(
    st.sampled_from(
        ["<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", " a", "Paris", "\n", "<", "ü", "北"]
    ),
    max_size=12,
)


def reference(text: str) -> tuple[str, str]:
    """Search-R1's rule, applied to a whole turn sampled without stops."""
    for tag in ("</search>", "</answer>"):
        if tag in text:
            text = text.split(tag)[0] + tag
            break
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    return (found.group(1), found.group(2).strip()) if found else ("none", "")


@given(PIECES)
def test_compat_equals_the_reference_however_early_sampling_stops(pieces):
    text = "".join(pieces)
    sampled = ""
    for piece in pieces:  # stop as soon as the turn is closed, as run_episode does at closing tags
        sampled += piece
        if piece in ("</search>", "</answer>") and is_closed(sampled):
            break
    action = parse(sampled)
    assert (action.kind, action.text) == reference(text)
    # What is kept decides the action by itself, and nothing follows its closing tag.
    again = parse(sampled[: action.cut])
    assert (again.kind, again.text, again.cut) == (action.kind, action.text, action.cut)
    if action.kind != "none":
        assert sampled[: action.cut].endswith((f"</{action.kind}>", "</search>"))


@pytest.mark.parametrize(
    ("text", "kind", "content", "flag"),
    [
        ("<search> Rome</search><search> Oslo</search>", "search", "Rome", None),
        ("<search> a <answer> Paris</answer>", "answer", "Paris", "unclosed_search"),
        ("a</search><answer> Paris</answer>", "none", "", "stray_close"),
        ("I should use <search> and </search>", "search", "and", "stop_word_query"),
        ("<search></search>", "search", "", "empty_query"),
        ("<search> \n </search>", "search", "", "empty_query"),
        ("<SEARCH> a</SEARCH>", "none", "", "unknown_tag"),
        ('<search lang="en"> a</search>', "none", "", "unknown_tag"),
        ("< search > a</search>", "none", "", "unknown_tag"),
        ("<search> what is <answer> for</search>", "search", "what is <answer> for", "nested_tag"),
        ("<search> a <answer> b</answer> c</search>", "search", "a <answer> b</answer> c", "nested_tag"),
        ("<answer>Paris", "none", "", "unclosed_answer"),
        ("<answer> </answer>", "answer", "", "empty_answer"),
        ("<think> a<search> b</search>", "search", "b", "unbalanced_think"),
        ("<information>x</information><answer> y</answer>", "answer", "y", "invented_information"),
        ("<think> a</think><answer> Paris</answer>", "answer", "Paris", None),
    ],
)
def test_hard_turns(text, kind, content, flag):
    action = parse(text)
    assert (action.kind, action.text) == (kind, content)
    assert (flag in action.malformed) if flag else action.malformed == ()


def test_strict_answers_after_a_stray_closing_tag():
    action = parse("a</search><answer> Paris</answer>", "strict")
    assert (action.kind, action.text) == ("answer", "Paris") and "stray_close" in action.malformed


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="lenient"):
        parse("a", "lenient")


@given(PIECES, st.lists(st.sampled_from(["</search>", " b", "é", "京"]), max_size=4))
@pytest.mark.parametrize("name", ["tagged", "untagged"])
def test_cut_is_the_smallest_prefix_that_holds_the_text(name, tagged, untagged, pieces, tail):
    reader = TurnReader(tokenizer := {"tagged": tagged, "untagged": untagged}[name])
    ids = tokenizer.encode("".join(pieces + tail), add_special_tokens=False)
    text = reader.decode(ids)
    assert text == "".join(pieces + tail)
    action = parse(text)
    keep = reader.prefix_length(ids, text, action.cut)
    assert reader.decode(ids[:keep]).startswith(text[: action.cut])
    if keep:
        assert not reader.decode(ids[: keep - 1]).startswith(text[: action.cut])
    first, last = reader.content_span(ids, text, action)
    content = reader.decode(ids[first:last])
    # Only content, and all of it but what shares a token with a tag.
    assert content.strip("\ufffd") in text[action.start : action.end]
    if name == "tagged":
        assert content == text[action.start : action.end]


def test_stop_tokens_need_single_token_tags(tagged, untagged):
    assert TurnReader(untagged).stop_token_ids == ()
    reader = TurnReader(tagged)
    assert [tagged.decode([i]) for i in reader.stop_token_ids] == ["</search>", "</answer>"]


def test_special_tokens_have_no_text_but_tags_do(tagged):
    ids = tagged.encode("<search> a</search><|im_end|>", add_special_tokens=False)
    assert TurnReader(tagged).decode(ids) == "<search> a</search>"
