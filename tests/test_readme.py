"""What the READMEs tell a reader to type exists, and so does what they link to."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from mapd_verl.cli import COMMANDS
from mapd_verl.config.recipe import find_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes").glob("*/README.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
SETTING = re.compile(r"[A-Z_]+=\S*")


def commands():
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and SETTING.fullmatch(words[0]):
                    words.pop(0)
                if words:
                    yield pytest.param(
                        [w for w in words if w != "&"], id=f"{page.relative_to(ROOT)}: {' '.join(words)[:60]}"
                    )


@lru_cache
def help_of(*command):
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([*command, "--help"], capture_output=True, text=True, env=env, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("words", commands())
def test_commands_exist(words):
    program, *rest = words
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if program == "mapd":
        assert rest[0] in COMMANDS
        head = [sys.executable, "-m", "mapd_verl.cli", rest[0]]
        if rest[0] in ("data", "protocols") and not rest[1].startswith("-"):
            head.append(rest[1])
        if rest[0] == "train":
            find_recipe(ROOT / rest[1] if (ROOT / rest[1]).exists() else rest[1])
    elif program in ("python", "python3") and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None
        head = [sys.executable, "-m", rest[1]]
        if len(rest) > 2 and not rest[2].startswith("-"):
            head.append(rest[2])
    elif program in ("python", "python3") and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), f"no {rest[0]} here"
        head = [sys.executable, str(ROOT / rest[0])]
    elif program in ("pip", "curl", "git", "cd", "tensorboard", "bash", "export"):
        return
    else:
        path = ROOT / program
        assert path.is_file() and os.access(path, os.X_OK), f"{program} is no executable file here"
        if program != "./quickstart":
            return
        head = [sys.executable, "-m", "mapd_verl.cli", "quickstart"]
    for option in options:
        assert option == "--help" or option in help_of(*head), f"{' '.join(head[1:])} has no {option}"


def links():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                yield pytest.param(page, target, id=f"{page.relative_to(ROOT)}: {target}")


@pytest.mark.parametrize(("page", "target"), links())
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()


def test_the_readme_is_found_by_these_tests():
    assert sum(1 for _ in commands()) > 8 and sum(1 for _ in links()) > 5
