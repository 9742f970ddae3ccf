"""``ablate``: a control cache out of a finished one."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from mapd_verl.errors import UserError
from protocol_cache.ablations import KINDS, ablate
from protocol_cache.store import ProtocolStore


def add(commands: Any) -> None:
    """Its parser."""
    make = commands.add_parser("ablate", help="a control cache out of a finished one, without teacher calls")
    make.add_argument("store")
    make.add_argument("--kind", required=True, choices=KINDS)
    make.add_argument("--out", required=True, help="the new cache; must not exist")
    make.add_argument("--seed", type=int, default=0, help="of shuffled")
    make.set_defaults(run=_ablate)


def _ablate(options: argparse.Namespace) -> int:
    if Path(options.out).exists():
        raise UserError(f"--out {options.out}: exists already")
    counts: Counter[str] = Counter()
    with ProtocolStore(options.store, readonly=True) as store:
        try:
            records = list(ablate(store, options.kind, options.seed))
        except ValueError as error:
            raise UserError(f"{options.store}: {error}") from error
        with ProtocolStore(options.out) as out:
            for record in records:
                out.put(record, (), store.log(record.question_id))
                counts[record.status] += 1
    print(f"{options.out}: {options.kind}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    return 0
