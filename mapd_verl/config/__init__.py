"""Configuration: the ``mapd`` schema and the loading of recipes."""

from mapd_verl.config.schema import EstimatorConfig, MapdConfig, ObjectiveConfig, PrivilegeConfig, ProtocolsConfig

__all__ = ["EstimatorConfig", "MapdConfig", "ObjectiveConfig", "PrivilegeConfig", "ProtocolsConfig"]
