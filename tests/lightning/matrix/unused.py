"""Rows: parameters that a step does not use: everywhere, on one rank, in some steps, in all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.lightning.matrix.models import Branches
from tests.lightning.matrix.nets import RowNet
from tests.lightning.matrix.rows import Feature
from tests.lightning.matrix.seen import Seen

row = partial(Feature, section="Parameters", reference="ddp, unused")


def _everywhere(step: int, rank: int) -> list[int]:
    return [0, 2]


def _on_one_rank(step: int, rank: int) -> list[int]:
    return [0, 1, 2] if rank == 0 else [2]


def _by_step(step: int, rank: int) -> list[int]:
    return [step % 3]


def _by_step_and_rank(step: int, rank: int) -> list[int]:
    return [(step + rank) % 3]


def _later(step: int, rank: int) -> list[int]:
    return [0] if step < 3 else [1, 2]


def _never_on_rank_zero(step: int, rank: int) -> list[int]:
    return [2] if rank == 0 else [0, 1]


class _Branched(RowNet):
    def __init__(self, optimizer: str, use: Any) -> None:
        super().__init__(optimizer, partial(Branches, use))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.net.step, self.net.rank = self.trainer.global_step, self.trainer.global_rank
        return super().loss(batch)


class _Outside(RowNet):
    """In every second step the loss hangs on a parameter alone that the optimizer has not."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.outside = nn.Parameter(torch.ones(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.outside.sum() if batch_idx % 2 else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.net)


def _nothing_happened(seen: Seen) -> None:
    """Not even by momentum or weight decay, whose state stays as it is."""
    first, second, third = seen.series["weights"][:3]
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, second, third))


REMARK = "needs no find_unused_parameters"
FEATURES = (
    row(name="parameters unused on all ranks", net=partial(_Branched, use=_everywhere)),
    row(
        name="parameters unused on some ranks",
        net=partial(_Branched, use=_on_one_rank),
        remark=REMARK,
    ),
    row(name="parameters unused in some steps", net=partial(_Branched, use=_by_step)),
    row(
        name="parameters unused in some steps on some ranks",
        net=partial(_Branched, use=_by_step_and_rank),
    ),
    row(name="parameters first used in a later step", net=partial(_Branched, use=_later)),
    row(
        name="parameters never used on rank 0",
        net=partial(_Branched, use=_never_on_rank_zero),
    ),
    row(name="a step without any gradient", net=_Outside, check=_nothing_happened),
)
