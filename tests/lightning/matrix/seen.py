"""What one fit showed, and how two of them compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from tests.lightning.fitting import assert_same, buffers
from tests.lightning.nets import copies
from tests.training.models import distance

Series = dict[str, list[list[Tensor]]]
"""Name -> per step, or per call, some tensors."""


@dataclass
class Seen:
    """What one fit showed.

    Attributes:
        series: "weights", "averages" (EMA), "averaged buffers", "buffers", "rates" (learning
            rates and betas) and "scale" in every `on_train_batch_end`; "losses"; "validated"; what
            the module noted, under the names it gave; "weights after fit", "buffers after fit".
        num_steps: Optimizer steps taken.
    """

    series: Series
    num_steps: int


@dataclass
class Watch(Callback):
    """A user's callback that reads everything at the end of every batch."""

    series: Series = field(default_factory=dict)

    def add(self, name: str, tensors: Sequence[Any]) -> None:
        """Keeps copies of `tensors` as the next entry of series `name`."""
        kept = [torch.as_tensor(tensor).detach().clone() for tensor in tensors]
        self.series.setdefault(name, []).append(kept)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.add("weights", copies(pl_module))
        self.add("buffers", buffers(pl_module))
        self.add("rates", [_rates(optimizer) for optimizer in trainer.optimizers])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            average = getattr(callback, "_average_model", None)
            if average is not None:
                average = getattr(average, "module", average)
                self.add("averages", copies(average))
                self.add("averaged buffers", buffers(average))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.add("scale", [scaler.get_scale()])


def _rates(optimizer: torch.optim.Optimizer) -> Tensor:
    keys = ("lr", "momentum", "weight_decay")
    rates = [float(group[key]) for group in optimizer.param_groups for key in keys if key in group]
    betas = [beta for group in optimizer.param_groups for beta in group.get("betas", ())]
    return torch.tensor([*rates, *betas], dtype=torch.float64)


def gather_seen(trainer: Trainer, module: LightningModule, watch: Watch | None) -> Seen:
    """All series of a fit that is over."""
    series: Series = {} if watch is None else dict(watch.series)
    series["losses"] = [[loss] for loss in getattr(module, "losses", [])]
    series["validated"] = getattr(module, "validated", [])
    series.update(getattr(module, "noted", {}))
    series["weights after fit"] = [copies(module)]
    series["buffers after fit"] = [buffers(module)]
    return Seen({name: entries for name, entries in series.items() if entries}, trainer.global_step)


def compare(ours: list[list[Tensor]], theirs: list[list[Tensor]], limit: float, what: str) -> None:
    """Raises `AssertionError` unless equal by the bit (`limit` 0), or as near as `limit`."""
    if limit == 0:
        assert_same(ours, theirs, what)
        return
    assert len(ours) == len(theirs), f"{what}: {len(ours)} against {len(theirs)}"
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert [one.shape for one in left] == [one.shape for one in right], f"{what}[{number}]"
        if not left or torch.equal(_flat(left), _flat(right)):
            continue
        measured = distance(left, right)
        assert measured <= limit, f"{what}[{number}]: {measured:.1e} apart, allowed {limit:.0e}"


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])
