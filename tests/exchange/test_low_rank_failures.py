"""The low-rank exchange when a message does not arrive: whoever waits again is told again."""

from __future__ import annotations

import pytest

from lightning_dear.collectives.work import Work
from lightning_dear.compression import PowerSGD
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.training.linear import Run


@pytest.mark.parametrize("num_arriving", [0, 1], ids=["first message", "second message"])
@distributed(world_sizes=(1,))
def test_every_wait_says_what_did_not_arrive(num_arriving: int) -> None:
    run = Run(ExchangeOptions("gradients", compressor=PowerSGD(rank=2)), SingleFusion())
    run.step()
    works = iter([*[Work.done()] * num_arriving, Work(_fail)])
    run.pipeline.collectives.launch_all_reduce = lambda *_: next(works)
    run.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a peer has gone"):
            run.part.mean.reduce()


def _fail() -> None:
    raise RuntimeError("a peer has gone")
