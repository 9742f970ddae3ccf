"""``view``: the local page."""

from __future__ import annotations

import argparse
from typing import Any

from mapd_verl.errors import UserError
from protocol_cache.commands.numbers import at_least


def add(commands: Any) -> None:
    """Its parser."""
    view = commands.add_parser("view", help="a local page to browse, search and review the protocols of a cache")
    view.add_argument("store")
    view.add_argument("--port", type=at_least(0), default=0, help="on 127.0.0.1 (default: a free one)")
    view.add_argument("--readonly", action="store_true", help="no reviews")
    view.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> int:
    from protocol_cache.viewer.serve import serve

    if options.port > 65535:
        raise UserError(f"--port: at most 65535, got {options.port}")
    serve(options.store, options.port, options.readonly)
    return 0
