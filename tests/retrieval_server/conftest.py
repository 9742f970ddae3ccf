"""One real server process on loopback for all tests here, over a small corpus of real places."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mapd_verl.data.geonames import text
from retrieval_server.launch import Sidecar, start_sidecar

ROOT = Path(__file__).resolve().parents[2]

CITIES = [
    ("São Paulo", "Brazil", "America/Sao_Paulo", 12_400_232),
    ("Paris", "France", "Europe/Paris", 2_138_551),
    ("The Hague", "The Netherlands", "Europe/Amsterdam", 474_292),
    ("Łódź", "Poland", "Europe/Warsaw", 768_755),
    ("Sanaa", "Yemen", "Asia/Aden", 1_937_451),
    ("Ra’s al Khaymah", "United Arab Emirates", "Asia/Dubai", 351_943),
    ("Reading", "United Kingdom", "Europe/London", 244_070),
    ("Of", "Turkey", "Europe/Istanbul", 26_228),
    ("Tromsø", "Norway", "Europe/Oslo", 52_436),
    ("Winston-Salem", "United States", "America/New_York", 241_218),
]


def city_row(name: str, country: str, timezone: str, population: int) -> dict[str, object]:
    contents = text.CITY_PASSAGE.format(city=name, country=country, timezone=timezone, population=f"{population:,}")
    return {"id": f"city-{name}", "contents": contents, "source": {"name": "GeoNames", "rank": population}}


def rows() -> list[dict[str, object]]:
    found = [city_row(*city) for city in CITIES]
    for country, continent, capital in (("France", "Europe", "Paris"), ("Brazil", "South America", "Brasília")):
        head = text.COUNTRY_PASSAGE_HEAD.format(country=country, continent=continent)
        body = text.COUNTRY_SENTENCES["capital"].format(capital=capital)
        found.append({"id": f"country-{country}", "contents": head + body})
    found.append({"id": "tokyo-ja", "contents": '"東京"\n東京は日本の首都です。'})
    found.append({"id": "untitled", "contents": "A passage of one line, about zeppelins."})
    return found


def write_corpus(path: Path, passages: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in passages), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def passages() -> list[dict[str, object]]:
    return rows()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, passages: list[dict[str, object]]) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", passages)


@pytest.fixture(scope="session")
def sidecar(corpus: Path) -> Iterator[Sidecar]:
    with start_sidecar(corpus) as running:
        yield running


@pytest.fixture
def http(sidecar: Sidecar) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sidecar.url, trust_env=False, timeout=30) as client:
        yield client


RunServer = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_server() -> RunServer:
    """``python -m retrieval_server`` to its end; it is killed, and the test fails, when it doesn't end."""

    def run(*arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "retrieval_server", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
