"""The small world: split by entity, unique names, nothing given away, the same for the same seed."""

import json
import re
from collections import Counter

import pyarrow.parquet as pq
import pytest

from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.build import WorldConfig, build_world, city_passage, country_passage
from mapd_verl.data.geonames.facts import City, Country, load_cities, load_countries
from mapd_verl.data.geonames.questions import answer_of, askable, make_questions, split_of


@pytest.fixture(scope="module")
def cities() -> list[City]:
    return load_cities(9600)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    return out, build_world(out, WorldConfig(train=1500, val=150, test=300))


def rows(path):
    return pq.read_table(path).to_pylist()


def test_corpus_is_large_and_in_search_r1_form(world):
    out, manifest = world
    passages = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
    assert len(passages) == manifest["passages"] >= 9000
    assert len({p["id"] for p in passages}) == len(passages)
    titles = [p["contents"].split("\n")[0] for p in passages]
    assert all(re.fullmatch(r'"[^"\n]+"', title) for title in titles)
    assert all(len(p["contents"].split("\n")) == 2 for p in passages)
    # A title names one city only; a country may share a city's name, not the other way round.
    assert max(Counter(t for t, p in zip(titles, passages, strict=True) if p["id"].startswith("city")).values()) == 1


def test_no_city_of_one_split_is_in_another(world):
    out, _ = world
    named = {}
    for split in ("train", "val", "test"):
        parsed = [text.parse_question(row["question"]) for row in rows(out / f"{split}.parquet")]
        named[split] = {p.city for p in parsed} | {p.other for p in parsed if p.other}
    assert not named["train"] & named["test"]
    assert not named["train"] & named["val"]
    assert not named["val"] & named["test"]


def test_questions_cover_all_kinds_and_carry_the_columns(world):
    out, _ = world
    table = rows(out / "train.parquet")
    assert {r["extra_info"]["kind"] for r in table} == {"single_hop", "multi_hop", "comparison"}
    assert {r["extra_info"]["relation"] for r in table} == set(text.QUESTIONS)
    assert len({r["question_id"] for r in table}) == len(table)
    for row in table:
        assert row["reward_model"]["ground_truth"]["target"] == row["golden_answers"] != []
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
        assert row["agent_name"] == "mapd_search"


def test_the_same_seed_builds_the_same_bytes(world, tmp_path):
    _, manifest = world
    assert build_world(tmp_path, WorldConfig(train=1500, val=150, test=300)) == manifest
    other = build_world(tmp_path, WorldConfig(train=1500, val=150, test=300, seed=1))
    assert other["sha256"]["train.parquet"] != manifest["sha256"]["train.parquet"]
    assert other["sha256"]["corpus.jsonl"] == manifest["sha256"]["corpus.jsonl"]


def test_every_gold_answer_is_stated_by_a_passage(world, cities):
    by_name = {c.display: c for c in cities}
    out, _ = world
    for row in rows(out / "test.parquet"):
        parsed = text.parse_question(row["question"])
        city = by_name[parsed.city]
        if parsed.relation == "comparison":
            other = by_name[parsed.other]
            large = max(city, other, key=lambda c: c.population)
            assert row["golden_answers"][0] == large.display
            continue
        passage = city_passage(city) if parsed.relation in text.CITY_RELATIONS else country_passage(city.country)
        fact = text.fact(parsed.relation, passage["contents"].split("\n", 1)[1])
        assert text.value(fact) == row["golden_answers"][0]


def test_shared_names_are_told_apart_and_never_give_the_answer_away(cities):
    shared = [c for c in cities if c.shared]
    assert len(shared) > 300
    assert all(c.display != c.name and c.country.name in c.display for c in shared)
    for city in shared:
        assert not any(askable(r, city) for r in ("country", *text.COUNTRY_RELATIONS))
    assert len({c.display for c in cities}) == len(cities)
    # Several places of one country share a name: the region tells them apart.
    assert any(re.search(r"\(.+, \w+\)$", c.display) for c in shared)


def test_a_city_whose_name_holds_its_country_is_not_asked_for_it(cities):
    city = next(c for c in cities if c.name == "Guatemala City")
    assert not askable("country", city)
    assert askable("population", city)


def test_missing_facts_are_left_out_and_not_asked():
    countries = load_countries()
    lacking = [c for c in countries.values() if None in (c.capital, c.currency, c.phone)]
    assert lacking
    for country in lacking:
        contents = country_passage(country)["contents"]
        assert "None" not in contents and "is ." not in contents and "  " not in contents
        city = City(0, "Nowhere", "Nowhere", False, country, "Asia/Tokyo", 5)
        for relation in ("capital", "currency", "phone"):
            assert askable(relation, city) == (answer_of(relation, city) is not None)


def test_non_ascii_names_are_kept_in_nfc(cities):
    import unicodedata

    names = [c.display for c in cities]
    assert "Zürich" in names
    assert sum(not n.isascii() for n in names) > 1000
    assert all(unicodedata.is_normalized("NFC", n) for n in names)


def test_facts_with_full_stops_are_cut_whole():
    country = Country(1, "VC", "St. Kitts", "North America", "St. John's", "U.S. Dollar", "1-784")
    city = City(1, "Mt. A", "Mt. A", False, country, "America/St_Kitts", 1234567)
    body = country_passage(country)["contents"].split("\n")[1]
    assert text.value(text.fact("capital", body)) == "St. John's"
    assert text.value(text.fact("currency", body)) == "U.S. Dollar"
    assert text.value(text.fact("phone", body)) == "1-784"
    body = city_passage(city)["contents"].split("\n")[1]
    assert text.fact("country", body) == "The city of Mt. A lies in St. Kitts."
    assert text.value(text.fact("population", body)) == "1,234,567"


def test_splits_are_a_property_of_the_city_alone(cities):
    fewer = {c.geonameid: split_of(c) for c in load_cities(500)}
    assert all(split_of(c) == fewer[c.geonameid] for c in cities if c.geonameid in fewer)


def test_too_many_questions_is_an_error(cities):
    with pytest.raises(ValueError, match="cannot supply"):
        make_questions(cities[:20], "train", 5000, 0)


@pytest.mark.parametrize("bad", [{"cities": 0}, {"test": 0}, {"prompt_template": "no slot"}])
def test_config_is_checked(bad):
    with pytest.raises(ValueError):
        WorldConfig(**bad)
