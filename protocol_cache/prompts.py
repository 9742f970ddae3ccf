"""The role prompts: files, versioned by folder and by the hash of their text."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

DEFAULT_VERSION = "v1"
ROLES = (
    "orchestrator_decompose",
    "orchestrator_synthesize",
    "searcher",
    "repair",
    "protocolizer",
    "reask",
)


class Prompts:
    """One set of role prompts, from the package (``v1``) or from a user's folder with the same file names.

    Raises:
        ValueError: naming the folder or file that is missing.
    """

    def __init__(self, source: str | Path = DEFAULT_VERSION) -> None:
        self.name = Path(source).name
        shipped = resources.files(__package__).joinpath("prompts")
        names = sorted(entry.name for entry in shipped.iterdir() if entry.is_dir())
        folder = shipped.joinpath(str(source)) if str(source) in names else Path(source)
        if not folder.is_dir():
            raise ValueError(f"prompts {source}: no such folder, and no shipped version ({', '.join(names)})")
        self._texts: dict[str, str] = {}
        for role in ROLES:
            file = folder.joinpath(f"{role}.j2")
            if not file.is_file():
                raise ValueError(f"prompts {source}: {role}.j2 is missing")
            self._texts[role] = file.read_text(encoding="utf-8").strip()
        self._compiled: dict[str, Any] = {}

    @cached_property
    def version(self) -> str:
        """The folder's name and eight hex digits over all texts: a changed word is a new version."""
        return f"{self.name}-{hashlib.sha256(json.dumps(self._texts, sort_keys=True).encode()).hexdigest()[:8]}"

    def system(self, role: str, **values: Any) -> str:
        """The system message of a role.

        Raises:
            ValueError: the prompt uses a value that the role has not.
        """
        from jinja2 import Environment, StrictUndefined, TemplateError

        try:
            if role not in self._compiled:
                environment = Environment(undefined=StrictUndefined, autoescape=False)
                self._compiled[role] = environment.from_string(self._texts[role])
            return self._compiled[role].render(values)
        except TemplateError as error:
            raise ValueError(f"prompt {self.name}/{role}.j2: {error}") from error


def user_message(inputs: dict[str, Any]) -> str:
    """The user message of every role: its inputs as one fenced JSON block.

    Line breaks inside JSON strings are escaped, so no passage can close the fence.
    """
    return f"Input:\n```json\n{json.dumps(inputs, ensure_ascii=False, indent=1)}\n```\n\nYour JSON reply:"
