"""Delays that make every race visible: data is really sent late, not only waited for late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.work import Waits


@dataclass(frozen=True)
class Delays:
    """Longest delay of each kind, seconds; the actual ones are random, other on every rank."""

    before_reduce_scatter_s: float = 0.0
    after_reduce_scatter_s: float = 0.0
    step_s: float = 0.0
    before_all_gather_s: float = 0.0
    after_all_gather_s: float = 0.0
    forward_s: float = 0.0

    def slow_down(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Sleeps in front of the optimizer's step and of every module's forward."""
        random_of = random.Random(dist.get_rank())
        if self.step_s:
            optimizer.register_step_pre_hook(
                lambda *_: time.sleep(random_of.uniform(0, self.step_s))
            )
        if self.forward_s:
            for module in model.modules():
                module.register_forward_pre_hook(
                    lambda *_: time.sleep(random_of.uniform(0, self.forward_s))
                )


class DelayedCollectives(PairwiseCollectives):
    """Starts each exchange only after a while, in a thread, and notices its end only later."""

    def __init__(self, own: PairwiseCollectives, delays: Delays) -> None:
        groups = own.reduce_group, own.gather_group, own.object_group
        super().__init__(*groups, own.world)
        self._delays = delays
        self._random = random.Random(own.world.rank)

    def _expect(self, *args: Any) -> None:
        """Nothing is received before its time."""

    def _both_ways(
        self,
        lane: str,
        buffer: Tensor,
        rows: dict[int, Tensor],
        outgoing: dict[int, Tensor],
        tag: int,
    ) -> Waits:
        delays, is_gather = self._delays, lane == "all_gather"
        before_s = delays.before_all_gather_s if is_gather else delays.before_reduce_scatter_s
        after_s = delays.after_all_gather_s if is_gather else delays.after_reduce_scatter_s
        if not rows and not outgoing:
            return []
        late = _LateExchange(
            partial(PairwiseCollectives._both_ways, self, lane, buffer, rows, outgoing, tag),
            self._random.uniform(before_s / 2, before_s),
            self._random.uniform(after_s / 2, after_s),
        )
        return [(None, late)]


class _LateExchange:
    def __init__(self, launch: Callable[[], Waits], before_s: float, after_s: float) -> None:
        self._launch, self._before_s, self._after_s = launch, before_s, after_s
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            time.sleep(self._before_s)
            for _, work in self._launch():
                work.wait()
            time.sleep(self._after_s)
        except BaseException as error:
            self._failure = error

    def wait(self, *_: timedelta) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
