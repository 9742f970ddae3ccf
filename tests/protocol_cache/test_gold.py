"""By construction: which lines of the package can open the gold answer, and what opens none."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import protocol_cache
from protocol_cache.synthesis.state import Gold

ROOT = Path(protocol_cache.__file__).parent


def test_only_the_repair_agent_opens_it_and_only_its_own_class_looks_inside() -> None:
    opened, inside = set(), set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if name == "reveal_to":
                opened.add(file.relative_to(ROOT).as_posix())
            if name == "_answers":
                inside.add(file.relative_to(ROOT).as_posix())
    assert opened == {"synthesis/repair.py"}
    assert inside == {"synthesis/state.py"}


@given(st.text(min_size=1).filter(str.strip))
def test_no_way_of_writing_it_down_shows_it(answer: str) -> None:
    marked = f"xyzzy{answer}"
    gold = Gold([marked])
    for text in (repr(gold), str(gold), f"{gold}", f"{[gold]}", "%s" % gold, "{!r:>40}".format(gold)):  # noqa: UP031, UP032
        assert "xyzzy" not in text
    for write in (json.dumps, copy.deepcopy, dict, list, vars):
        with pytest.raises(TypeError):
            write(gold)  # type: ignore[operator]
    with pytest.raises(TypeError):
        json.dumps({"gold": gold})
