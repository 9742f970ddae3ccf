"""The teacher client against real HTTP: what is retried, what is asked again, what ends the question or the run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hostile import HostileTeacher, Responder

from protocol_cache.prompts import Prompts
from protocol_cache.schema import compile_schema
from protocol_cache.synthesis.llm import (
    Account,
    Teacher,
    TeacherConfig,
    TeacherError,
    TeacherUnreachable,
    TeacherUnusable,
)

pytestmark = pytest.mark.e2e  # importing LiteLLM takes seconds

SCHEMA = compile_schema({"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]})
GOOD = '{"kind": "a"}'


def ask(respond: Responder, **config: Any) -> tuple[Any, HostileTeacher, Account]:
    """The reply, or the error, and what the server saw."""
    account = Account()
    with HostileTeacher(respond) as server:

        async def run() -> Any:
            settings = {"model": "openai/m", "api_base": server.url, "backoff": 0.01, "retries": 2, "timeout": 5.0}
            teacher = Teacher(TeacherConfig(**{**settings, **config}), Prompts())
            try:
                return await teacher.ask("repair", {"x": 1}, SCHEMA, account)
            except (TeacherError, TeacherUnusable) as error:
                return error
            finally:
                await teacher.close()

        return asyncio.run(run()), server, account


def once_then(first: Any, then: Any = GOOD) -> Responder:
    replies = iter([first])
    return lambda asked: next(replies, then)


def test_a_good_reply_costs_one_call() -> None:
    reply, server, account = ask(lambda asked: GOOD, prices=(2.0, 10.0))
    assert reply == {"kind": "a"}
    assert len(server.asked) == 1
    assert (account.calls, account.prompt_tokens, account.completion_tokens) == (1, 100, 10)
    assert account.cost_usd == pytest.approx((100 * 2 + 10 * 10) / 1e6)


@pytest.mark.parametrize(("mode", "sent"), [(None, False), (False, False), (True, True)])
def test_the_schema_goes_along_where_the_provider_takes_one(mode: bool | None, sent: bool) -> None:
    """A server of one's own isn't asked for it unless told so; what comes back is checked in any case."""
    reply, server, _ = ask(once_then('{"kind": "c"}'), schema_mode=mode)
    assert reply == {"kind": "a"} and len(server.asked) == 2
    for asked in server.asked:
        if not sent:
            assert asked.response_format is None
            continue
        assert asked.response_format["type"] == "json_schema"
        assert asked.response_format["json_schema"]["schema"] == SCHEMA.schema


def test_a_known_provider_is_asked_for_the_schema_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    assert Teacher(TeacherConfig(model="openai/gpt-4o-mini"), Prompts())._schema_mode is True


def test_an_unknown_price_is_not_a_price_of_nothing() -> None:
    assert ask(lambda asked: GOOD)[2].cost_usd is None


def test_a_known_model_has_litellms_price() -> None:
    account = ask(lambda asked: GOOD, model="openai/gpt-4o-mini")[2]
    assert account.cost_usd is not None and account.cost_usd > 0


@pytest.mark.parametrize("bad", ["", None, "I can't help with that.", '{"kind": "c"}', "[]", '{"other": 1}'])
def test_an_unusable_reply_is_asked_again_with_the_reason(bad: str | None) -> None:
    reply, server, account = ask(once_then(bad))
    assert reply == {"kind": "a"} and account.calls == 2
    again = server.asked[1].messages
    assert [m["role"] for m in again] == ["system", "user", "assistant", "user"]
    assert again[:2] == server.asked[0].messages
    assert "could not be used" in again[3]["content"]


@pytest.mark.parametrize("bad", ["", "no", '{"kind": "c"}'])
def test_asking_again_has_an_end(bad: str) -> None:
    error, server, account = ask(lambda asked: bad, reasks=2)
    assert type(error) is TeacherError and "repair" in str(error) and "3 replies" in str(error)
    assert len(server.asked) == account.calls == 3
    assert all(len(asked.messages) <= 4 for asked in server.asked)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_passing_fault_is_tried_again(status: int) -> None:
    reply, server, account = ask(once_then((status, b'{"error": {"message": "later"}}')))
    assert reply == {"kind": "a"}
    assert len(server.asked) == 2 and account.calls == 1


@pytest.mark.parametrize("body", [b"<html>oops</html>", b"", b'{"object": "chat.completion"}'])
def test_a_body_that_is_no_completion_is_tried_again(body: bytes) -> None:
    reply, server, _ = ask(once_then((200, body)))
    assert reply == {"kind": "a"} and len(server.asked) == 2


def test_trying_again_has_an_end_and_happens_in_one_place() -> None:
    error, server, account = ask(lambda asked: (500, b"{}"), retries=2)
    assert type(error) is TeacherUnreachable and "3 tries" in str(error)
    assert len(server.asked) == 3  # LiteLLM and its client add none of their own
    assert account.calls == 0


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_what_no_question_can_get_past_ends_the_run_at_once(status: int) -> None:
    error, server, _ = ask(lambda asked: (status, b'{"error": {"message": "no such thing"}}'))
    assert type(error) is TeacherUnusable and "openai/m" in str(error) and "\n" not in str(error)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_ends_the_question_only(status: int) -> None:
    error, server, _ = ask(lambda asked: (status, b'{"error": {"message": "content policy"}}'))
    assert type(error) is TeacherError
    assert len(server.asked) <= 2  # LiteLLM itself asks again once after a 422


def test_an_empty_list_of_choices_is_an_empty_reply() -> None:
    empty = json.dumps({"id": "c", "object": "chat.completion", "choices": []}).encode()
    assert ask(once_then((200, empty)))[0] == {"kind": "a"}


def test_a_hanging_server_meets_our_timeout() -> None:
    import time

    def hang(asked: Any) -> str:
        time.sleep(1.5)
        return GOOD

    began = time.monotonic()
    error, *_ = ask(hang, timeout=0.3, retries=1)
    assert type(error) is TeacherUnreachable
    assert time.monotonic() - began < 20


def test_a_model_without_provider_is_named() -> None:
    error, server, _ = ask(lambda asked: GOOD, model="some-model")
    assert type(error) is TeacherUnusable and "openai/NAME" in str(error)
    assert not server.asked


def test_a_key_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    error, *_ = _construct(api_key_env="NO_SUCH_KEY")
    assert type(error) is TeacherUnusable and "NO_SUCH_KEY" in str(error)


def _construct(**config: Any) -> tuple[Any, Any, Any]:
    try:
        Teacher(TeacherConfig(model="openai/m", **config), Prompts())
    except TeacherUnusable as error:
        return error, None, None
    raise AssertionError("it was made")


def test_a_local_server_never_gets_the_users_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "real-key")
    teacher = Teacher(TeacherConfig(model="openai/m", api_base="http://127.0.0.1:9/v1"), Prompts())
    assert teacher._options["api_key"] == "unused"
    assert "api_key" not in Teacher(TeacherConfig(model="openai/m", api_base="https://x.org/v1"), Prompts())._options
