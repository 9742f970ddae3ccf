"""Caches as files to hand on: export and import, merge, diff, verify. See ``docs/protocols-cache.md``."""
