"""Makes `strategy="dear"` known to whichever Lightning the user imports, before or after us.

Neither Lightning nor torch is imported here: names are registered when a Lightning package is, and
the strategy is imported when a Trainer asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from typing_extensions import override

START_METHODS = {
    "dear": "popen",
    "dear_spawn": "spawn",
    "dear_fork": "fork",
    "dear_notebook": "fork",
}
"""How each of our strategy names starts its processes."""

REGISTRIES = {
    "lightning.pytorch.strategies": "lightning_dear:DearStrategy",
    "pytorch_lightning.strategies": "lightning_dear.pytorch_lightning:DearStrategy",
    "lightning.fabric.strategies": "lightning_dear.fabric:DearFabricStrategy",
    "lightning_fabric.strategies": "lightning_dear.pytorch_lightning.fabric:DearFabricStrategy",
}
"""Lightning's modules that look up strategies by name -> our strategy for it."""


def register_now_or_later() -> None:
    """Registers our names where Lightning is imported already, and elsewhere once it is.

    Changes `sys.meta_path`; a second call registers again and adds nothing.
    """
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name in REGISTRIES:
        if name in sys.modules:
            _register_in(sys.modules[name])


def register(registry: Any, create: Callable[..., Any]) -> None:
    """Adds our names to one of Lightning's registries; `create` takes a strategy's options."""
    for name, start_method in START_METHODS.items():
        registry.register(
            name,
            create,
            description=f"DeAR data parallel with `start_method` '{start_method}'",
            override=True,
            start_method=start_method,
        )


def _register_in(module: ModuleType) -> None:
    names = ("StrategyRegistry", "STRATEGY_REGISTRY")  # A Trainer's, and Fabric's.
    registry = next(getattr(module, name) for name in names if hasattr(module, name))
    register(registry, partial(_create, REGISTRIES[module.__name__]))


def _create(strategy: str, **options: Any) -> Any:
    return resolve_name(strategy)(**options)


class _AfterImport(MetaPathFinder):
    """Finds nothing by itself: has modules that others find registered after their import."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRIES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, for whoever asks it for resources or its source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register_in(module)
