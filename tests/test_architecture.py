"""The rules that keep the package readable, read off its syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_dear"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Besides collectives.py: ending the default process group after a job, FSDP2's `fully_shard`, and
# messages between two ranks, which training never sends but a measurement of a link does, and what
# other strategies are made of, and what that costs.
DISTRIBUTED_ROOMS = (
    "collectives.py",
    "groups.py",
    "native.py",
    "pairwise.py",
    "rendezvous.py",
    "apps/job.py",
    "workloads/task.py",
    "workloads/replay/sharding.py",
    "link_probe.py",
    "ddp_probe.py",
    "sharding_host_probe.py",
    "sharding_probe.py",
    "benchmarking/competitors.py",
)
# Where torch.distributed.checkpoint, and nothing else of torch.distributed, writes and reads.
CHECKPOINT_ROOM = "checkpoint/storage.py"
HOST_ROOMS = (
    "pytorch_lightning/",
    "strategy.py",
    "support.py",
    "precision.py",
    "gradient_access.py",
    "checkpoint_access.py",
    "checkpoint_io.py",
    "launcher.py",
    "multiprocessing_launcher.py",
    "callbacks/",
    "fabric/",
    "apps/",
    "workloads/",
    "benchmarking/",
)
HYDRA_ROOMS = ("launcher.py", "apps/", "_plugins/")
TORCH_FREE_ROOMS = (
    "__init__.py",
    "mirror.py",
    "registration.py",
    "emulation/",
    "simulator/",
    "_plugins/",
    "paths.py",
    "versions.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every dotted name imported anywhere in `tree`; `torch.distributed` also as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def imports_library(tree: ast.AST, *names: str) -> bool:
    return any(belongs_to(found, name) for found in imports_of(tree) for name in names)


def belongs_to(found: str, name: str) -> bool:
    return found == name or found.startswith(f"{name}.")


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: nothing inside functions, nothing for types only."""
    todo: list[ast.AST] = [node for node in tree.body if not is_type_checking(node)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_of(node)
        elif not isinstance(node, Function | ast.Lambda):
            todo.extend(n for n in ast.iter_child_nodes(node) if not is_type_checking(n))


def target_of(name: str, modules: set[str]) -> str | None:
    """The module of ours behind an imported name: the name itself or what it is a part of."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def import_graph(files: dict[str, ast.Module]) -> dict[str, set[str]]:
    modules = set(files)
    return {
        module: {
            target
            for name in imports_when_loaded(tree)
            if (target := target_of(name, modules)) and target != module
        }
        for module, tree in files.items()
    }


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for target in sorted(graph[module]):
            if circle := visit(target, [*path, module]):
                return circle
        done.add(module)
        return None

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), None)


def long_functions(tree: ast.AST) -> list[str]:
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def inherits_docstring(node: Function) -> bool:
    """An override and a property's setter are documented where they are declared."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(decorators & {"override", "overload", "setter", "deleter"})


def undocumented(tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree) is None and tree.body:
        yield "the module"
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            todo.extend(node.body)
        elif inherits_docstring(node):
            continue
        if ast.get_docstring(node) is None:
            yield node.name


every_file = pytest.mark.parametrize("file", FILES, ids=room_of)


@every_file
def test_only_collectives_talks_to_torch_distributed(file: Path) -> None:
    names = list(imports_of(tree_of(file)))
    if room_of(file) == CHECKPOINT_ROOM:
        names = [name for name in names if not name.startswith("torch.distributed.checkpoint.")]
    allowed = room_of(file) in DISTRIBUTED_ROOMS
    assert allowed or not any(belongs_to(name, "torch.distributed") for name in names)


@every_file
def test_only_the_host_side_imports_lightning(file: Path) -> None:
    allowed = room_of(file).startswith(HOST_ROOMS)
    assert allowed or not imports_library(tree_of(file), "lightning", "pytorch_lightning")


@every_file
def test_only_command_lines_and_plugin_import_hydra(file: Path) -> None:
    allowed = room_of(file).startswith(HYDRA_ROOMS)
    assert allowed or not imports_library(tree_of(file), "hydra", "omegaconf")


@every_file
def test_torch_free_modules_import_no_torch(file: Path) -> None:
    if room_of(file).startswith(TORCH_FREE_ROOMS):
        assert not imports_library(tree_of(file), "torch", "torchmetrics")


@every_file
def test_files_and_functions_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_FILE_LINES
    assert long_functions(tree_of(file)) == []


@every_file
def test_what_is_public_has_a_docstring(file: Path) -> None:
    assert list(undocumented(tree_of(file))) == []


def test_no_import_circles() -> None:
    assert find_circle(import_graph({module_of(file): tree_of(file) for file in FILES})) is None


def test_the_checkers_are_configured() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["strict"] is True
    assert tools["mypy"]["files"] == ["lightning_dear"]
    assert {"E", "F", "I", "UP", "B", "SIM", "RET", "D", "ANN"} <= set(
        tools["ruff"]["lint"]["select"]
    )
    assert {"--strict-markers", "--strict-config"} <= set(tools["pytest"]["ini_options"]["addopts"])


# The rules themselves: each must object to what it is there for.


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ndef f():\n    torch.distributed.barrier()",
        "def f():\n    import torch.distributed",
    ],
)
def test_every_way_to_torch_distributed_is_seen(source: str) -> None:
    assert imports_library(ast.parse(source), "torch.distributed")


def test_a_name_that_only_begins_alike_is_another_library() -> None:
    tree = ast.parse("import lightning_dear.paths, torchmetrics")
    assert not imports_library(tree, "lightning", "torch")


@pytest.mark.parametrize(
    ("b_source", "circle"),
    [
        ("from p.a import x", ["p.a", "p.b", "p.a"]),
        ("import p.a", ["p.a", "p.b", "p.a"]),
        ("try:\n    import p.a\nexcept ImportError:\n    pass", ["p.a", "p.b", "p.a"]),
        ("def f():\n    import p.a", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a", None),
    ],
)
def test_circles_are_found(b_source: str, circle: list[str] | None) -> None:
    files = {"p.a": ast.parse("from p import b"), "p.b": ast.parse(b_source)}
    assert find_circle(import_graph(files)) == circle


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (undocumented, "x = 1"),
        (undocumented, "'''M.'''\ndef f():\n    return 1"),
        (undocumented, "'''M.'''\nclass C:\n    '''C.'''\n    def f(self):\n        return 1"),
    ],
)
def test_long_and_undocumented_code_is_found(
    rule: Callable[[ast.Module], object], source: str
) -> None:
    found = rule(ast.parse(source))
    assert list(found) != []  # type: ignore[call-overload]
