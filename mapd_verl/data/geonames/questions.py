"""Questions about the small world, split by city so that no test city is seen in training."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.facts import City

#: Share of cities per split, by a hash of the city's id: stable when the corpus grows.
SPLITS = {"train": 0.70, "val": 0.10, "test": 0.20}

#: How often each relation is asked. One third single hop, one half multi hop, the rest comparisons.
RELATION_WEIGHTS = {
    "country": 4,
    "timezone": 4,
    "population": 4,
    "capital": 5,
    "currency": 5,
    "phone": 4,
    "continent": 4,
    "comparison": 6,
}
#: Two cities are compared only when the larger has at least this many times the people of the smaller,
#: so that the answer does not hang on the year of a census.
COMPARISON_RATIO = 1.5


@dataclass(frozen=True)
class Question:
    """One question with its gold answers and the entities it names."""

    text: str
    relation: str
    kind: str
    answers: tuple[str, ...]
    city: City
    other: City | None = None


def split_of(city: City) -> str:
    """The split a city belongs to, from its GeoNames id alone."""
    point = int.from_bytes(hashlib.sha256(f"split:{city.geonameid}".encode()).digest()[:8], "big") / 2**64
    for name, share in SPLITS.items():
        if point < share:
            return name
        point -= share
    return "test"


def answer_of(relation: str, city: City) -> str | None:
    """The gold answer of a one-city question, or None when GeoNames lacks the fact."""
    country = city.country
    return {
        "country": country.name,
        "timezone": city.timezone,
        "population": city.population_text,
        "capital": country.capital,
        "currency": country.currency,
        "phone": country.phone,
        "continent": country.continent,
    }[relation]


def askable(relation: str, city: City) -> bool:
    """False where the fact is missing, or where the display name would give the answer (or a hop) away."""
    if answer_of(relation, city) is None:
        return False
    names_its_country = city.shared or city.country.name.casefold() in city.display.casefold()
    return not (names_its_country and (relation == "country" or relation in text.COUNTRY_RELATIONS))


def make_questions(cities: list[City], split: str, count: int, seed: int) -> list[Question]:
    """``count`` different questions about the cities of one split; the same for the same arguments.

    Raises ValueError when the split cannot supply that many.
    """
    own = [city for city in cities if split_of(city) == split]
    rng = random.Random(f"{seed}:{split}")
    relations, weights = list(RELATION_WEIGHTS), list(RELATION_WEIGHTS.values())
    made: dict[str, Question] = {}
    for _ in range(50 * count):
        if len(made) == count:
            return list(made.values())
        relation = rng.choices(relations, weights)[0]
        question = _ask(relation, own, rng)
        if question is not None:
            made.setdefault(question.text, question)
    raise ValueError(f"the {split} split ({len(own)} cities) cannot supply {count} different questions")


def _ask(relation: str, own: list[City], rng: random.Random) -> Question | None:
    city = rng.choice(own)
    wording = rng.choice(text.QUESTIONS[relation])
    if relation == "comparison":
        other = rng.choice(own)
        small, large = sorted((city, other), key=lambda c: c.population)
        if large.population < COMPARISON_RATIO * small.population:
            return None
        asked = wording.format(city=city.display, other=other.display)
        answers = (large.display,) if small.name == large.name else tuple(dict.fromkeys((large.display, large.name)))
        return Question(asked, relation, "comparison", answers, city, other)
    if not askable(relation, city):
        return None
    answer = answer_of(relation, city)
    assert answer is not None  # askable() checked it
    return Question(wording.format(city=city.display), relation, text.TASK_TYPES[relation], (answer,), city)
