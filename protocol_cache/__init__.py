"""Protocols: their schema, text, cache and synthesis. Reading a cache needs neither LiteLLM nor torch."""

from protocol_cache.question_id import question_id
from protocol_cache.render import render
from protocol_cache.schema import SCHEMA_VERSION, ProtocolError, validate_protocol
from protocol_cache.store import ProtocolStore, Provenance, Record, StoreError, Usage

__all__ = [
    "SCHEMA_VERSION",
    "ProtocolError",
    "ProtocolStore",
    "Provenance",
    "Record",
    "StoreError",
    "Usage",
    "question_id",
    "render",
    "validate_protocol",
]
