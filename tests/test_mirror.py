"""`strategy="dear"` for `pytorch_lightning` beside `lightning`, in one process."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dear
from lightning_dear import versions
from lightning_dear.registration import (
    MIRRORED,
    REGISTRIES,
    START_METHODS,
    mirror_imports,
    mirrored_name,
)
from lightning_dear.versions import MIRROR_RANGES, warn_outside_tested_range
from tests.distributed.harness import distributed
from tests.lightning.fitting import assert_differ, assert_same
from tests.test_architecture import FILES, import_graph, imports_library, module_of, tree_of

pytest.importorskip("pytorch_lightning")

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = {
    "lightning.pytorch": "lightning_dear",
    "pytorch_lightning": "lightning_dear.pytorch_lightning",
}
NOT_SHARED = {"lightning_dear.DearStrategy", *(f"lightning_dear.{room}" for room in MIRRORED)}
every_namespace = pytest.mark.parametrize("namespace", NAMESPACES)

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def strategy_of(namespace: str) -> Any:
    return importlib.import_module(NAMESPACES[namespace]).DearStrategy


# --- one process, both packages ---------------------------------------------------------------


def fit(namespace: str, strategy: Any) -> list[list[Tensor]]:
    """Weights after every batch, as a callback of that package sees them."""
    pl = importlib.import_module(namespace)
    environments = importlib.import_module(f"{namespace}.plugins.environments")
    seen: list[list[Tensor]] = []

    class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.layers(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    class Recorder(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append([parameter.detach().clone() for parameter in pl_module.parameters()])

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randn(24, 3))
    trainer = pl.Trainer(
        strategy=strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[environments.TorchElasticEnvironment()],
        callbacks=[Recorder()],
        **QUIET,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=3))
    return seen


@distributed(world_sizes=[2])
def test_both_packages_train_like_ddp_in_one_process() -> None:
    options = {"timeout": timedelta(seconds=40)}
    runs = {}
    for namespace in ("pytorch_lightning", "lightning.pytorch", "pytorch_lightning"):
        ddp = importlib.import_module(f"{namespace}.strategies").DDPStrategy
        theirs = fit(namespace, ddp(**options))
        ours = runs[namespace] = fit(namespace, strategy_of(namespace)(fusion="none", **options))
        assert len(ours) == 8
        assert_same(ours, theirs, f"weights under {namespace}")
        assert_differ(ours[0], ours[-1])
    assert_same(runs["pytorch_lightning"], runs["lightning.pytorch"], "weights of the two")


@every_namespace
@pytest.mark.parametrize("name", START_METHODS)
def test_names_give_the_strategy_of_the_trainer(namespace: str, name: str) -> None:
    pl = importlib.import_module(namespace)
    strategies = importlib.import_module(f"{namespace}.strategies")
    strategy = pl.Trainer(strategy=name, devices=2, **QUIET).strategy
    assert type(strategy) is strategy_of(namespace)
    assert isinstance(strategy, strategies.DDPStrategy)
    assert strategy._start_method == START_METHODS[name]


@every_namespace
def test_names_are_those_that_the_class_registers(namespace: str) -> None:
    registry = importlib.import_module(f"{namespace}.strategies").StrategyRegistry
    eager = type(registry)()
    strategy_of(namespace).register_strategies(eager)
    keys = ("strategy_name", "description", "init_params")
    assert {name: [data[key] for key in keys] for name, data in eager.items()} == {
        name: [registry[name][key] for key in keys] for name in START_METHODS
    }


@pytest.mark.parametrize("namespaces", [list(NAMESPACES), list(NAMESPACES)[::-1]])
def test_the_other_package_refuses_an_instance(namespaces: list[str]) -> None:
    one, other = namespaces
    trainer = importlib.import_module(one).Trainer
    with pytest.raises(ValueError, match=f"an instance of `{one}.strategies.Strategy`"):
        trainer(strategy=strategy_of(other)(), devices=2, **QUIET)


def test_the_engine_exists_once() -> None:
    ours = importlib.import_module("lightning_dear.strategy.dear")
    mirrored = importlib.import_module("lightning_dear.pytorch_lightning.strategy.dear")
    assert mirrored.Pipeline is ours.Pipeline
    assert mirrored.CompressionSchedule is not ours.CompressionSchedule
    assert mirrored.refusals is not ours.refusals
    assert importlib.util.find_spec("lightning_dear.pytorch_lightning.engine") is None


def test_mirrored_classes_can_be_pickled() -> None:
    for name in ("DearStrategy", "DearMonitor", "TimelineCallback"):
        mirrored = getattr(importlib.import_module(NAMESPACES["pytorch_lightning"]), name)
        assert mirrored.__module__.startswith("lightning_dear.pytorch_lightning.")
        assert pickle.loads(pickle.dumps(mirrored)) is mirrored
    strategy = strategy_of("pytorch_lightning")
    assert type(pickle.loads(pickle.dumps(strategy()))) is strategy


def test_source_and_tracebacks_are_the_originals() -> None:
    ours, mirrored = map(strategy_of, NAMESPACES)
    assert inspect.getsource(mirrored) == inspect.getsource(ours)
    assert inspect.getsourcefile(mirrored) == str(ROOT / "lightning_dear/strategy/dear.py")
    with pytest.raises(ValueError, match="does not take static_graph") as caught:
        mirrored(static_graph=True)
    *_, calls, raises = traceback.extract_tb(caught.value.__traceback__)
    assert Path(calls.filename).name == "dear.py"
    assert "checked_options(" in (calls.line or "")
    assert Path(raises.filename).name == "refusals.py"
    assert "raise ValueError(" in (raises.line or "")


# --- the rules themselves -------------------------------------------------------------------------


def unclear_imports(tree: ast.Module) -> list[str]:
    """Imports of which the mirror cannot rename the module, as they are written."""
    unclear: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("lightning", "lightning_dear"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            is_shared = node.module != "lightning" and names.isdisjoint(NOT_SHARED)
            unclear += [] if is_shared else [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                # Without `as`, the import binds the first part of the old name.
                is_renamed = mirrored_name(alias.name) != alias.name and alias.asname is None
                if alias.name == "lightning" or is_renamed:
                    unclear.append(ast.unparse(node))
    return unclear


@pytest.mark.parametrize(
    ("original", "mirrored"),
    [
        ("import lightning.pytorch as pl", "import pytorch_lightning as pl"),
        ("from lightning.fabric.a import b", "from lightning_fabric.a import b"),
        (
            "from lightning_dear.callbacks.monitor import DearMonitor as D",
            "from lightning_dear.pytorch_lightning.callbacks.monitor import DearMonitor as D",
        ),
        (
            "def f():\n    from lightning.pytorch import Trainer",
            "def f():\n    from pytorch_lightning import Trainer",
        ),
        ("from lightning_dear.engine.pipeline import Pipeline",) * 2,
        ("from lightning_dear import bucket",) * 2,
        ("from lightning_utilities import x",) * 2,
        ("import torch, lightning_dear.planning",) * 2,
    ],
)
def test_imports_are_renamed(original: str, mirrored: str) -> None:
    tree = ast.parse(original)
    mirror_imports(tree)
    assert not unclear_imports(ast.parse(original))
    assert ast.unparse(tree) == mirrored


@pytest.mark.parametrize(
    "line",
    [
        "import lightning",
        "import lightning.pytorch",
        "import lightning_dear.callbacks.monitor",
        "from lightning import Trainer",
        "from lightning import pytorch as pl",
        "from lightning_dear import callbacks",
        "from lightning_dear import paths, DearStrategy",
    ],
)
def test_imports_that_cannot_be_renamed_are_found(line: str) -> None:
    assert unclear_imports(ast.parse(f"import torch\n{line}")) == [line]


def test_our_modules_have_no_imports_that_cannot_be_renamed() -> None:
    """Write `from package.module import name`, or `import package.module as name`."""
    rooms = [ROOT / "lightning_dear" / room for room in MIRRORED]
    mirrored = [file for file in FILES if {*file.parents} & {*rooms}]
    assert len(mirrored) > 10
    assert {
        str(file): found for file in mirrored if (found := unclear_imports(tree_of(file)))
    } == {}


def test_every_module_that_needs_a_mirror_has_one() -> None:
    """Else the mirrored strategy would mix the two packages; the names belong in `MIRRORED`."""
    graph = import_graph({module_of(file): tree_of(file) for file in FILES})
    lightning = {module_of(file) for file in FILES if imports_library(tree_of(file), "lightning")}
    todo = [name for name in graph if mirrored_name(name) != name]
    reached: set[str] = set()
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo.extend(graph[name])
    needs = lightning & reached
    while more := {name for name in reached - needs if graph[name] & needs}:
        needs |= more
    assert sorted(name for name in needs if mirrored_name(name) == name) == []


def test_a_name_that_only_begins_alike_is_kept() -> None:
    for name in ("lightning.pytorch_x", "lightning_dear.supports", "lightning_dear.strategy_x"):
        assert mirrored_name(name) == name


def test_the_mirror_has_tested_versions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(MIRROR_RANGES) == ["python", "torch", "pytorch-lightning"]
    installed = {"torch": "2.13.0", "lightning": "2.6.0", "pytorch-lightning": "2.4.0"}
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    monkeypatch.setattr(versions, "_named", set())
    with pytest.warns(UserWarning, match=r"tested with pytorch-lightning 2\.4\.0"):
        warn_outside_tested_range(MIRROR_RANGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_outside_tested_range(MIRROR_RANGES)


def test_every_registry_is_there() -> None:
    assert {f"{namespace}.strategies" for namespace in NAMESPACES} == {
        module for module, ours in REGISTRIES.items() if ours.endswith(":DearStrategy")
    }
    assert lightning_dear.DearStrategy is strategy_of("lightning.pytorch")
