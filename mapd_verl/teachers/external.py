"""Another model of the same tokenizer (DGPO's larger teacher, a run's earlier checkpoint)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mapd_verl.errors import UserError
from mapd_verl.teachers.base import Teacher


class External(Teacher):
    """Loaded whole on every rank, in the dtype that the actor computes in; frozen.

    Raises:
        UserError: no such model, or its vocabulary is not the policy's.
    """

    name = "external"
    head = "own"

    def prepare(self, engine: Any) -> None:
        from transformers import AutoModelForCausalLM

        path = str(self.config.path)
        folder = Path(path).expanduser()
        if path[:1] in "./~" and not (folder / "config.json").is_file():
            raise UserError(f"mapd.teacher.path: no model folder (with config.json) at {path}")
        parameter = next(engine.module.parameters())
        dtype = getattr(engine, "_autocast_dtype", parameter.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder if folder.is_dir() else path, dtype=dtype, attn_implementation="sdpa"
            )
        except (OSError, ValueError) as error:
            raise UserError(f"mapd.teacher.path: {path}: {str(error).splitlines()[0]}") from error
        mine, theirs = engine.module.config.vocab_size, model.config.vocab_size
        if mine != theirs:
            raise UserError(f"mapd.teacher.path: {path} has {theirs} vocabulary entries, the policy {mine}")
        self._module = model.to(parameter.device).eval().requires_grad_(False)

    @contextmanager
    def module(self, engine: Any) -> Iterator[torch.nn.Module]:
        yield self._module
