"""Run an action when some module has been imported, now or later.

This is how the plugin registers with registries whose modules are too heavy to import in every process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the real finder find the module and appends the actions to its execution."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if not isinstance(finder, _Finder) else None
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader, fullname)
                return spec
        return None

    def _follow(self, loader: importlib.abc.Loader, fullname: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.actions.pop(fullname, []):
                action()

        loader.exec_module = exec_module  # type: ignore[method-assign]  # a loader serves one module


def when_imported(module: str, action: Action) -> None:
    """Run ``action`` once ``module`` has been executed; at once if it has been already.

    An exception of ``action`` fails the import, so it is never lost.
    """
    loaded = sys.modules.get(module)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        action()
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.actions.setdefault(module, []).append(action)
