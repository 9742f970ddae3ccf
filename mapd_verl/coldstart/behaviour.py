"""Scripted searches, right and wrong: what the tiny student is shown before RL.

A *turn* is what the policy writes up to a closing tag or the end of its message; the environment answers
a search with passages. Wrong behaviours are those of real base models, in a known mixture
(``Mixture``): what RL then has to mend is known, and nothing else is missing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mapd_verl.coldstart.tokenizer import END
from mapd_verl.coldstart.worlds import Places
from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.facts import City, Country
from mapd_verl.data.geonames.questions import Question

BEHAVIOURS = ("good", "direct", "first_hop", "whole_question", "ignore", "broken")
KNOWN = "I have the answer."
GUESS = "I know this."
COMPARE = "Compare the two populations."


@dataclass(frozen=True)
class Turn:
    """What the policy writes (``text``), and the places whose passages answer it (empty: no observation)."""

    text: str
    found: tuple[City | Country, ...] = ()
    #: False: the turn is context only, it gets no loss (a mistake to recover from).
    trained: bool = True
    #: True: the turn holds no valid action, the environment answers with its note on the tags.
    invalid: bool = False


@dataclass(frozen=True)
class Mixture:
    """Probability of each behaviour for each kind of question; each row sums to one."""

    single_hop: dict[str, float] = field(
        default_factory=lambda: {"good": 0.34, "direct": 0.32, "whole_question": 0.14, "ignore": 0.10, "broken": 0.10}
    )
    multi_hop: dict[str, float] = field(
        default_factory=lambda: {
            "good": 0.12,
            "direct": 0.28,
            "first_hop": 0.36,
            "whole_question": 0.10,
            "ignore": 0.06,
            "broken": 0.08,
        }
    )
    comparison: dict[str, float] = field(
        default_factory=lambda: {
            "good": 0.14,
            "direct": 0.50,
            "first_hop": 0.20,
            "whole_question": 0.08,
            "broken": 0.08,
        }
    )

    def __post_init__(self) -> None:
        for kind in ("single_hop", "multi_hop", "comparison"):
            row = getattr(self, kind)
            unknown = set(row) - set(BEHAVIOURS)
            if unknown or abs(sum(row.values()) - 1) > 1e-6 or min(row.values()) < 0:
                raise ValueError(f"mixture.{kind}: behaviours of {BEHAVIOURS} with shares that sum to 1, got {row}")

    def draw(self, kind: str, rng: random.Random) -> str:
        """One behaviour for a question of ``kind``."""
        row = getattr(self, kind)
        return rng.choices(list(row), list(row.values()))[0]


def search(thought: str, query: str, *found: City | Country, trained: bool = True) -> Turn:
    """A search turn."""
    return Turn(f"<think> {thought}</think><search> {query}</search>", found, trained)


def answer(thought: str, value: str, trained: bool = True) -> Turn:
    """An answer turn."""
    return Turn(f"<think> {thought}</think><answer> {value}</answer>", trained=trained)


def good_searches(question: Question) -> list[Turn]:
    """The searches of a careful solver, in the order of the plan."""
    q = question
    plan = text.plan(q.relation, q.city.display, q.other.display if q.other else None)
    if q.relation in text.CITY_RELATIONS:
        return [search(plan[0], text.query(q.relation, q.city.display), q.city)]
    if q.other is not None:
        return [
            search(step, text.query("population", city.display), city)
            for step, city in zip(plan, (q.city, q.other), strict=False)
        ]
    country = q.city.country
    return [
        search(plan[0], text.query("country", q.city.display), q.city),
        search(plan[1], text.query(q.relation, country.name), country),
    ]


def last_thought(question: Question) -> str:
    """The thought before the answer."""
    return COMPARE if question.other else KNOWN


def good(question: Question) -> list[Turn]:
    """The whole right solution."""
    return [*good_searches(question), answer(last_thought(question), question.answers[0])]


def wrong_value(question: Question, places: Places, rng: random.Random) -> str:
    """A guess that does not come from reading."""
    if question.other is not None:
        return rng.choice((question.city, question.other)).display
    return places.guess(question.relation, rng)


def whole_question(question: Question, trained: bool = True) -> Turn:
    """A query that repeats the question. It finds the first city named, and both of a comparison."""
    plan = text.plan(question.relation, question.city.display, question.other.display if question.other else None)
    found = (question.city,) if question.other is None else (question.city, question.other)
    return search(plan[0], question.text, *found, trained=trained)


def broken(question: Question, rng: random.Random, trained: bool = True) -> Turn:
    """A turn whose tags are broken, so that it holds no action."""
    first = good_searches(question)[0].text
    body, query = first.split("</think>")
    query = query.removesuffix("</search>")
    made = rng.choice(
        (
            f"{body}</think>{query}{END}",  # never closed
            f"{body}</think>{query.removeprefix('<search>')}{END}",  # never opened
            f"{body}{END}",  # thinks and stops
        )
    )
    return Turn(made, trained=trained, invalid=True)


def plain(question: Question, behaviour: str, places: Places, rng: random.Random) -> list[Turn]:
    """A solution in one of the BEHAVIOURS. Raises ValueError for an unknown one."""
    searches = good_searches(question)
    if behaviour == "good":
        return good(question)
    if behaviour == "direct":
        return [answer(GUESS, wrong_value(question, places, rng))]
    if behaviour == "first_hop":
        value = question.city.display if question.other else question.city.country.name
        return [searches[0], answer(KNOWN, value)]
    if behaviour == "whole_question":
        rest = searches[1:] if question.other is None and rng.random() < 0.3 else []
        reached = question.other is not None or len(rest) == len(searches) - 1
        value = question.answers[0] if reached else question.city.country.name
        return [whole_question(question), *rest, answer(last_thought(question), value)]
    if behaviour == "ignore":
        return [*searches, answer(last_thought(question), wrong_value(question, places, rng))]
    if behaviour == "broken":
        after = good(question) if rng.random() < 0.3 else [answer(GUESS, wrong_value(question, places, rng))]
        return [broken(question, rng), *after]
    raise ValueError(f"unknown behaviour {behaviour!r}, choose from {BEHAVIOURS}")


def recovery(question: Question, places: Places, rng: random.Random) -> list[Turn]:
    """A mistake that gets no loss, then the right way on: what the privileged teacher must know.

    The teacher reads the student's own tokens, mistakes included; shown only perfect searches it would
    have nothing to say after the first slip.
    """
    slip = rng.random()
    if slip < 0.35:
        return [whole_question(question, trained=False), *_after_whole(question)]
    if slip < 0.6:
        return [broken(question, rng, trained=False), *good(question)]
    searches = good_searches(question)
    if slip < 0.8:  # looks up something else first
        stray = places.city(rng)
        query = text.query(rng.choice(text.CITY_RELATIONS), stray.display)
        thought = text.plan("country", stray.display)[0]
        return [search(thought, query, stray, trained=False), *good(question)]
    # A guess was begun: the thought is the student's, the search after it is right.
    first = searches[0].text.split("</think>")[1]
    return [Turn(f"<think> {GUESS}</think>", trained=False), Turn(first, searches[0].found), *good(question)[1:]]


def _after_whole(question: Question) -> list[Turn]:
    """What is left to do once the whole question was searched."""
    final = answer(last_thought(question), question.answers[0])
    return [final] if question.other is not None else [*good_searches(question)[1:], final]
