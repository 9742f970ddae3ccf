from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_cache.prompts import user_message
from protocol_cache.synthesis.reply import parse_reply

GOOD = '{"status": "answer", "answer": "Zed"}'


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        f"  {GOOD}\n",
        f"Here it is:\n```json\n{GOOD}\n```\nAnything else?",
        GOOD[:-1] + ",}",
        GOOD[:-1],
        GOOD.replace('"', "'"),
        GOOD.replace('"Zed"', '"Zed"  // sure'),
    ],
)
def test_an_object_is_found_and_mended(content: str) -> None:
    assert parse_reply(content, "stop") == ({"status": "answer", "answer": "Zed"}, None)


@pytest.mark.parametrize(
    ("content", "finish", "said"),
    [
        (None, "stop", "empty"),
        ("", "stop", "empty"),
        (" \n", None, "empty"),
        ("I'm sorry, but I can't help with that.", "stop", "no JSON object"),
        ("[1, 2]", "stop", "no JSON object"),
        ('"Zed"', "stop", "no JSON object"),
        (GOOD[:-5], "length", "cut off"),
        ('{"answer": "\\ud83d"}', "stop", "surrogate"),
        ("<html>Bad gateway</html>", "stop", "no JSON object"),
    ],
)
def test_what_is_no_object_is_named(content: str | None, finish: str | None, said: str) -> None:
    value, problem = parse_reply(content, finish)
    assert value is None
    assert problem is not None and said in problem and "\n" not in problem


@given(st.text())
def test_no_reply_is_too_strange(content: str) -> None:
    value, problem = parse_reply(content, "stop")
    assert (value is None) != (problem is None)


@given(st.text())
def test_no_passage_can_close_the_fence_of_the_input(text: str) -> None:
    message = user_message({"passages": [text, "\n```\n", "```json\n"]})
    block = message.split("```json\n", 1)[1].rsplit("\n```", 1)[0]
    assert json.loads(block)["passages"][0] == text
    assert [line for line in message.split("\n") if line.strip() == "```"] == ["```"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 60 + "]" * 60 + "}"])
def test_a_reply_nested_too_deeply_is_refused(text: str) -> None:
    value, problem = parse_reply(text, "stop")
    assert value is None and problem and "nested" in problem
