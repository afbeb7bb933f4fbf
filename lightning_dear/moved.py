"""Where modules are that our documentation named by another path, for one version.

An import by the old path gives the very module of the new path, with a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from typing_extensions import override

MOVED = {
    "lightning_dear.benchmarking": "lightning_dear.studies",
    "lightning_dear.device_costs": "lightning_dear.studies.device_costs",
    "lightning_dear.launcher": "lightning_dear.strategy.launchers",
    "lightning_dear.pipeline": "lightning_dear.engine.pipeline",
    "lightning_dear.workloads.classifier": "lightning_dear.workloads.task",
    "lightning_dear.workloads.digits": "lightning_dear.workloads.data",
    "lightning_dear.workloads.resnet": "lightning_dear.workloads.nets",
    "lightning_dear.simulator.program": "lightning_dear.planning.step",
}
"""Old path -> new path, of a module or of a package with all that is in it."""


def moved_name(name: str) -> str | None:
    """The present path of module `name`, or None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def find_what_moved() -> None:
    """Makes the old paths importable; imports nothing. A second call does nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())


class AliasLoader(Loader):
    """Puts the module `target` in the place of the one that is asked for."""

    def __init__(self, target: str) -> None:
        self._target = target

    @override
    def exec_module(self, module: ModuleType) -> None:
        # Whatever stands in sys.modules after this call is what the import returns.
        sys.modules[module.__name__] = importlib.import_module(self._target)

    def get_code(self, fullname: str) -> CodeType:
        """For `python -m`: runs the target as the main module."""
        run = f"import runpy\nrunpy.run_module({self._target!r}, None, '__main__', True)"
        return compile(run, fullname, "exec")


class _MovedFinder(MetaPathFinder):
    """The first finder, since the new package has files that the old path would find again."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = moved_name(fullname)
        if name is None:
            return None
        warnings.warn(
            f"{fullname} has moved to {name}, and the old path will be gone in the next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, AliasLoader(name), is_package="." not in name[15:])
