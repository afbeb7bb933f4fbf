"""Makes `strategy="dear"` known to whichever Lightning the user imports, before or after us.

Neither Lightning nor torch is imported here: names are registered when a Lightning package is, and
the strategy is imported when a Trainer asks for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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


@dataclass(frozen=True)
class Registry:
    """A place where one Lightning package looks up strategies by name.

    Attributes:
        module: Lightning's module that holds the registry.
        attribute: The registry's name in there.
        package: Our package with the strategy for it.
        strategy: The class's name in there.
    """

    module: str
    attribute: str
    package: str
    strategy: str


REGISTRIES = (
    Registry("lightning.pytorch.strategies", "StrategyRegistry", "lightning_dear", "DearStrategy"),
    Registry(
        "pytorch_lightning.strategies",
        "StrategyRegistry",
        "lightning_dear.pytorch_lightning",
        "DearStrategy",
    ),
    Registry(
        "lightning.fabric.strategies",
        "STRATEGY_REGISTRY",
        "lightning_dear.fabric",
        "DearFabricStrategy",
    ),
    Registry(
        "lightning_fabric.strategies",
        "STRATEGY_REGISTRY",
        "lightning_dear.pytorch_lightning.fabric",
        "DearFabricStrategy",
    ),
)
"""Every registry that our names are added to."""

_REGISTRY_IN = {place.module: place for place in REGISTRIES}


def register_now_or_later() -> None:
    """Registers our names where Lightning is imported already, and elsewhere once it is.

    Changes `sys.meta_path`; a second call registers again and adds nothing.
    """
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name in _REGISTRY_IN:
        if name in sys.modules:
            _register(sys.modules[name])


def _register(module: ModuleType) -> None:
    place = _REGISTRY_IN[module.__name__]
    registry = getattr(module, place.attribute)
    for name, start_method in START_METHODS.items():
        registry.register(
            name,
            _factory(place),
            description=f"DeAR data parallel with `start_method` '{start_method}'",
            override=True,
            start_method=start_method,
        )


def _factory(place: Registry) -> Callable[..., Any]:
    def create(**options: Any) -> Any:
        return getattr(importlib.import_module(place.package), place.strategy)(**options)

    return create


class _AfterImport(MetaPathFinder):
    """Finds nothing by itself: has modules that others find registered after their import."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRY_IN:
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
        _register(module)
