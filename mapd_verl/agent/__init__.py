"""The search agent: token-in, token-out episodes in Search-R1's tags. Only ``verl_loop.py`` needs verl."""
