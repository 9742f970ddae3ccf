"""`mapd`: every command answers --help, bad input is one line and exit code 2."""

import pytest

from mapd_verl import __version__
from mapd_verl.cli import COMMANDS, main


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mapd-verl {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        [],
        ["train"],
        ["data", "geonames"],
        ["data", "mars", "--out", "x"],
        ["quickstart", "--steps", "many"],
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "no/such"], "no recipe 'no/such'"),
        (["train", "laptop/mapd", "trainer.totl_epochs=1"], "did you mean 'trainer.total_epochs'"),
        (["data", "geonames", "--out", "{tmp}", "--train", "0"], "train must be at least 1"),
        (["quickstart", "--run", "{tmp}", "--steps", "0"], "--steps"),
        (["quickstart", "--run", "{tmp}", "--seeds", "1", "1"], "--seeds"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_2(arguments, named, capsys, tmp_path):
    assert main([a.replace("{tmp}", str(tmp_path)) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_data_geonames_writes_the_world(tmp_path, capsys):
    small = ["--cities", "600", "--train", "12", "--val", "6", "--test", "6"]
    assert main(["data", "geonames", "--out", str(tmp_path / "world"), *small]) == 0
    names = {path.name for path in (tmp_path / "world").iterdir()}
    assert {"corpus.jsonl", "train.parquet", "val.parquet", "test.parquet", "ATTRIBUTION.md"} <= names
