"""``mapd``: one function a command, each handing its arguments to the part that does the work.

Nothing heavy is imported before a command is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mapd_verl import __version__
from mapd_verl.errors import EXIT_USER_ERROR, one_line_errors


class Parser(argparse.ArgumentParser):
    """argparse, with its error on one line."""

    def error(self, message: str) -> None:  # type: ignore[override]  # it never returns, and neither does this
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def data(arguments: Sequence[str]) -> int:
    """make a corpus and its questions (mapd data geonames --out DIR)"""
    parser = Parser(prog="mapd data", description="Make a corpus and questions in the Search-R1 schema.")
    worlds = parser.add_subparsers(dest="world", required=True, metavar="WORLD")
    geonames = worlds.add_parser("geonames", help="cities and countries of GeoNames (CC BY 4.0)")
    geonames.add_argument("--out", type=Path, required=True, help="folder to write")
    geonames.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    geonames.add_argument("--cities", type=int, default=9600, help="most populous cities (default: 9600)")
    for split, count in (("train", 2000), ("val", 200), ("test", 400)):
        geonames.add_argument(f"--{split}", type=int, default=count, help=f"{split} questions (default: {count})")
    options = parser.parse_args(arguments)

    from mapd_verl.data.geonames.build import WorldConfig, build_world
    from mapd_verl.errors import UserError

    try:
        config = WorldConfig(options.cities, options.train, options.val, options.test, options.seed)
        manifest = build_world(options.out, config)
    except ValueError as error:
        raise UserError(str(error)) from error
    print(f"{options.out}: {manifest['passages']} passages, questions {manifest['questions']}")
    return 0


def coldstart(arguments: Sequence[str]) -> int:
    """make the student: tokenizer, supervised cold start, checkpoint (hours)"""
    parser = Parser(prog="mapd coldstart", description="Rebuild the laptop student from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, in Hugging Face format")
    parser.add_argument("--start", type=Path, help="go on from this earlier checkpoint")
    parser.add_argument("--first-stage", type=int, default=0, help="stage to go on with (default: 0)")
    options = parser.parse_args(arguments)

    from mapd_verl.coldstart.build import DEFAULT
    from mapd_verl.coldstart.build import coldstart as run

    card = run(options.out, DEFAULT, options.start, options.first_stage)
    print(f"{options.out}: model.safetensors sha256 {card['sha256']['model.safetensors']}")
    return 0


def train(arguments: Sequence[str]) -> int:
    """train by a recipe: mapd train RECIPE [key=value ...]"""
    parser = Parser(prog="mapd train", description="Check a recipe, then train by it on verl's trainer.")
    parser.add_argument("recipe", help="a YAML, or the name of a shipped one: laptop/mapd")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of the recipe's keys")
    parser.add_argument("--check", action="store_true", help="only check the recipe and its files")
    options = parser.parse_intermixed_args(arguments)

    from mapd_verl import launch

    if options.check:
        _, command, _ = launch.prepare(options.recipe, options.overrides)
        print(" ".join(command))
        return 0
    config = launch.train(options.recipe, options.overrides)
    print(f"trained: {config.trainer.default_local_dir}")
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """answer a file of questions with a checkpoint and score them"""
    from mapd_verl.evaluation.offline import main as run

    return run(list(arguments))


def report(arguments: Sequence[str]) -> int:
    """write a run's HTML report and pictures"""
    from mapd_verl.evaluation.report import main as run

    return run(list(arguments))


def protocols(arguments: Sequence[str]) -> int:
    """synthesize, list and show protocols (python -m protocol_cache)"""
    from protocol_cache.__main__ import main as run

    return run(list(arguments))


def quickstart(arguments: Sequence[str]) -> int:
    """everything, from nothing to a trained student and its report"""
    from mapd_verl.quickstart.run import main as run

    return run(list(arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "quickstart": quickstart,
    "data": data,
    "coldstart": coldstart,
    "protocols": protocols,
    "train": train,
    "eval": evaluate,
    "report": report,
}


@one_line_errors("mapd")
def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="mapd",
        description="Multi-agent protocol distillation for search agents on verl.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<11} {command.__doc__}" for name, command in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"mapd-verl {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    # Only the first word is ours: what follows belongs to the command, its --help too.
    options = parser.parse_args(arguments[:1])
    return COMMANDS[options.command](arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
