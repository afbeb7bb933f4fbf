"""Rows: callbacks that average weights, and one that prunes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging

from tests.lightning.matrix.nets import RowNet, conv, mlp
from tests.lightning.matrix.rows import (
    MOST,
    SUM_ORDER,
    THREE_RANKS,
    Apart,
    Feature,
    fit_and_validate,
)
from tests.lightning.matrix.seen import Seen

row = partial(Feature, section="Reading and writing weights")
LEFTOVERS = (
    "a step without gradients ends its extra epoch; DDP steps once more there, with old gradients"
)
HAS_AVERAGING = hasattr(lightning_callbacks, "EMAWeightAveraging")
WeightAveraging: Any = getattr(lightning_callbacks, "WeightAveraging", Callback)


def _ema(folder: Path) -> Sequence[Callback]:
    return [lightning_callbacks.EMAWeightAveraging(decay=0.5, use_buffers=True)]


class _EverySecondStep(WeightAveraging):  # type: ignore[misc]
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 1


def _average(folder: Path) -> Sequence[Callback]:
    return [_EverySecondStep()]


def _swa(folder: Path) -> Sequence[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


class _WithoutLeftovers(RowNet):
    """SWA's extra epoch for BatchNorm ends in a step without a backward.

    DDP applies the gradient that the epoch before left behind; ours leaves none (Lightning means
    the step to do nothing).
    """

    def on_train_epoch_start(self) -> None:
        self.optimizers().zero_grad()


def _pruning(folder: Path) -> Sequence[Callback]:
    return [
        ModelPruning(
            "l1_unstructured",
            parameter_names=["weight"],
            amount=0.3,
            use_lottery_ticket_hypothesis=False,
        )
    ]


def _rewinds_once(epoch: int) -> bool:
    return epoch == 0


def _lottery_ticket(folder: Path) -> Sequence[Callback]:
    return [
        ModelPruning(
            "l1_unstructured",
            parameter_names=["weight"],
            amount=0.3,
            use_lottery_ticket_hypothesis=_rewinds_once,
        )
    ]


def _is_written_back(seen: Seen) -> None:
    """The average replaces the weights at the end of the fit."""
    last, after = seen.series["weights"][-1], seen.series["weights after fit"][0]
    assert not any(map(torch.equal, last[:2], after[:2]))


def _is_pruned(seen: Seen) -> None:
    zeros = sum(int((weight == 0).sum()) for weight in seen.series["weights after fit"][0])
    assert zeros > 100


FEATURES = (
    row(
        name="EMAWeightAveraging",
        net=mlp,
        callbacks=_ema,
        check=_is_written_back,
        needs=HAS_AVERAGING,
    ),
    row(
        name="EMAWeightAveraging with validation",
        net=conv,
        data="conv",
        callbacks=_ema,
        drive=fit_and_validate,
        trainer={"val_check_interval": 2},
        needs=HAS_AVERAGING,
    ),
    row(
        name="WeightAveraging every second step",
        net=mlp,
        callbacks=_average,
        check=_is_written_back,
        needs=HAS_AVERAGING,
    ),
    row(
        name="StochasticWeightAveraging",
        net=mlp,
        callbacks=_swa,
        trainer={"max_epochs": 3},
        num_batches=3,
        check=_is_written_back,
    ),
    row(
        name="StochasticWeightAveraging with BatchNorm and validation",
        net=partial(_WithoutLeftovers, model="conv"),
        data="conv",
        callbacks=_swa,
        drive=fit_and_validate,
        trainer={"max_epochs": 3},
        num_batches=3,
        remark=LEFTOVERS,
    ),
    row(
        name="StochasticWeightAveraging with validation",
        net=mlp,
        callbacks=_swa,
        drive=fit_and_validate,
        trainer={"max_epochs": 3},
        num_batches=3,
    ),
    row(
        name="StochasticWeightAveraging with BatchNorm",
        net=partial(_WithoutLeftovers, model="conv"),
        data="conv",
        callbacks=_swa,
        trainer={"max_epochs": 3},
        num_batches=3,
        remark=LEFTOVERS,
    ),
    row(
        name="ModelPruning",
        net=mlp,
        callbacks=_pruning,
        trainer={"max_epochs": 3},
        num_batches=3,
        check=_is_pruned,
    ),
    row(
        name="ModelPruning with the lottery ticket",
        net=mlp,
        callbacks=_lottery_ticket,
        # The callback keeps its copies as they are before precision converts the module.
        trainer={"max_epochs": 3, "precision": "32-true"},
        num_batches=3,
        check=_is_pruned,
        apart=(Apart(SUM_ORDER.reason, THREE_RANKS, MOST),),
        remark="rewinds to the first weights every time; DDP only the first time",
    ),
)
