"""Exact match of the final answer, 0 or 1, from what the policy itself wrote.

An answer is the content of an answer *action* (``parser.py``): text in the prompt, in an observation, or
inside a search query can never score. Normalisation is Search-R1's by default (``compat``), so that
published EM stays comparable; ``strict`` is opt-in.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from protocol_cache.normalize import exact_match as compat_exact_match
from protocol_cache.normalize import normalize_answer as compat_normal_form

if TYPE_CHECKING:
    from mapd_verl.agent.episode import Episode

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

# strict: what stays of punctuation is what tells two answers apart.
_QUOTES = str.maketrans("‘’‚‛′`“”„‟″", "''''''\"\"\"\"\"")
_DASHES = str.maketrans("‐‑‒–—―−﹣－", "---------")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_KEPT = re.compile(
    r"(?<![^\s$€£¥(])-(?=[$€£¥]?\d)"  # a sign
    r"|(?<=\d)[.,](?=\d)"  # a decimal separator
    r"|(?<=[^\W\d_])(?:\+{1,2}|#)(?![^\W_])"  # C++, C#, A+
)


def strict_normal_form(text: str) -> str:
    """NFKC, case folded, Unicode punctuation deleted but for signs, decimals and ``C++``/``C#``, articles removed."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_QUOTES).translate(_DASHES)
    text = _THOUSANDS.sub("", text)
    kept = {i for match in _KEPT.finditer(text) for i in range(*match.span())}
    bare = "".join(c for i, c in enumerate(text) if i in kept or not _is_punctuation(c))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def _is_punctuation(character: str) -> bool:
    # ASCII symbols such as + and $ are punctuation to Search-R1; other symbols (€, °) are not.
    return unicodedata.category(character).startswith("P") or (
        character.isascii() and not character.isalnum() and not character.isspace()
    )


def exact_match(prediction: str, targets: Iterable[str], mode: str = "compat") -> bool:
    """Whether ``prediction`` equals a target in normal form. An empty normal form matches nothing by itself."""
    if mode == "compat":
        return compat_exact_match(prediction, targets)
    normal, raw = strict_normal_form(prediction), prediction.strip().casefold()
    return any(
        (normal == strict_normal_form(target)) if normal else bool(raw) and raw == target.strip().casefold()
        for target in targets
    )


def sub_exact_match(prediction: str, targets: Iterable[str], mode: str = "compat") -> bool:
    """Whether a target's normal form occurs in the prediction's; in ``strict`` only between word borders."""
    form = _normal_form(mode)
    normal = form(prediction)
    for target in targets:
        wanted = form(target)
        if not wanted:
            continue
        if wanted in normal if mode == "compat" else re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", normal):
            return True
    return False


def f1(prediction: str, targets: Iterable[str], mode: str = "compat") -> float:
    """Best word-overlap F1 of the prediction with any target, 0..1."""
    form = _normal_form(mode)
    words = form(prediction).split()
    best = 0.0
    for target in targets:
        wanted = form(target).split()
        common = sum(min(words.count(w), wanted.count(w)) for w in set(words))
        if common:
            precision, recall = common / len(words), common / len(wanted)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def _normal_form(mode: str) -> Callable[[str], str]:
    if mode not in ("compat", "strict"):
        raise ValueError(f"reward mode: want compat or strict, got {mode!r}")
    return compat_normal_form if mode == "compat" else strict_normal_form


def coerce_targets(value: Any, where: str) -> list[str]:
    """Gold answers as a list of text, whatever form a parquet file gave them.

    Text, lists, arrays (0-d too) and numbers are taken; equal answers give equal lists.

    Raises:
        ValueError: naming ``where``, for None, no answer at all, a truth value, NaN, or an answer without a
            letter or digit (it could only be matched by an empty prediction).
    """
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        value = value.tolist()
    items = list(value) if isinstance(value, list | tuple | set) else [value]
    if not items:
        raise ValueError(f"{where}: no gold answer")
    return [_coerce_target(item, where) for item in items]


def _coerce_target(item: Any, where: str) -> str:
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(f"{where}: gold answer must be text or a number, got {item!r}")
    if isinstance(item, float):
        if item != item or item in (float("inf"), float("-inf")):
            raise ValueError(f"{where}: gold answer is {item!r}")
        item = int(item) if item.is_integer() else item  # a column of ints with gaps is read as floats
    text = str(item)
    if not any(c.isalnum() for c in text):
        raise ValueError(f"{where}: gold answer {text!r} has no letter or digit")
    return text


def score(episode: Episode, targets: Sequence[str], mode: str = "compat") -> float:
    """1.0 if the episode's final answer matches a target, else 0.0.

    Raises:
        ValueError: for an episode that is excluded (its retrieval failed): it has no score, not a score of 0.
    """
    if episode.excluded:
        raise ValueError(f"an episode with status {episode.status!r} has no score: leave it out")
    return float(episode.answer is not None and exact_match(episode.answer, targets, mode))


def last_answer(policy_text: str) -> str | None:
    """The last complete answer of a text that only the policy wrote, stripped; None if there is none."""
    found = _ANSWER.findall(policy_text)
    return found[-1].strip() if found else None


def answer_flags(policy_text: str) -> tuple[str, ...]:
    """What is odd about the answers of a text: several, more than 10 (spam), or cut off."""
    flags = []
    complete, opened = len(_ANSWER.findall(policy_text)), policy_text.count("<answer>")
    if complete > 1:
        flags.append("several_answers")
    if max(opened, policy_text.count("</answer>")) > 10:
        flags.append("tag_spam")
    if policy_text.rfind("<answer>") > policy_text.rfind("</answer>"):
        flags.append("truncated_answer")
    return tuple(flags)
