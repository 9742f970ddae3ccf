"""``python -m protocol_cache``: synthesize, stats, show."""

from __future__ import annotations

import sys

from protocol_cache.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
