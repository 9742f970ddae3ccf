"""The protocol's JSON Schema: the file is the definition, this module compiles it once."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

SCHEMA_VERSION = "1"
#: What a protocolizer writes, and what the ablations put in its place.
VARIANTS = ("succeeded", "evidence")
CONTROL_VARIANTS = ("raw", "answer_only")
TASK_TYPES = ("single_hop", "multi_hop", "comparison", "others")


class ProtocolError(ValueError):
    """A protocol that does not fit the schema; the message names the field."""


@lru_cache(maxsize=1)
def protocol_schema() -> dict[str, Any]:
    """The JSON Schema of a protocol, as a dict (shared: don't change it)."""
    text = resources.files(__package__).joinpath(f"schemas/protocol.v{SCHEMA_VERSION}.json").read_text(encoding="utf-8")
    return json.loads(text)


@lru_cache(maxsize=1)
def _validator() -> Validator:
    return compile_schema(protocol_schema())


def compile_schema(schema: dict[str, Any]) -> Validator:
    """A validator for ``schema``, itself checked first. Needs the ``jsonschema`` package."""
    from jsonschema import Draft202012Validator  # readers of a cache don't need it

    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def first_error(validator: Validator, instance: Any) -> str | None:
    """The most telling violation as ``field: message`` in one line; None if ``instance`` is valid."""
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(instance))
    if error is None:
        return None
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path).lstrip(".")
    message = " ".join(error.message.split())
    if len(message) > 300:
        message = message[:300] + "..."
    return f"{where or 'top level'}: {message}"


def schema_error(protocol: Any) -> str | None:
    """Why ``protocol`` does not fit the schema, in one line, or None if it does."""
    if isinstance(protocol, dict) and isinstance(protocol.get("variant"), str):
        # oneOf would report "not valid under any": the variant says which branch is meant.
        variant = protocol["variant"]
        branch = next((b for b in protocol_schema()["oneOf"] if b["title"] == variant), None)
        for field in branch["required"] if branch else ():
            if field not in protocol:
                return f"{field}: missing, a {variant} protocol needs it"
        for field, rule in branch["properties"].items() if branch else ():
            if rule is False and field in protocol:
                return f"{field}: not allowed in a {variant} protocol"
        if variant == "succeeded" and protocol.get("grounding_facts") == []:
            return "grounding_facts: a succeeded protocol needs at least one"
    return first_error(_validator(), protocol)


@lru_cache(maxsize=len(VARIANTS))
def _draft_validator(variant: str) -> Validator:
    """The schema of what a protocolizer writes: a protocol without what the program itself adds."""
    schema = copy.deepcopy(protocol_schema())
    branch = next(b for b in schema.pop("oneOf") if b["title"] == variant)
    for name in ("schema_version", "variant"):
        del schema["properties"][name]
        schema["required"].remove(name)
    fact = schema["properties"]["grounding_facts"]["items"]
    for name in ("start", "end"):
        del fact["properties"][name]
        fact["required"].remove(name)
    for name, rule in branch["properties"].items():
        if rule is False:
            del schema["properties"][name]
        elif name in schema["properties"]:
            schema["properties"][name].update(rule)
    schema["required"] += branch["required"]
    del schema["$id"]
    return compile_schema(schema)


def draft_error(draft: Any, variant: str) -> str | None:
    """Why a protocolizer's draft does not fit ``variant``, in one line, or None if it does.

    A draft is a protocol without ``schema_version``, ``variant`` and the spans of its facts.

    Raises:
        ValueError: an unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    return first_error(_draft_validator(variant), draft)


def validate_protocol(protocol: Any) -> dict[str, Any]:
    """Returns ``protocol`` if it fits the schema.

    Raises:
        ProtocolError: naming the first offending field.
    """
    problem = schema_error(protocol)
    if problem:
        raise ProtocolError(problem)
    return protocol
