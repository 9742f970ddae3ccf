"""Argument types."""

from __future__ import annotations

import argparse
from typing import Any


def at_least(least: int) -> Any:
    """A whole number no smaller than ``least``."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    read.__name__ = "whole number"
    return read


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value
