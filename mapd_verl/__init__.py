"""MAPD: multi-agent protocol distillation for search agents, as a plugin on verl.

Importing this package is cheap on purpose: no torch, no verl. The synthesis and the retrieval
sidecar read the small-world data package without paying for either.
"""

__version__ = "0.1.0"
