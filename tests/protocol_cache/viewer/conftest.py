from __future__ import annotations

import sys
from pathlib import Path

# No __init__.py here: see tests/protocol_cache/conftest.py.
sys.path.insert(0, str(Path(__file__).parent))
