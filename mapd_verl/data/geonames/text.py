"""Every sentence of the small world, in one place.

Passages, questions, plan steps and search queries are all made from these templates. The corpus
builder, the cold start and the rule-based teacher share them, so a question that one writes is a
question that another can read. Only the standard library is imported.

A city appears under its *display name*, which is unique in the corpus (see ``facts.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CITY_PASSAGE = (
    '"{city}"\nThe city of {city} lies in {country}. Its time zone is {timezone}. Its population is {population}.'
)
COUNTRY_PASSAGE_HEAD = '"{country}"\nThe country of {country} lies in {continent}.'
# A missing fact is left out of the passage; nothing is ever written as "unknown".
COUNTRY_SENTENCES = {
    "capital": " Its capital is {capital}.",
    "currency": " Its currency is {currency}.",
    "phone": " Its phone code is {phone}.",
}

#: Relations of a city that one passage answers.
CITY_RELATIONS = ("country", "timezone", "population")
#: Relations of the country where a city lies: two passages are needed.
COUNTRY_RELATIONS = ("capital", "currency", "phone", "continent")

#: How a relation is called in plan steps and queries.
RELATION_NAMES = {
    "country": "country",
    "timezone": "time zone",
    "population": "population",
    "capital": "capital",
    "currency": "currency",
    "phone": "phone code",
    "continent": "continent",
}

#: Two wordings for each relation; ``{city}`` (and ``{other}``) are display names.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "country": ("In which country does the city of {city} lie?", "Which country is home to the city of {city}?"),
    "timezone": ("What is the time zone of {city}?", "Which time zone is used in {city}?"),
    "population": ("What is the population of {city}?", "How many people live in {city}?"),
    "capital": (
        "What is the capital of the country where {city} lies?",
        "Which capital belongs to the country that is home to {city}?",
    ),
    "currency": (
        "What is the currency of the country where {city} lies?",
        "Which currency is used in the country that is home to {city}?",
    ),
    "phone": (
        "What is the phone code of the country where {city} lies?",
        "Which phone code belongs to the country that is home to {city}?",
    ),
    "continent": (
        "On which continent is the country where {city} lies?",
        "Which continent holds the country that is home to {city}?",
    ),
    "comparison": (
        "Which city has more people, {city} or {other}?",
        "Which of the two cities {city} and {other} has the larger population?",
    ),
}

TASK_TYPES = {
    **dict.fromkeys(CITY_RELATIONS, "single_hop"),
    **dict.fromkeys(COUNTRY_RELATIONS, "multi_hop"),
    "comparison": "comparison",
}


def query(relation: str, entity: str) -> str:
    """The search query for one relation of one entity (a city's or a country's name).

    No passage says "continent": asked for so, BM25 finds the country in 16 of 43 cases, by "country of" in 43.
    """
    return f"{RELATION_NAMES['country' if relation == 'continent' else relation]} of {entity}"


def plan(relation: str, city: str, other: str | None = None) -> list[str]:
    """The plan a careful solver writes before any search: it names only what the question names."""
    if relation in CITY_RELATIONS:
        return [f"Find the {RELATION_NAMES[relation]} of {city}."]
    if relation in COUNTRY_RELATIONS:
        return [f"Find the country of {city}.", f"Find the {RELATION_NAMES[relation]} of that country."]
    if other is None:
        raise ValueError("a comparison needs two cities")
    return [f"Find the population of {city}.", f"Find the population of {other}.", "Compare the two populations."]


def fact(relation: str, passage_text: str) -> str | None:
    """The one sentence of a passage body that states ``relation``, verbatim; None if it is not there."""
    marker = {
        "country": r"The city of .+? lies in .+?\.(?= Its time zone)",
        "continent": r"The country of .+? lies in (?:Africa|Antarctica|Asia|Europe|(?:North|South) America|Oceania)\.",
        "timezone": r"Its time zone is .+?\.(?= |$)",
        "population": r"Its population is [\d,]+\.",
        "capital": r"Its capital is .+?\.(?= Its (?:currency|phone)|$)",
        "currency": r"Its currency is .+?\.(?= Its phone|$)",
        "phone": r"Its phone code is .+?\.(?= |$)",
    }[relation]
    found = re.search(marker, passage_text)
    return found.group(0) if found else None


_VALUE = re.compile(r"(?: lies in | is )(?P<value>.+)\.$")


def value(sentence: str) -> str:
    """What a fact sentence says: the text after its last ``lies in`` or ``is``, without the full stop."""
    found = _VALUE.search(sentence)
    if not found:
        raise ValueError(f"not a fact sentence: {sentence!r}")
    return found.group("value")


@dataclass(frozen=True)
class ParsedQuestion:
    """A question read back: its relation and the one or two cities it names."""

    relation: str
    city: str
    other: str | None = None


_PATTERNS = [
    (
        relation,
        re.compile(
            "^" + re.escape(wording).replace(r"\{city\}", "(?P<city>.+)").replace(r"\{other\}", "(?P<other>.+)") + "$"
        ),
    )
    for relation, wordings in QUESTIONS.items()
    for wording in wordings
]


def parse_question(question: str) -> ParsedQuestion | None:
    """Read a question of this world back, or None when no template fits."""
    for relation, pattern in _PATTERNS:
        found = pattern.match(question.strip())
        if found:
            groups = found.groupdict()
            return ParsedQuestion(relation, groups["city"], groups.get("other"))
    return None
