"""Registers this package's strategies with Lightning, and makes the mirror for `pytorch_lightning`.

Registration: after `import lightning_dear`, Lightning knows `strategy="dear"`, whether Lightning is
imported before or after this package. Neither Lightning nor torch is imported here. The names in
`START_METHODS` are registered as soon as a Lightning package is imported, and the module of the
strategy is imported when a Trainer or Fabric makes a strategy of such a name.

The mirror: a second copy of this package's classes that depend on Lightning, for
`pytorch_lightning`, made from the same source files. `lightning.pytorch` and `pytorch_lightning`
are two copies of one source, with different classes. So a Trainer of one package does not accept a
strategy that is derived from a class of the other. Lightning makes its second copy by rewriting
imports before a release. This package does the same while a module is imported:
`lightning_dear.pytorch_lightning.strategy` is `strategy/` with `lightning.pytorch` read as
`pytorch_lightning`, and so on for every folder in `MIRRORED`. Other folders exist once. Tracebacks
show the original files and lines. Mirrored classes can be pickled, since their modules can be
imported by name.

If `pytorch_lightning` is installed and `lightning` is not, `lightning_dear.strategy` and the other
folders in `MIRRORED` are the mirrored modules themselves. The applications in `lightning_dear.apps`
and the configs always use `lightning`.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
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
"""Name of a strategy -> its option `start_method`, which says how the ranks besides the first one
are started."""

REGISTRIES = {
    "lightning.pytorch.strategies": "lightning_dear:DearStrategy",
    "pytorch_lightning.strategies": "lightning_dear.pytorch_lightning:DearStrategy",
    "lightning.fabric.strategies": "lightning_dear.fabric:DearFabricStrategy",
    "lightning_fabric.strategies": "lightning_dear.pytorch_lightning.fabric:DearFabricStrategy",
}
"""Name of a Lightning module that has a registry of strategies -> "module:class" of this package's
strategy for this registry."""


def register_now_or_later() -> None:
    """Registers the strategies with all Lightning packages, now or once a package is imported.

    Registers at once with packages that are imported already. Adds a finder to `sys.meta_path`,
    unless an earlier call has done so. The finder registers with packages that are imported later,
    and makes the mirrored modules importable.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in REGISTRIES:
        if name in sys.modules:
            _register_in(sys.modules[name])


def register(registry: Any, create: Callable[..., Any]) -> None:
    """Adds the names in `START_METHODS` to one of Lightning's registries.

    Args:
        registry: Registry of strategies; mutated. Existing entries of these names are replaced.
        create: Function that Lightning calls with the strategy's options as keywords; it returns
            the strategy.
    """
    for name, start_method in START_METHODS.items():
        description = f"DeAR data parallel with `start_method` '{start_method}'"
        registry.register(name, create, description, override=True, start_method=start_method)


def _register_in(module: ModuleType) -> None:
    """Registers the strategies in a Lightning module whose name is a key of `REGISTRIES`."""
    names = ("StrategyRegistry", "STRATEGY_REGISTRY")  # In modules of a Trainer, of Fabric.
    registry = next(getattr(module, name) for name in names if hasattr(module, name))
    # The class is imported once a strategy is made.
    register(registry, lambda **options: resolve_name(REGISTRIES[module.__name__])(**options))


def _register_after(loader: Loader) -> None:
    """Makes `loader` register the strategies in the module that it executes next.

    Replaces `loader.exec_module` until its next call.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # The module keeps the loader, as `__loader__`. So the replacement is removed first.
        del vars(loader)["exec_module"]
        execute(module)
        _register_in(module)

    vars(loader)["exec_module"] = exec_module


# --- the mirror -----------------------------------------------------------------------------------


MIRRORED = ("callbacks", "doctor", "fabric", "strategy")
"""Folders of this package that are mirrored: those whose classes depend on Lightning's classes,
directly or through each other."""

_PACKAGE = "lightning_dear"
_MIRROR = "lightning_dear.pytorch_lightning"
_RENAMED = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    **{f"{_PACKAGE}.{module}": f"{_MIRROR}.{module}" for module in MIRRORED},
}


def mirrored_name(name: str) -> str:
    """Returns the name by which mirrored modules import what original modules import as `name`.

    That is another name for modules of Lightning and of the folders in `MIRRORED`. For all other
    modules it is `name` itself.
    """
    for original, mirrored in _RENAMED.items():
        if name == original or name.startswith(f"{original}."):
            return mirrored + name.removeprefix(original)
    return name


def mirror_imports(tree: ast.Module) -> None:
    """Renames the modules that `tree` imports to their mirrored names, in place.

    See `mirrored_name`. Nothing else has to be renamed, because this package imports in two forms
    only: `from package.module import name` and `import package.module as name`. `unclear_imports`
    in tests/test_mirror.py checks that.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            node.module = mirrored_name(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                alias.name = mirrored_name(alias.name)


def is_installed(package: str) -> bool:
    """Tells whether a top-level package of this name is installed. Does not import it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A plain folder of this name in sys.path has a spec, too, but without an origin.
    return spec is not None and spec.origin is not None


def _mirrored_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Returns the import spec of the mirrored module `fullname`.

    The spec's loader is a `_MirrorLoader` for the original file.

    Args:
        fullname: Name of a module in `lightning_dear.pytorch_lightning`.
        path: Folders in which the module's package is searched.

    Returns:
        The spec. None means that there is no such mirrored module.
    """
    original = _PACKAGE + fullname.removeprefix(_MIRROR)
    if mirrored_name(original) != fullname:
        return None
    if original.count(".") == 1:
        path = sys.modules[_PACKAGE].__path__
    found = PathFinder.find_spec(original, path)
    if found is None or found.origin is None:
        return None
    return importlib.util.spec_from_loader(fullname, _MirrorLoader(fullname, found.origin))


class _AliasLoader(Loader):
    """Loader that makes an import of a module return the mirrored module instead."""

    @override
    def exec_module(self, module: ModuleType) -> None:
        # The import statement gets what is in sys.modules after this call, not `module`.
        sys.modules[module.__name__] = importlib.import_module(mirrored_name(module.__name__))


class _MirrorLoader(SourceFileLoader):
    """Loader that compiles the source of an original module with renamed imports."""

    @override
    def get_code(self, fullname: str) -> CodeType:
        # Compiled anew at each import: cached bytecode of the file is that of the original module.
        file = self.get_filename(fullname)
        tree = ast.parse(self.get_data(file), file)
        mirror_imports(tree)
        return compile(tree, file, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finder in `sys.meta_path` that finds mirrored modules.

    It also makes Lightning's modules with a registry (see `REGISTRIES`) register this package's
    strategies once they are imported. It returns None for all other modules, so that the other
    finders find these.
    """

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
        is_mirrored = fullname.startswith(f"{_PACKAGE}.") and mirrored_name(fullname) != fullname
        if is_mirrored and not is_installed("lightning") and is_installed("pytorch_lightning"):
            return ModuleSpec(fullname, _AliasLoader())
        return None
