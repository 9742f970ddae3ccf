"""The privileged prompt: the student's messages with a context at the end of the last user message.

The agent loop (protocols, known before the rollout) and the trainer (own rollouts, known only after the
rewards) both build it here, so the two can't drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: How a context joins the user message when a recipe says nothing.
DEFAULT_TEMPLATE = "\n\n{context}"


def truncate_context(tokenizer: Any, context: str, max_tokens: int) -> str:
    """The longest prefix of ``context`` that has at most ``max_tokens`` tokens.

    The end is what is lost: a protocol starts with its plan, a rollout with its first search. A character
    that the cut splits is dropped.

    Raises:
        ValueError: if ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_context_tokens must be at least 1, got {max_tokens}")
    ids = tokenizer.encode(context, add_special_tokens=False)
    if len(ids) <= max_tokens:
        return context
    return tokenizer.decode(ids[:max_tokens], skip_special_tokens=False).rstrip("\ufffd")


def privileged_messages(messages: Sequence[Mapping[str, Any]], context: str, template: str) -> list[dict[str, Any]]:
    """``messages`` with ``context`` appended to the last user message; equal to ``messages`` if it is empty.

    The input is not modified.

    Raises:
        ValueError: if there is no user message with text, or the template lacks ``{context}``.
    """
    copied = [dict(message) for message in messages]
    if not context:
        return copied
    if "{context}" not in template:
        raise ValueError(f"privileged template must hold {{context}}, got {template!r}")
    for message in reversed(copied):
        if message.get("role") == "user":
            if not isinstance(message.get("content"), str):
                raise ValueError("the last user message must be plain text to take a privileged context")
            # Not str.format: a context may hold braces of its own.
            message["content"] += template.replace("{context}", context)
            return copied
    raise ValueError("a privileged context needs a user message to join")


def privileged_prompt_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    context: str | None,
    template: str = DEFAULT_TEMPLATE,
    max_context_tokens: int = 512,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the teacher's prompt, generation prompt included.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the student's chat messages.
        context: the privileged text ``z``; empty or None gives the student's own prompt, id for id.
        template: how the context joins the user message.
        max_context_tokens: the context alone is cut to this many tokens (its end goes); the question and
            everything else of the prompt is never cut.
        apply_chat_template_kwargs: as in verl's ``data.apply_chat_template_kwargs``.

    Returns:
        ids, ``[T_teacher]``.

    Raises:
        ValueError: see :func:`truncate_context` and :func:`privileged_messages`.
    """
    text = truncate_context(tokenizer, context, max_context_tokens) if context else ""
    return list(
        tokenizer.apply_chat_template(
            privileged_messages(messages, text, template),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **(apply_chat_template_kwargs or {}),
        )
    )
