"""Configuration: the `mapd` schema and the loading of recipes."""
