"""A protocol as the text that enters a prompt, whole or under a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

#: The lists that a budget may shorten, in the order in which they go; each loses its last item first. Facts are the
#: longest and can be found again by searching; the plan is what the student is to learn; the answer is never dropped.
TRUNCATION_ORDER = ("grounding_facts", "trajectory", "reasoning_plan", "partial_findings")
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("reasoning_plan", "grounding_facts", "partial_findings", "trajectory", "answer", "answer_grounded")
)


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
            fields, those that its variant has not as None, and the filter ``one_line``.

    Raises:
        ValueError: naming the template, if it is unknown, broken, or uses a field that does not exist.
    """
    from jinja2 import TemplateError

    fields = {**_ABSENT, **protocol}
    try:
        return load_template(template).render(fields).rstrip("\n")
    except TemplateError as error:
        raise ValueError(f"protocol template {template}: {error}") from error


@dataclass(frozen=True)
class Rendered:
    """A protocol under a budget: its text, its length in tokens, and how many items of which part were left out."""

    text: str
    tokens: int
    dropped: dict[str, int]


def render_within(
    protocol: Mapping[str, Any], template: str, count_tokens: Callable[[str], int], max_tokens: int
) -> Rendered | None:
    """The prompt text of ``protocol`` in at most ``max_tokens`` tokens; None if not even its core fits.

    Whole items are left out, never a part of one, in :data:`TRUNCATION_ORDER`. What the template always writes (the
    answer among it) is the core.

    Args:
        count_tokens: length of a text in the tokens of the model that will read it.

    Raises:
        ValueError: as :func:`render`, and for ``max_tokens`` below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    lengths = {part: len(protocol.get(part) or ()) for part in TRUNCATION_ORDER}

    def without(count: int) -> Rendered:
        """The protocol without the first ``count`` items to go."""
        shorter, dropped = dict(protocol), {}
        for part, length in lengths.items():
            gone = min(count, length)
            count -= gone
            if gone:
                dropped[part] = gone
                shorter[part] = protocol[part][: length - gone]
        text = render(shorter, template)
        return Rendered(text, count_tokens(text), dropped)

    whole = without(0)
    if whole.tokens <= max_tokens:
        return whole
    # The shortest cut that fits, by bisection: a longer cut is a shorter text, but for a token more or less at a seam.
    low, high = 1, sum(lengths.values())
    best: Rendered | None = None
    while low <= high:
        middle = (low + high) // 2
        tried = without(middle)
        if tried.tokens <= max_tokens:
            best, high = tried, middle - 1
        else:
            low = middle + 1
    return best
