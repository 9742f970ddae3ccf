"""What ``mapd quickstart`` may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mapd_verl.errors import UserError

#: Recipe of each arm that can be trained.
ARMS = {"mapd": "laptop/mapd", "grpo": "laptop/grpo"}


@dataclass(frozen=True)
class Options:
    """A checked command line."""

    run: Path
    """Folder of everything the run makes."""
    arms: tuple[str, ...] = ("mapd",)
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    """Training steps; None is the recipe's own number."""
    test_questions: int = 400
    """Held-out questions asked before and after."""
    fresh: bool = False
    overrides: tuple[str, ...] = ()
    """Hydra overrides for every arm."""

    @property
    def compare(self) -> bool:
        """More than one run: the table goes over arms and seeds."""
        return len(self.arms) * len(self.seeds) > 1


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UserError: a count below 1, or a repeated seed.
    """
    from mapd_verl.cli import Parser

    parser = Parser(
        prog="mapd quickstart",
        description="Train a search agent by MAPD on GeoNames questions, on two CPU cores, and report what it learned.",
    )
    add = parser.add_argument
    add("--run", type=Path, default=Path("runs/quickstart"), help="folder of the run (default: %(default)s)")
    add("--fresh", action="store_true", help="start over instead of resuming what the folder holds")
    add("--steps", type=int, help="training steps (default: the recipe's)")
    add("--compare", action="store_true", help="train GRPO too, on seeds 0 1 2 unless --seeds says otherwise")
    add("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"what to train: {', '.join(ARMS)} (default: mapd)")
    add("--seeds", type=int, nargs="+", metavar="N", help="seeds of data order and sampling (default: 0)")
    add("--test-questions", type=int, default=400, help="held-out questions (default: %(default)s)")
    add("--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="overrides of the recipe's keys")
    given = parser.parse_args(list(arguments))
    seeds = tuple(given.seeds or ((0, 1, 2) if given.compare else (0,)))
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds: each seed once, got {' '.join(map(str, seeds))}")
    for name, value in (("--steps", given.steps), ("--test-questions", given.test_questions)):
        if value is not None and value < 1:
            raise UserError(f"{name}: want at least 1, got {value}")
    return Options(
        run=given.run,
        arms=tuple(dict.fromkeys(given.arms or (("mapd", "grpo") if given.compare else ("mapd",)))),
        seeds=seeds,
        steps=given.steps,
        test_questions=given.test_questions,
        fresh=given.fresh,
        overrides=tuple(given.overrides),
    )
