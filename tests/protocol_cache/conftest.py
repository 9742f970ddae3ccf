"""A valid protocol of each variant, and the real servers that the synthesis tests run against."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# No __init__.py here: a test package of this name would hide the package under test.
sys.path.insert(0, str(Path(__file__).parent))

from protocol_samples import EVIDENCE, SUCCEEDED


@pytest.fixture
def succeeded() -> dict[str, Any]:
    return copy.deepcopy(SUCCEEDED)


@pytest.fixture
def evidence() -> dict[str, Any]:
    return copy.deepcopy(EVIDENCE)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the GeoNames world: 600 cities, 60 training questions."""
    from mapd_verl.data.geonames.build import WorldConfig, build_world

    folder = tmp_path_factory.mktemp("world")
    build_world(folder, WorldConfig(cities=600, train=60, val=5, test=5))
    return folder


@pytest.fixture(scope="session")
def retriever_url(world: Path) -> Iterator[str]:
    from retrieval_server.launch import start_sidecar

    with start_sidecar(world / "corpus.jsonl") as sidecar:
        yield sidecar.url


@pytest.fixture(scope="session")
def teacher_url() -> Iterator[str]:
    from mapd_verl.data.geonames.teacher import start_teacher

    with start_teacher(error_rate=0.1, broken_json_rate=0.1, seed=3) as teacher:
        yield teacher.url + "/v1"
