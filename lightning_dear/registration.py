"""What `import lightning_dear` adds to later imports: our names in Lightning, and a mirror of ours.

Names: `strategy="dear"` is known to whichever Lightning the user imports, before or after us.
Neither Lightning nor torch is imported here: names are registered when a Lightning package is, and
the strategy is imported when a Trainer asks for it.

The mirror: our classes a second time, for `pytorch_lightning`, from the same source files.
`lightning.pytorch` and `pytorch_lightning` are two copies of one source with different classes, so
that a strategy derived from the one is none to the other's Trainer. Lightning makes its second copy
by rewriting imports before a release; here that happens when a module is imported:
`lightning_dear.pytorch_lightning.strategy` is `strategy/` with `lightning.pytorch` read as
`pytorch_lightning`, and so on for every folder in `MIRRORED`. The others know only torch and exist
once. Files, line numbers and sources in tracebacks are those of the original; classes have a module
that can be imported, so they can be pickled.

Where `pytorch_lightning` is installed and `lightning` is not, `lightning_dear.strategy` and the
others are the mirrored modules themselves. The applications in `lightning_dear.apps` and the
configs always use `lightning`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pkgutil import resolve_name
from types import CodeType, ModuleType
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

    And makes the mirrored modules importable. Changes `sys.meta_path`; a second call registers
    again and adds nothing.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
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


def _register_after(loader: Loader) -> None:
    """Has the module that `loader` executes next registered."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # The module keeps its own loader, for whoever asks it for resources or its source.
        del vars(loader)["exec_module"]
        execute(module)
        _register_in(module)

    vars(loader)["exec_module"] = exec_module


# --- the mirror -----------------------------------------------------------------------------------


MIRRORED = ("callbacks", "fabric", "strategy")
"""The folders that import Lightning, themselves or through each other."""

_PACKAGE = "lightning_dear"
_MIRROR = "lightning_dear.pytorch_lightning"
_RENAMED = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    **{f"{_PACKAGE}.{module}": f"{_MIRROR}.{module}" for module in MIRRORED},
}


def mirrored_name(name: str) -> str:
    """The module that takes the place of module `name` in the mirror; `name` itself if none."""
    for original, mirrored in _RENAMED.items():
        if name == original or name.startswith(f"{original}."):
            return mirrored + name.removeprefix(original)
    return name


def mirror_imports(tree: ast.Module) -> None:
    """Renames the modules that `tree` imports, in place.

    Ours are written so that this does: `from package.module import name`, or `import package.module
    as name`. See `unclear_imports` in tests/test_mirror.py.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            node.module = mirrored_name(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                alias.name = mirrored_name(alias.name)


def is_installed(package: str) -> bool:
    """Whether there is a package of this name, without dots; imports nothing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # Any folder of the name in sys.path has a spec, but no file behind it.
    return spec is not None and spec.origin is not None


def _mirrored_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    original = _PACKAGE + fullname.removeprefix(_MIRROR)
    if mirrored_name(original) != fullname:
        return None
    if original.count(".") == 1:
        path = sys.modules[_PACKAGE].__path__
    found = PathFinder.find_spec(original, path)
    if found is None or found.origin is None:
        return None
    return importlib.util.spec_from_file_location(
        fullname,
        found.origin,
        loader=_MirrorLoader(fullname, found.origin),
        submodule_search_locations=found.submodule_search_locations,
    )


class _AliasLoader(Loader):
    """Puts the mirrored module in the place of the one that is asked for."""

    @override
    def exec_module(self, module: ModuleType) -> None:
        # Whatever stands in sys.modules after this call is what the import returns.
        sys.modules[module.__name__] = importlib.import_module(mirrored_name(module.__name__))


class _MirrorLoader(SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        # Never from cached bytecode: that is the original's, which has the same file.
        file = self.get_filename(fullname)
        tree = ast.parse(self.get_data(file), file)
        mirror_imports(tree)
        return compile(tree, file, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds mirrored modules, and has Lightning's, which others find, registered after import."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in REGISTRIES:
            others = [finder for finder in sys.meta_path if finder is not self]
            found = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next(filter(None, found), None)
            if spec is not None and spec.loader is not None:
                _register_after(spec.loader)
            return spec
        if fullname.startswith(f"{_MIRROR}."):
            return _mirrored_spec(fullname, path)
        if fullname.startswith(f"{_PACKAGE}.") and mirrored_name(fullname) != fullname:
            if is_installed("lightning") or not is_installed("pytorch_lightning"):
                return None
            return ModuleSpec(fullname, _AliasLoader())
        return None
