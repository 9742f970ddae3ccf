"""verl's process group on the CPU platform."""

from __future__ import annotations

import functools


def use_one_gloo_backend() -> None:
    """Make verl's default process group valid on the CPU platform; others are left alone.

    Upstream's bug: it names the backends ``cpu:gloo,<device>:<backend>``, and with device "cpu" torch refuses
    the name that stands there twice.
    """
    # Imported here: this very module is loaded while verl's is being imported.
    from mapd_verl.verl_seams import distributed, get_device_name

    original = distributed.initialize_global_process_group_ray
    if getattr(original, "_mapd_cpu", False):
        return

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second, backend)

    initialize._mapd_cpu = True  # type: ignore[attr-defined]  # marks the wrapper, so it is put on once
    distributed.initialize_global_process_group_ray = initialize
