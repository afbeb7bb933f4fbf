"""Private names of torch and Lightning: all are there, and Lightning calls what ours replace."""

from __future__ import annotations

import ast
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import launchers as trainer_launchers
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from lightning_dear import private_names
from lightning_dear.fabric import DearFabricStrategy
from lightning_dear.private_names import PrivateName
from lightning_dear.strategy import DearStrategy
from tests.distributed.harness import run_ranks
from tests.lightning.fitting import dear, new_trainer
from tests.lightning.nets import Net, data
from tests.test_architecture import FILES, path_of, tree_of
from tests.test_architecture import private_names as own_names

NAMES = {key: one for key, one in vars(private_names).items() if isinstance(one, PrivateName)}
NAMES |= {f"INHERITED {n}": one for n, one in enumerate(private_names.INHERITED)}

# Attributes with an underscore that are no private names of torch or Lightning.
PUBLIC = {"os._exit", "sys._getframe", "LocalFileSystem._strip_protocol"}
DOCUMENTED = {"_replace", "_asdict", "_target_"}


def _adam() -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=True)


def _trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


# What has the attributes that only objects have, not their class.
MADE: dict[str, Callable[[], Any]] = {
    "torch.nn:Module": nn.Module,
    "torch:Tensor": lambda: torch.zeros(1),
    "torch.optim:Optimizer": _adam,
    "torch.utils.data:DataLoader": lambda: DataLoader([]),
    "torch.utils.hooks:RemovableHandle": lambda: nn.Module().register_forward_hook(print),
    "torch._dynamo.eval_frame:OptimizedModule": lambda: torch.compile(nn.Linear(2, 2)),
    "torch.distributed:ProcessGroupNCCL.Options": lambda: dist.ProcessGroupNCCL.Options(),
    "lightning.pytorch:LightningModule": pl.LightningModule,
    "lightning.fabric.utilities.distributed:_DatasetSamplerWrapper": lambda: (
        DistributedSamplerWrapper(SequentialSampler([]), 1, 0).dataset
    ),
    "lightning.pytorch:Trainer": _trainer,
    "lightning.pytorch.loops:_FitLoop": lambda: _trainer().fit_loop,
    "lightning.pytorch.loops:_TrainingEpochLoop": lambda: _trainer().fit_loop.epoch_loop,
    "lightning.pytorch.utilities:CombinedLoader": lambda: CombinedLoader([]),
    "lightning.pytorch.strategies:DDPStrategy": DDPStrategy,
    "lightning.fabric.strategies:DDPStrategy": FabricDDPStrategy,
    "lightning.pytorch.strategies.launchers:_MultiProcessingLauncher": lambda: (
        trainer_launchers._MultiProcessingLauncher(DDPStrategy())
    ),
}


DISPENSABLE = ("COALESCING", "FLIGHT_RECORD", "STOP_QUESTION")
"""Names without which the package does something else, or less."""


def holder_of(owner: str) -> Any:
    if owner in MADE:
        return MADE[owner]()
    module, _, names = owner.partition(":")
    found: Any = import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("key", NAMES)
def test_the_installed_version_has_it(key: str) -> None:
    one = NAMES[key]
    if "NCCL" in one.owner and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    if key == "IGNORED_NAMES":
        # Others put it into modules, for DDP to read.
        source = Path(nn.parallel.distributed.__file__).read_text()
        assert f"module.{one.name}" in source
    elif key in DISPENSABLE and not hasattr(holder_of(one.owner), one.name):
        pytest.skip("this version of torch has no such function")
    else:
        one.of(holder_of(one.owner))


def test_a_name_that_is_gone_is_told_with_the_way_out() -> None:
    gone = PrivateName("lightning.pytorch:Trainer", "_no_such_name")
    with pytest.raises(RuntimeError, match=r"'_no_such_name' of lightning.*TESTED_RANGES"):
        gone.of(SimpleNamespace())
    holder = SimpleNamespace()
    with pytest.warns(UserWarning, match="_no_such_name"):
        gone.replace_in(holder, 1)
    gone.restore_in(holder)
    gone.restore_in(holder)
    assert vars(holder) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gone.replace_in(SimpleNamespace(_no_such_name=0), 1)


def test_no_other_file_names_a_private_name() -> None:
    ours = {name for file in FILES for name in (*own_names(tree_of(file)), *_fields(file))}
    ours |= DOCUMENTED
    assert [found for file in FILES for found in _foreign(file, ours)] == []


def _fields(file: Path) -> list[str]:
    """What is assigned in bodies of classes."""
    bodies = [node.body for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
    targets = [
        target
        for one in chain(*bodies)
        if isinstance(one, ast.Assign | ast.AnnAssign)
        for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
    ]
    return [node.id for one in targets for node in ast.walk(one) if isinstance(node, ast.Name)]


def _foreign(file: Path, ours: set[str]) -> list[str]:
    """Reads of attributes that no class of ours has, and imports; operators of torch are none."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in ours:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{one.name}" for one in node.names if _is_private(one.name)]
    known = {one.name for one in private_names.INHERITED}
    return [
        f"{path_of(file)}: {one}"
        for one in found
        if not one.startswith("torch._foreach_") and one not in PUBLIC
        if not (one.startswith(("self.", "host.")) and one.partition(".")[2] in known)
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class _Stopped(pl.Callback):
    """Sends SIGTERM to its process in the third batch of rank 1."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _calls_of_a_fit() -> Counter[str]:
    """How often Lightning calls what is put in the place of each private name."""
    counts, replace_in = Counter[str](), PrivateName.replace_in

    def replace_counted(self: PrivateName, holder: Any, value: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[self.name] += 1
            return value(*args, **kwargs)

        replace_in(self, holder, counted if callable(value) else value)

    with mock.patch.object(PrivateName, "replace_in", replace_counted):
        trainer = new_trainer(dear(), _Stopped())
        with pytest.raises(SystemExit):
            trainer.fit(Net("mlp"), data("mlp", 96))
    return counts


def test_lightning_calls_what_stops_all_ranks() -> None:
    seen = run_ranks(_calls_of_a_fit, 2, init_process_group=False)
    asks = hasattr(_trainer().fit_loop.epoch_loop, private_names.STOP_QUESTION.name)
    for rank, counts in enumerate(seen):
        # Asked before every batch: four steps are made.
        assert counts[private_names.STOP_QUESTION.name] == (4 if asks else 0)
        assert counts[private_names.STOP_HANDLER.name] == rank


def test_lightning_starts_children_of_a_hydra_job_by_what_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = private_names.SCRIPT_LAUNCHER.of(trainer_launchers)(LightningEnvironment(), 2, 1)
    started: list[Any] = []
    holder = SimpleNamespace(initialized=lambda: True)
    hydra_config = SimpleNamespace(HydraConfig=holder)
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", hydra_config)
    monkeypatch.setattr("subprocess.Popen", lambda *a, **_: started.append(a[0]))
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    command = private_names.SUBPROCESS_COMMAND
    with mock.patch.object(subprocess_script, command.name, return_value=(["ours"], None)):
        launcher._call_children_scripts()
    assert started == [["ours"]]


def test_lightning_calls_what_our_strategies_override() -> None:
    name = private_names.CONFIGURE_LAUNCHER.name
    with mock.patch.object(DearStrategy, name) as configure:
        pl.Trainer(accelerator="cpu", devices=2, strategy="dear", logger=False)
    configure.assert_called_once_with()
    name = private_names.FABRIC_CONFIGURE_LAUNCHER.name
    with mock.patch.object(DearFabricStrategy, name) as configure:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=DearFabricStrategy())
    configure.assert_called_once_with()
    name = private_names.FABRIC_SETUP_DISTRIBUTED.name
    with mock.patch.object(DearFabricStrategy, name) as setup:
        FabricDDPStrategy.setup_environment(fabric.strategy)
    setup.assert_called_once_with()
