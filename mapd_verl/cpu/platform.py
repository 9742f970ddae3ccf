"""The CPU as a verl platform. It never wins auto-detection: only ``VERL_PLATFORM=cpu`` selects it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch


class _DeviceModule(ModuleType):
    """``torch.cpu`` plus the allocator and random-state calls that verl makes on ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def _nothing(*args: object, **kwargs: object) -> None:
        """There is no device allocator to tell."""

    @staticmethod
    def _no_bytes(*args: object, **kwargs: object) -> int:
        """Bytes on a device that does not exist; host memory is measured elsewhere."""
        return 0

    empty_cache = ipc_collect = reset_peak_memory_stats = reset_accumulated_memory_stats = _nothing
    synchronize = set_device = _nothing
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _no_bytes

    @staticmethod
    def mem_get_info(*args: object) -> tuple[int, int]:
        """Free and total host memory, bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_rng_state(*args: object) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: object) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_device_name(*args: object) -> str:
        return "cpu"


_DEVICE_MODULE = _DeviceModule("mapd_verl_torch_cpu")


class HostPlatform:
    """What verl asks a platform, answered for the host itself. ``platform_class`` makes verl's subclass of it."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # asked in auto-detection only

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl passes it to `.to()`; an index would mean a GPU there

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl schedules one accelerator a rank; ray_init.num_gpus declares as many pretend ones.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


@lru_cache(maxsize=1)
def platform_class() -> type:
    """``HostPlatform`` as a subclass of verl's ``PlatformBase``.

    Made on demand: while verl loads the plugin, this module must be importable without verl, whoever was first.
    """
    from mapd_verl.verl_seams import PlatformBase

    return type("PlatformCPU", (HostPlatform, PlatformBase), {"__module__": __name__})
