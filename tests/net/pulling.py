"""A small training whose bits hardly depend on the machine, and how fixtures go on with it.

Every layer pulls its weights towards targets of the step and the rank, element by element: no
matrix is multiplied, so that no kernel's order of summation is in the weights.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.net.finding import find
from tests.net.hashing import digest

FIXTURES = Path(__file__).parent / "fixtures"
WORLD_SIZE = 2
NUM_MORE = 3
"""Steps that are trained after resuming."""

SHAPES = ((31, 7), (31,), (17, 31), (17,), (3, 17), (3,))
KINDS = ("dense", "int8", "oktopk", "masters", "tuned")
SAVED_AT = dict.fromkeys(KINDS, 4) | {"tuned": 27}
"""A search needs 1 + 3 steps and 7 for each plan."""

NEW_KEYS = {"optimizer_class", "compressor"}
"""Of an optimizer's state, and of its residuals, since then: only who reads them may miss them."""

FORMS: dict[str, Sequence[str]] = dict.fromkeys(KINDS, ("file", "folder")) | {"tuned": ("file",)}


class _Pull(nn.Module):
    """Adds half the squared distance of its weight from a target."""

    def __init__(self, shape: Sequence[int], number: int) -> None:
        super().__init__()
        steps = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
        self.weight = nn.Parameter(((steps * 37 + number) % 101 / 101 - 0.5).view(*shape))
        self.number = number

    def forward(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * self.number + rank)
        drawn = torch.randint(-512, 512, self.weight.shape, generator=generator)
        target = (drawn / 256).to(self.weight.dtype)
        return 0.5 * (self.weight - target).square().sum()


class PullNet(LightningModule):
    """The layers one after the other, under Adam with two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Pull(shape, n) for n, shape in enumerate(SHAPES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        return torch.stack([layer(step, rank) for layer in self.layers]).sum()

    def configure_optimizers(self) -> Any:
        own = list(self.parameters())
        groups = [
            {"params": [p for p in own if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in own if p.dim() <= 1], "lr": 0.03},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def planner_of(kind: str) -> Any:
    """Several buckets even for so few numbers."""
    if kind != "tuned":
        fusion = find("planning", "ThresholdFusion")
        return fusion(bucket_cap_mb=0.001, first_bucket_cap_mb=0.0005)
    return find("planning", "BayesianFusion")(
        num_trials=3,
        min_cap_mb=0.0005,
        max_cap_mb=0.01,
        bucket_cap_mb=0.001,
        first_bucket_cap_mb=0.0005,
    )


def strategy_of(kind: str, form: str, planner: Any) -> Any:
    """The strategy that a fixture was written with."""
    from lightning_dear import DearStrategy

    options: dict[str, Any] = {}
    if kind == "int8":
        options["compressor"] = "int8"
    elif kind == "oktopk":
        kind_of = type(find("compression", "resolve_compressor")("oktopk"))
        options["compressor"] = kind_of(density=0.1)
    return DearStrategy(fusion=planner, save_distributed_checkpoint=form == "folder", **options)


class Watcher(Callback):
    """Saves at one step, and keeps copies of what was loaded and of what is there at the end.

    Args:
        save_at: The step after which to save; None for never.
        path: Where to.
    """

    def __init__(self, save_at: int | None = None, path: Path | None = None) -> None:
        self.save_at, self.path = save_at, path
        self.loaded: Any = None
        self.ended: Any = None
        self.plan: Any = None
        self.was_searching: list[bool] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loaded = self._all(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        tuners = [one for one in trainer.callbacks if hasattr(one, "is_searching")]
        self.was_searching += [one.is_searching for one in tuners]
        if trainer.global_step == self.save_at and self.path is not None:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended = self._all(trainer, pl_module)
        with tempfile.TemporaryDirectory() as folder:
            trainer.strategy.save_plan(Path(folder) / "plan.json")
            self.plan = json.loads((Path(folder) / "plan.json").read_text())

    def _all(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        (optimizer,) = trainer.optimizers
        state = trainer.strategy.optimizer_state(optimizer, on_all_ranks=True)
        state = without_new(_as_plain(state))
        return {"weights": _as_plain(pl_module.state_dict()), "optimizer": state}


def _as_plain(value: Any) -> Any:
    """Copies of tensors in plain dicts and lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _as_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(one) for one in value]
    return value


def fit(kind: str, form: str, watcher: Watcher, max_steps: int, ckpt: Path | None = None) -> Any:
    """Trains on this rank to `max_steps`. Collective, blocks.

    Returns:
        The strategy.
    """
    for namespace in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{namespace}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    torch.manual_seed(5)
    planner = planner_of(kind)
    if kind == "tuned" and ckpt is not None:
        planner.search = _refuse_search
    strategy = strategy_of(kind, form, planner)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        precision="bf16-true" if kind == "masters" else "32-true",
        callbacks=[watcher],
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader = DataLoader(TensorDataset(torch.zeros(100)), batch_size=1)
    trainer.fit(PullNet(), loader, ckpt_path=None if ckpt is None else str(ckpt))
    return strategy


def _refuse_search(*_: Any) -> Any:
    raise AssertionError("A plan that was found already is searched for again.")


def resume(kind: str, form: str, again: Path) -> dict[str, Any]:
    """Goes on from a fixture, and saves once more at the end to `again`.

    A file's state is read as whole tensors; so is a folder's, by a strategy that saves files.

    Returns:
        Hashes of what was loaded and of what is there at the end, weights, and the plan.
    """
    last = SAVED_AT[kind] + NUM_MORE
    watcher = Watcher(last, again)
    fit(kind, "file", watcher, last, FIXTURES / f"{kind}.{form}")
    return {
        "loaded": {key: digest(value) for key, value in watcher.loaded.items()},
        "ended": digest(watcher.ended),
        "weights": watcher.ended["weights"],
        "plan": watcher.plan,
        "searched": any(watcher.was_searching),
    }


def written(kind: str, form: str, path: Path) -> dict[str, Any]:
    """Trains from the start as the fixture did and saves to `path`; what comes after, too."""
    watcher = Watcher(SAVED_AT[kind], path)
    fit(kind, form, watcher, SAVED_AT[kind])
    return {"plan": watcher.plan, "searched": any(watcher.was_searching)}


def structure(value: Any) -> Any:
    """Keys, types, dtypes and shapes, without values."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return {repr(key): structure(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, list | tuple):
        return [structure(one) for one in value]
    return type(value).__name__


def saved(path: Path) -> dict[str, Any]:
    """What a file or a folder holds, without the version of Lightning and keys that came later."""
    whole = find("folder", "load")(path) if path.is_dir() else torch.load(path, weights_only=True)
    whole["optimizer_states"] = [without_new(state) for state in whole["optimizer_states"]]
    return {key: value for key, value in whole.items() if key != "pytorch-lightning_version"}


def without_new(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state without keys that 7283dee did not write."""
    return {
        key: without_new(value) if key == "residuals" else value
        for key, value in state.items()
        if key not in NEW_KEYS
    }


def files_in(path: Path) -> list[str]:
    """Names of all files of a folder, without the id of the save; of a file, none."""
    names = [str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()]
    return sorted(re.sub(r"__(\d+)_[0-9a-f-]{36}_", r"__\1_", name) for name in names)


def machine() -> str:
    """What bits may depend on."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
