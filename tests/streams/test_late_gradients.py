"""A gradient that comes after its bucket was sent is refused on NCCL, whichever way it comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from lightning_dear.exchange.options import ExchangeOptions
from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.trainings import OnDevice, Training


def _by_hand(trained: OnDevice) -> None:
    *_, parameter = trained.model.parameters()
    parameter.grad = torch.ones_like(parameter)


def _backward(trained: OnDevice, *, synchronize: bool = True) -> None:
    with trained.pipeline.forward():
        loss = trained.loss(1)
    with trained.pipeline.backward(synchronize=synchronize):
        loss.backward()


LATE: dict[str, Callable[[OnDevice], None]] = {
    "backward": _backward,
    "backward without exchange": partial(_backward, synchronize=False),
    "by hand": _by_hand,
}


def _train(
    rank: Rank, training: Training, late: Callable[[OnDevice], None], ranks: tuple[int, ...]
) -> None:
    """In the second step, a late gradient comes on these ranks."""
    trained = OnDevice(training, rank)
    trained.step(0)
    trained.zero_grad()
    _backward(trained)
    if rank.number in ranks:
        late(trained)
    for optimizer in trained.optimizers:
        optimizer.step()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("is_all_reduced", [False, True])
def test_a_late_gradient_is_refused(
    is_all_reduced: bool, late: str, ranks: tuple[int, ...]
) -> None:
    options = ExchangeOptions("gradients", decouple=False) if is_all_reduced else None
    training = Training(options=options)
    with pytest.raises(RuntimeError, match="A second gradient for '.*block_backward_sync"):
        on_simulated_cuda(partial(_train, training=training, late=LATE[late], ranks=ranks), 2)
