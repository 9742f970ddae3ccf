"""Privileged contexts: question -> context ``z`` that the teacher reads and the student does not.

One file per source; a recipe names one and a fallback. Adding a source adds a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mapd_verl.privilege.answer_only import AnswerOnly
from mapd_verl.privilege.base import Context, Rollout, Source
from mapd_verl.privilege.empty import Empty
from mapd_verl.privilege.none import NoSource
from mapd_verl.privilege.own_rollout import OwnRollout
from mapd_verl.privilege.prompt import privileged_messages, privileged_prompt_ids, truncate_context
from mapd_verl.privilege.protocol import Protocol
from mapd_verl.privilege.shuffled import Shuffled

#: By the name that a recipe uses, and by the number that travels in the batch (``none`` is 0).
SOURCES: dict[str, type[Source]] = {
    source.name: source for source in (NoSource, Protocol, OwnRollout, Empty, Shuffled, AnswerOnly)
}
SOURCE_IDS: dict[str, int] = {name: number for number, name in enumerate(SOURCES)}


def choose_contexts(
    rollouts: Sequence[Rollout], sources: Sequence[Source]
) -> list[tuple[str, Context] | tuple[str, None]]:
    """For each rollout the first source that has a context for it, as ``(name of the source, context)``.

    Padding rollouts and those for which no source has anything get ``("none", None)``: they carry no
    distillation term.
    """
    chosen: list[tuple[str, Context] | tuple[str, None]] = []
    for index, rollout in enumerate(rollouts):
        picked: tuple[str, Context] | tuple[str, None] = (NoSource.name, None)
        for source in () if rollout.is_padding else sources:
            context = source.context(index, rollouts)
            if context is not None:
                picked = (source.name, context)
                break
        chosen.append(picked)
    return chosen


def make_source(name: str, decode: Callable[[Sequence[int]], str], success_score: float) -> Source:
    """The source called ``name``.

    Args:
        decode: response ids -> text; only ``own_rollout`` calls it, and only for rollouts it hands out.
        success_score: reward from which a rollout counts as successful.

    Raises:
        KeyError: no such source.
    """
    if name == OwnRollout.name:
        return OwnRollout(decode, success_score)
    return SOURCES[name]()


__all__ = [
    "SOURCES",
    "SOURCE_IDS",
    "AnswerOnly",
    "Context",
    "Empty",
    "NoSource",
    "OwnRollout",
    "Protocol",
    "Rollout",
    "Shuffled",
    "Source",
    "choose_contexts",
    "make_source",
    "privileged_messages",
    "privileged_prompt_ids",
    "truncate_context",
]
