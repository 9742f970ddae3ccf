"""verl's FSDP2 engine on the CPU."""

from __future__ import annotations

from typing import Any

from mapd_verl.verl_seams import EngineRegistry, FSDPEngineWithLMHead


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


def _register() -> None:
    engines = EngineRegistry._engines["language_model"]
    # A later verl may bring a CPU engine of its own.
    missing = [backend for backend in ("fsdp", "fsdp2") if "cpu" not in engines.get(backend, {})]
    if missing:
        EngineRegistry.register(model_type="language_model", backend=missing, device="cpu")(CPUFSDPEngineWithLMHead)


# Here and not in the plugin: whoever is imported first, this runs when the class is there.
_register()
