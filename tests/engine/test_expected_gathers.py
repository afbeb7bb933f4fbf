"""Receives of all-gathers are posted a few buckets ahead of the step, each once.

What is all-reduced is not gathered.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_dear.bucket import FlatBuffers, Role
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from lightning_dear.engine.parameter_gatherer import _NUM_EXPECTED_AHEAD, ParameterGatherer


class _Exchange:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.collectives = SimpleNamespace(streams=Streams(), world=World())
        self.coded = ()

    def expect_gather(self, bucket: Any) -> None:
        self.calls.append(("expect", bucket.number))

    def launch_gather(self, bucket: Any) -> Work:
        self.calls.append(("launch", bucket.number))
        return Work(lambda: None)


def test_a_few_at_first_and_one_more_with_each_launch() -> None:
    count, exchange = 10, _Exchange()
    buckets: Any = [
        SimpleNamespace(number=n, role=Role.REPLICATED if n == 1 else Role.SHARDED)
        for n in range(count)
    ]
    gatherer = ParameterGatherer(
        nn.Module(),
        FlatBuffers(buckets, []),
        exchange,
        {},
        lambda reason: nullcontext(),
        lambda number: None,
    )
    others = [number for number in range(count) if number != 1]
    gatherer.expect()
    assert exchange.calls == [("expect", number) for number in others[:_NUM_EXPECTED_AHEAD]]
    for number in others:
        gatherer.launch(number)
    assert [number for what, number in exchange.calls if what == "expect"] == others
    for number in others:
        assert exchange.calls.index(("expect", number)) < exchange.calls.index(("launch", number))
    assert exchange.calls.index(("launch", 0)) == _NUM_EXPECTED_AHEAD
