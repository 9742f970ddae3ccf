"""A protocol as the text that enters a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def template_names() -> list[str]:
    """The names of the shipped templates."""
    folder = resources.files(__package__).joinpath("templates")
    return sorted(entry.name.removesuffix(".j2") for entry in folder.iterdir() if entry.name.endswith(".j2"))


def _one_line(text: str) -> str:
    """White space runs as one space, so that a fact cannot break the layout of the lines."""
    return " ".join(text.split())


@lru_cache(maxsize=32)
def load_template(template: str) -> Template:
    """A shipped template by name, or a user's own by the path of a ``.j2`` file.

    Raises:
        ValueError: naming the template, if there is none such or if it cannot be parsed.
    """
    from jinja2 import Environment, StrictUndefined, TemplateSyntaxError

    if template.endswith(".j2"):
        path = Path(template)
        if not path.is_file():
            raise ValueError(f"protocol template {template}: no such file")
        source = path.read_text(encoding="utf-8")
    else:
        if template not in template_names():
            raise ValueError(f"protocol template {template!r}: unknown, choose from {template_names()} or a .j2 file")
        source = resources.files(__package__).joinpath(f"templates/{template}.j2").read_text(encoding="utf-8")
    # Plain text for a language model, not HTML: nothing is escaped.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["one_line"] = _one_line
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"protocol template {template}: line {error.lineno}: {error.message}") from error


def render(protocol: Mapping[str, Any], template: str = "default") -> str:
    """The prompt text of ``protocol``, without a newline at its end.

    Args:
        protocol: a valid protocol (see ``schema.py``).
        template: name of a shipped template, or the path of a ``.j2`` file. It sees the protocol's
            fields, those of the other variant as None, and the filter ``one_line``.

    Raises:
        ValueError: naming the template, if it is unknown, broken, or uses a field that does not exist.
    """
    from jinja2 import TemplateError

    fields = {"partial_findings": None, "answer": None, "answer_grounded": None, **protocol}
    try:
        return load_template(template).render(fields).rstrip("\n")
    except TemplateError as error:
        raise ValueError(f"protocol template {template}: {error}") from error
