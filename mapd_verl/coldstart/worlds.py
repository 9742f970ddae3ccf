"""Cities and countries for the cold start: real ones of the training split, and endless made-up ones.

Made-up names make copying beat memorising: every fact about a made-up place is drawn anew for each
example, so nothing but the context can supply it.
"""

from __future__ import annotations

import random
import re

from mapd_verl.data.geonames.build import city_passage, country_passage
from mapd_verl.data.geonames.facts import CONTINENTS, City, Country
from mapd_verl.data.geonames.questions import split_of


class Namer:
    """Makes up names: halves of real names joined, or random word pieces of the tokenizer.

    The second kind gives every word piece its turn, so that copying does not depend on which pieces
    real names happen to join.
    """

    def __init__(self, names: list[str], pieces: list[str], starts: list[str]):
        self._words = [w for name in names for w in re.findall(r"[^\W\d_]{3,}", name)]
        self._pieces, self._starts = pieces, starts
        if not (self._words and pieces and starts):
            raise ValueError("no words to make names of")

    def word(self, rng: random.Random) -> str:
        """One made-up word with a capital letter."""
        if rng.random() < 0.5:
            first, second = rng.choice(self._words), rng.choice(self._words)
            made = first[: rng.randint(2, max(2, len(first) - 1))] + second[rng.randint(1, len(second) - 1) :].lower()
        else:
            made = rng.choice(self._starts) + "".join(rng.choice(self._pieces) for _ in range(rng.randint(0, 2)))
        return made[:1].upper() + made[1:]

    def name(self, rng: random.Random) -> str:
        """A made-up name of one to three words; now and then with a hyphen or a bracket, as real ones have."""
        words = [self.word(rng) for _ in range(rng.choices((1, 2, 3), (70, 25, 5))[0])]
        made = ("-" if rng.random() < 0.08 else " ").join(words)
        return f"{made} ({self.word(rng)})" if rng.random() < 0.04 else made


def namer_for(tokenizer, names: list[str]) -> Namer:
    """A Namer over the word pieces of ``tokenizer`` (letters only)."""
    pieces: list[str] = []
    starts: list[str] = []
    for token_id in range(len(tokenizer)):
        piece = tokenizer.decode([token_id])
        if piece.strip().isalpha():
            (starts if piece.startswith(" ") else pieces).append(piece.strip())
    return Namer(names, pieces, starts)


class Places:
    """Draws cities with their countries: real ones, or made-up with probability ``made_up``."""

    def __init__(self, cities: list[City], namer: Namer, made_up: float):
        self.real = [city for city in cities if split_of(city) == "train"]
        self._namer, self._made_up = namer, made_up
        self._zones = sorted({city.timezone for city in cities})
        self._countries = sorted({city.country for city in self.real}, key=lambda c: c.iso)
        self._currencies = sorted({c.currency for c in self._countries if c.currency})

    def city(self, rng: random.Random) -> City:
        """One city."""
        if rng.random() >= self._made_up:
            return rng.choice(self.real)
        country = self.country(rng)
        name = self._namer.name(rng)
        if rng.random() < 0.5:
            zone = rng.choice(self._zones)
        else:
            zone = f"{rng.choice(('Africa', 'America', 'Asia', 'Europe', 'Pacific'))}/{self._namer.word(rng)}"
        population = int(10 ** rng.uniform(4.3, 7.3))
        return City(0, name, name, False, country, zone, population)

    def country(self, rng: random.Random) -> Country:
        """One country; a made-up one may bear a real name with made-up facts, so that priors do not help."""
        pick = rng.random
        like = rng.choice(self._countries)
        return Country(
            geonameid=0,
            iso="",
            name=like.name if pick() < 0.4 else self._namer.name(rng),
            continent=rng.choice(list(CONTINENTS.values())),
            capital=None if pick() < 0.03 else self._namer.name(rng),
            currency=rng.choice(self._currencies) if pick() < 0.5 else self._namer.word(rng),
            phone=_phone(rng),
        )

    def guess(self, relation: str, rng: random.Random) -> str:
        """What someone who never searched might answer: a real value of the right kind."""
        city = rng.choice(self.real)
        value = {
            "country": city.country.name,
            "timezone": city.timezone,
            "population": city.population_text,
            "capital": city.country.capital,
            "currency": city.country.currency,
            "phone": city.country.phone,
            "continent": city.country.continent,
        }[relation]
        return value or self.guess(relation, rng)


def _phone(rng: random.Random) -> str:
    code = str(rng.randint(1, 999))
    return f"{rng.choice(('1', '44'))}-{rng.randint(100, 9999)}" if rng.random() < 0.15 else code


def passage_of(place: City | Country) -> str:
    """The contents of a place's passage."""
    row = city_passage(place) if isinstance(place, City) else country_passage(place)
    return row["contents"]
