"""The rules that keep the package readable, read off its syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_dear"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Room:
    """One row of the table: what a room, or a module at the package's root, may import.

    Attributes:
        imports: Other rooms of ours, also within functions and for types alone.
        torch: Whether torch and torchmetrics.
        distributed: Whether torch.distributed; a tuple names the files that may.
        lightning: Whether Lightning.
        hydra: Whether Hydra; a tuple names the files that may.
    """

    imports: tuple[str, ...] = ()
    torch: bool = True
    distributed: bool | tuple[str, ...] = False
    lightning: bool = False
    hydra: bool | tuple[str, ...] = False


_BASE = ("collectives", "telemetry", "planning", "torch_modes", "names", "private_names")
_EXCHANGE = ("bucket", "compression", *_BASE)
_OPTIMIZERS = ("exchange", *_EXCHANGE)
_CHECKPOINT = ("optimizers", *_OPTIMIZERS)
_ENGINE = ("checkpoint", *_CHECKPOINT)
_TUNING = ("engine", *_ENGINE)
_CALLBACKS = ("tuning", *_TUNING)
_STRATEGY = ("callbacks", "local_steps", "registration", "versions", "paths", *_CALLBACKS)
_STUDIES = ("strategy", "workloads", "emulation", "simulator", *_STRATEGY)

ROOMS = {
    # What training is made of, from the top down.
    "fabric": Room(("strategy", *_STRATEGY), lightning=True),
    "strategy": Room(_STRATEGY, lightning=True, hydra=("launchers.py",)),
    "callbacks": Room(_CALLBACKS, lightning=True),
    "local_steps": Room(("engine", *_ENGINE)),
    "tuning": Room(_TUNING),
    "engine": Room(_ENGINE),
    "checkpoint": Room(_CHECKPOINT),
    "optimizers": Room(_OPTIMIZERS),
    "exchange": Room(_EXCHANGE),
    "bucket": Room(("compression", *_BASE)),
    "compression": Room(_BASE),
    "telemetry": Room(("collectives", "torch_modes", "names", "private_names")),
    "collectives": Room(("torch_modes", "names", "private_names"), distributed=True),
    "planning": Room(("names",)),
    # What predicts, measures and compares. Nothing above imports it.
    "simulator": Room(("local_steps", "planning", "telemetry", "names"), torch=False),
    "workloads": Room(
        ("exchange", "engine", *_EXCHANGE),
        lightning=True,
        distributed=("task.py",),
    ),
    "emulation": Room(torch=False),
    # What other strategies are made of, and what that costs.
    "studies": Room(_STUDIES, distributed=True, lightning=True),
    # Messages between two ranks, which training never sends but a measurement of a link does.
    "doctor": Room(("studies", *_STUDIES), distributed=True, lightning=True),
    "apps": Room(
        ("doctor", "studies", *_STUDIES), distributed=("doctor/",), lightning=True, hydra=True
    ),
    # The package's root.
    "__init__": Room(("registration", "strategy", "versions"), torch=False),
    "ray": Room(("names", "strategy"), torch=False),
    "pytorch_lightning": Room(("callbacks", "strategy", "versions"), torch=False, lightning=True),
    "_plugins": Room(("__init__", "paths"), torch=False, hydra=True),
    "registration": Room(torch=False),
    "versions": Room(torch=False),
    "paths": Room(torch=False),
    "names": Room(torch=False),
    "private_names": Room(torch=False),
    "torch_modes": Room(("private_names",)),
}
"""The one table of who may import whom, top-down like the package itself."""

# Private names of torch and Lightning that ours have, too, or that are set on theirs.
THEIRS = {
    "_hydra_subprocess_cmd",
    "_launcher",
    "_modules",
    "_optimizer",
    "_parameters",
    "_strategy",
    "_timeout",
}

DO_NOT_TRAIN = ("apps", "doctor", "studies", "simulator", "workloads", "emulation")

# Where torch.distributed.checkpoint, and nothing else of torch.distributed, writes and reads.
CHECKPOINTS = "checkpoint/storage.py"

# Folders of tests that are no room's: what many rooms take part in, what is removed, what helps.
OTHER_TESTS = {
    "elastic",
    "lightning",
    "conf",
    "gpu",
    "net",
    "soak",
    "netns",
    "benchmarks",
    "mutations",
    "streams",
    "training",
    "distributed",
}

# Figures that may only fall, until each is at its goal.
MAX_LOOSE_MODULES = 9
MAX_FILE_LINES = 500
MAX_SMALL_FILES_OF_ONE_IMPORTER = 0

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def path_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(module: str) -> str:
    """The room of a module's name; a module at the root is a room of its own."""
    return "__init__" if module == PACKAGE.name else module.split(".")[1]


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
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and ast.unparse(node) == "torch.distributed"
        ):
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


def room_in(file: Path) -> str:
    return room_of(module_of(file))


MODULES = {module_of(file) for file in FILES}


@cache
def names_in(file: Path) -> frozenset[str]:
    return frozenset(imports_of(tree_of(file)))


@cache
def targets_in(file: Path) -> frozenset[str]:
    """The modules of ours that `file` imports, wherever in it."""
    found = {target_of(name, MODULES) for name in names_in(file)} - {None, module_of(file)}
    return frozenset(str(target) for target in found)


def may(file: Path, column: bool | tuple[str, ...]) -> bool:
    """Whether a column of the table allows something in `file`."""
    within = path_of(file).partition("/")[2]
    return column if isinstance(column, bool) else within.startswith(column)


def test_rooms_import_as_the_table_says() -> None:
    wrong = [
        f"{path_of(file)} imports {target}"
        for file in FILES
        for target in sorted(targets_in(file))
        if room_of(target) not in {*ROOMS[room_in(file)].imports, room_in(file)}
    ]
    assert wrong == []


def test_libraries_are_imported_where_the_table_says() -> None:
    assert [wrong for file in FILES for wrong in forbidden_in(file)] == []


def forbidden_in(file: Path) -> list[str]:
    """What `file` imports of other libraries although its room may not."""
    row, names = ROOMS[room_in(file)], names_in(file)
    if may(file, row.distributed):
        names -= {name for name in names if belongs_to(name, "torch.distributed")}
    elif path_of(file) == CHECKPOINTS:
        names -= {name for name in names if belongs_to(name, "torch.distributed.checkpoint")}
    forbidden = {
        "torch.distributed",
        *(() if row.lightning else ("lightning", "pytorch_lightning")),
        *(() if may(file, row.hydra) else ("hydra", "omegaconf")),
        *(() if row.torch else ("torch", "torchmetrics")),
    }
    found = [name for name in sorted(names) if any(belongs_to(name, one) for one in forbidden)]
    return [f"{path_of(file)} imports {name}" for name in found]


def private_names(tree: ast.AST) -> Iterator[str]:
    """What classes call their own: attributes that are set on `self`, and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, Function):
            yield node.name


def private_reads(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes with one underscore in front, of anything but `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if not node.attr.startswith("__") and owner not in ("self", "cls", "super()"):
                yield node


def test_no_private_attribute_of_another_object_is_read() -> None:
    trained = [file for file in FILES if room_in(file) not in DO_NOT_TRAIN]
    ours = {name for file in FILES for name in private_names(tree_of(file))} - THEIRS
    found = [
        f"{path_of(file)}:{node.lineno} {ast.unparse(node)}"
        for file in trained
        for node in private_reads(tree_of(file))
        if node.attr in ours
    ]
    assert found == []


def test_the_strategy_loads_no_library_that_few_need() -> None:
    few = {"hydra", "omegaconf", "sklearn", "torch.distributed.checkpoint"}
    code = (
        f"import sys, lightning_dear; lightning_dear.DearStrategy;print(*{few} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_the_table_has_no_circles() -> None:
    assert find_circle({name: set(row.imports) & set(ROOMS) for name, row in ROOMS.items()}) is None
    assert set(ROOMS) == {room_in(file) for file in FILES}


def test_folders_of_tests_are_rooms() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert folders - set(ROOMS) == OTHER_TESTS


def test_files_and_functions_are_short() -> None:
    lines = {path_of(file): len(file.read_text().splitlines()) for file in FILES}
    assert {n: num for n, num in lines.items() if num > MAX_FILE_LINES} == {}
    assert [f"{path_of(file)}: {f}" for file in FILES for f in long_functions(tree_of(file))] == []


def test_figures_only_fall() -> None:
    loose = [file for file in FILES if file.parent == PACKAGE]
    assert len(loose) <= MAX_LOOSE_MODULES
    assert len(small_files_of_one_importer()) <= MAX_SMALL_FILES_OF_ONE_IMPORTER


def small_files_of_one_importer() -> list[str]:
    """Files under 130 lines that one other file alone imports: parts of that one, perhaps."""
    importers = Counter(target for file in FILES for target in targets_in(file))
    return [
        path_of(file)
        for file in FILES
        if room_in(file) not in DO_NOT_TRAIN
        and importers[module_of(file)] == 1
        and file.name != "__init__.py"
        and len(file.read_text().splitlines()) < 130
    ]


def test_what_is_public_has_a_docstring() -> None:
    assert [
        f"{path_of(file)}: {name}" for file in FILES for name in undocumented(tree_of(file))
    ] == []


def test_no_import_circles() -> None:
    assert find_circle(import_graph({module_of(file): tree_of(file) for file in FILES})) is None


def test_the_checkers_are_configured() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["strict"] is True
    assert tools["mypy"]["files"] == ["lightning_dear", "recipes"]
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
