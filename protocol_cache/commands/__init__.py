"""The commands of ``mapd protocols``: one module each group, each with ``add(commands)`` for its parsers."""

PROGRAM = "protocol_cache"
