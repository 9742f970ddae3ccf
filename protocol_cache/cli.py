"""The command line: the parser, and one module of ``protocol_cache.commands`` for each group of commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mapd_verl.errors import UserError, one_line_errors
from protocol_cache.commands import PROGRAM, ablate, exchange, inspect, synthesize, view


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m protocol_cache", description="Make and read MAPD protocols.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for group in (synthesize, ablate, inspect, exchange, view):
        group.add(commands)
    return parser


@one_line_errors(PROGRAM)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 and one line for bad input, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    return options.run(options)
