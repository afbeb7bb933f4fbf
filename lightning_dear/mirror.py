"""Our classes a second time, for `pytorch_lightning`, from the same source files.

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
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from typing_extensions import override

from lightning_dear.moved import AliasLoader

MIRRORED = ("callbacks", "fabric", "strategy")
"""The folders that import Lightning, themselves or through each other."""

_PACKAGE = "lightning_dear"
_MIRROR = "lightning_dear.pytorch_lightning"
_RENAMED = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    **{f"{_PACKAGE}.{module}": f"{_MIRROR}.{module}" for module in MIRRORED},
}
_NOT_SHARED = {f"{_PACKAGE}.DearStrategy", *_RENAMED}


def mirrored_name(name: str) -> str:
    """The module that takes the place of module `name` in the mirror; `name` itself if none."""
    for original, mirrored in _RENAMED.items():
        if name == original or name.startswith(f"{original}."):
            return mirrored + name.removeprefix(original)
    return name


def mirror_imports(tree: ast.Module, file: str) -> None:
    """Renames the modules that `tree` imports, in place.

    Args:
        tree: The syntax tree of one of our modules.
        file: Its path, for messages.

    Raises:
        ImportError: For a form of import in which the module cannot be renamed.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if node.module == "lightning" or (node.module == _PACKAGE and names & _NOT_SHARED):
                raise _unclear(node, file)
            node.module = mirrored_name(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = mirrored_name(alias.name)
                # Without `as`, the import binds the first part of the old name.
                if alias.name == "lightning" or (name != alias.name and alias.asname is None):
                    raise _unclear(node, file)
                alias.name = name


def install_mirror() -> None:
    """Makes the mirrored modules importable; imports none of them. A second call does nothing."""
    if not any(isinstance(finder, _MirrorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MirrorFinder())


def is_installed(package: str) -> bool:
    """Whether there is a package of this name, without dots; imports nothing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # Any folder of the name in sys.path has a spec, but no file behind it.
    return spec is not None and spec.origin is not None


class _MirrorFinder(MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{_MIRROR}."):
            return _mirrored_spec(fullname, path)
        if fullname.startswith(f"{_PACKAGE}.") and mirrored_name(fullname) != fullname:
            if is_installed("lightning") or not is_installed("pytorch_lightning"):
                return None
            return ModuleSpec(fullname, AliasLoader(mirrored_name(fullname)))
        return None


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


class _MirrorLoader(SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        # Never from cached bytecode: that is the original's, which has the same file.
        file = self.get_filename(fullname)
        tree = ast.parse(self.get_data(file), file)
        mirror_imports(tree, file)
        return compile(tree, file, "exec", dont_inherit=True)


def _unclear(node: ast.Import | ast.ImportFrom, file: str) -> ImportError:
    return ImportError(
        f"{file}, line {node.lineno}: `{ast.unparse(node)}` cannot be read for pytorch_lightning;"
        " write `from package.module import name`, or `import package.module as name`."
    )
