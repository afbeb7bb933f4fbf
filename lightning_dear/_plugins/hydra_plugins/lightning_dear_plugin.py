"""Makes `strategy="dear"` and our config groups known in any Hydra application, without an import.

Hydra imports this module in every Hydra application of the environment, whether it trains anything
or not. So it imports neither torch nor Lightning nor `lightning_dear`, and no failure in here may
end an application that never asked for us.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

_REGISTRY_MODULE = "lightning.pytorch.strategies"
_START_METHODS = {
    "dear": "popen",
    "dear_spawn": "spawn",
    "dear_fork": "fork",
    "dear_notebook": "fork",
}


class LightningDearSearchPathPlugin(SearchPathPlugin):
    """Appends our config folder, so that an application's own files of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder to `search_path`; warn and leave it alone when there is none."""
        try:
            folder = _conf_dir()
        except Exception as error:
            _warn("its config groups are missing here", error)
            return
        search_path.append(provider="lightning-dear", path=folder.as_uri())


def _conf_dir() -> Path:
    """Ask `lightning_dear/paths.py` without importing the package, which would import torch."""
    package = importlib.util.find_spec("lightning_dear")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'lightning_dear'")
    file = Path(package.submodule_search_locations[0], "paths.py")
    spec = importlib.util.spec_from_file_location("_lightning_dear_paths", file)
    assert spec is not None
    assert spec.loader is not None
    paths = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paths)
    folder: Path = paths.conf_dir()
    return folder


def _create_strategy(**options: Any) -> Any:
    from lightning_dear import DearStrategy

    return DearStrategy(**options)


def _register(strategies: ModuleType) -> None:
    """Put our names into Lightning's registry; the strategy itself is imported on first use."""
    try:
        registry = strategies.StrategyRegistry
        for name, start_method in _START_METHODS.items():
            if name not in registry:
                registry.register(name, _create_strategy, start_method=start_method)
    except Exception as error:
        _warn('strategy="dear" needs `import lightning_dear` here', error)


class _AfterImport(MetaPathFinder, Loader):
    """Registers our names right after Lightning's strategies were imported for the first time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)  # The search below must not come back here.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Lightning's module keeps its own loader, for whoever asks it for resources or source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)


def _register_now_or_later() -> None:
    strategies = sys.modules.get(_REGISTRY_MODULE)
    if strategies is not None:
        _register(strategies)
    elif not any(type(finder).__name__ == _AfterImport.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _warn(consequence: str, error: Exception) -> None:
    warnings.warn(
        f"lightning-dear's Hydra plugin failed, so {consequence}: {error!r}. "
        "Reinstall or uninstall lightning-dear.",
        UserWarning,
        stacklevel=2,
    )


_register_now_or_later()
