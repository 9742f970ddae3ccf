"""verl's FSDP2 engine on the CPU, and the process group it runs in."""

from __future__ import annotations

import functools
from typing import Any

from mapd_verl.verl_seams import FSDPEngineWithLMHead, distributed, get_device_name


class CPUFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """The stock engine, except that a reference model is not offloaded: it is in host memory already.

    Upstream's limit: a forward-only model always gets ``CPUOffloadPolicy(pin_memory=True)``, and only an
    accelerator's runtime can pin memory.
    """

    def _build_fsdp_module(self, module: Any) -> Any:
        config = self.engine_config
        if config.strategy != "fsdp2":
            raise ValueError(f"strategy={config.strategy!r}: on the CPU platform only fsdp2 works")
        if not config.forward_only:
            return super()._build_fsdp_module(module)
        # The config is a frozen dataclass; it is whole again before anyone else reads it.
        object.__setattr__(config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(config, "forward_only", True)


def use_one_gloo_backend() -> None:
    """Make verl's default process group valid on the CPU platform; others are left alone.

    Upstream's bug: it names the backends ``cpu:gloo,<device>:<backend>``, and with device "cpu" torch refuses
    the name that stands there twice.
    """
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
