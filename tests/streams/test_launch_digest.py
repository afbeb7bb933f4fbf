"""A rank that launches in another order is found where flags are read, on simulated NCCL."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dear.collectives.nccl import REDUCE_SCATTER, NativeCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from lightning_dear.telemetry.clock import StreamClock
from tests.streams.device import DEVICE, Cuda
from tests.streams.ranks import Rank, on_simulated_cuda


class _Swaps(NativeCollectives):
    """In the third step, rank 1 launches the sums of two buckets of equal size in another order."""

    step = 0

    def _in_order(self, launch: Any, tag: int) -> Work:
        if self.world.rank != 1 or self.step != 2 or tag > 1:
            return launch()
        held = self.__dict__.setdefault("_held", {})
        held[tag] = launch
        works = self.__dict__.setdefault("_works", {})
        if len(held) == 2:
            # The second one of the plan's order goes first.
            works |= {number: held[number]() for number in reversed(held)}
        return Work(lambda: works[tag].wait())

    @override
    def launch_reduce_scatter(self, *args: Any) -> Work:
        return self._in_order(partial(super().launch_reduce_scatter, *args), args[-1])

    @override
    def launch_all_reduce(self, buffer: Tensor, tag: int) -> Work:
        return self._in_order(partial(super().launch_all_reduce, buffer, tag), tag)


def _train(rank: Rank, *, decouple: bool) -> tuple[int, str]:
    """Trains on one rank. Returns the step that raised, and what it said."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    rank.device.put(*model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    collectives = rank.collectives(_Swaps)
    pipeline = Pipeline(
        model,
        [optimizer],
        collectives,
        NoFusion(),
        options=ExchangeOptions("parameters" if decouple else "gradients", decouple),
        clock=StreamClock(DEVICE, Cuda()),
    )
    for step in range(6):
        collectives.step = step
        optimizer.zero_grad()
        x = torch.full((2, 8), 1.0 + rank.number)
        rank.device.put(x)
        with pipeline.forward():
            loss = model(x).square().mean()
        with pipeline.backward():
            loss.backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return 6, ""


@pytest.mark.parametrize("decouple", [True, False])
def test_two_equal_buckets_swapped_on_one_rank(decouple: bool) -> None:
    found = on_simulated_cuda(partial(_train, decouple=decouple), 2)
    for step, said in found.results:
        # The flags of a step are read in the next one.
        assert step == 3
        assert said.startswith("Ranks have launched different messages. Call backward, step,")
        call = REDUCE_SCATTER.replace("_", "-") if decouple else "all-reduce"
        names = [f"{call} of bucket {number}, float32," for number in (1, 0)]
        first = said.partition("The first difference: launch ")[2]
        assert first.partition(" is ")[2].startswith(names[0])
        assert f"on rank 0; {names[1]}" in first
