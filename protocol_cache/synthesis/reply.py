"""From what a model wrote to one checked JSON object, or to the sentence that asks it again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from protocol_cache.schema import first_error

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_SHOWN = 120
_MAX_DEPTH = 50


def parse_reply(content: str | None, finish_reason: str | None) -> tuple[dict[str, Any] | None, str | None]:
    """The JSON object in a model's reply, as ``(object, None)``, or ``(None, problem)``.

    Text around the object and broken JSON are mended by ``json_repair``, but not where the reply was cut
    off by the token limit: what is missing there would be guessed.
    """
    text = (content or "").strip()
    if not text:
        return None, "the reply was empty"
    if _depth(text) > _MAX_DEPTH:  # the parsers would exhaust the stack, and the whole run with it
        return None, f"the reply is nested more than {_MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except ValueError:
        if finish_reason == "length":
            return None, "the reply was cut off by the token limit; be shorter"
        value = _mend(text)
    if not isinstance(value, dict):
        shown = " ".join(text.split())
        return None, f"no JSON object in the reply {shown[:_SHOWN]!r}{'...' if len(shown) > _SHOWN else ''}"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "the reply holds half of a surrogate pair, which no later request could carry"
    return value, None


def _depth(text: str) -> int:
    """The most brackets open at once; those inside of strings count too, which errs on the safe side."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth = max(0, depth - 1)
    return deepest


def _mend(text: str) -> Any:
    from json_repair import repair_json

    begin = text.find("{")
    if begin < 0:
        return None  # a refusal or a remark: json_repair would make something of it
    value = repair_json(text[begin:], return_objects=True)
    if isinstance(value, list):  # remarks after the object, read as further items
        value = next((item for item in value if isinstance(item, dict)), None)
    return value


def reply_problem(value: dict[str, Any], validator: Validator) -> str | None:
    """Why the object does not fit its role's schema, as ``field: message``; None if it does."""
    return first_error(validator, value)
