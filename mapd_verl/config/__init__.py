"""Configuration: the ``mapd`` schema and the loading of recipes."""

from mapd_verl.config.schema import MapdConfig, ObjectiveConfig, PrivilegeConfig, ProtocolsConfig

__all__ = ["MapdConfig", "ObjectiveConfig", "PrivilegeConfig", "ProtocolsConfig"]
