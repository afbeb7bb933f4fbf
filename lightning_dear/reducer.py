"""The reduce-scatter half: gradients go into buckets in backward, buckets to their owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_dear.bucket import FlatBuffers
from lightning_dear.exchange import DenseExchange
from lightning_dear.planning.plan import BucketPlan
from lightning_dear.work import Collectives, Work


class GradientReducer:
    """Collects gradients and launches reduce-scatters in plan order.

    Args:
        buffers: Where gradients go.
        names: Parameter names, for messages.
        expected: How often each parameter's gradient is accumulated in one backward, as recorded.
        plan: Which bucket is launched after which.
        exchange: What moves buckets.
        collectives: For the flags that say which parameters were used.
        is_pending: Whether a bucket's parameters are still being gathered.
        waiting: Entered around the wait for the last reduce-scatters.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        names: Sequence[str],
        expected: Sequence[int],
        plan: BucketPlan,
        exchange: DenseExchange,
        collectives: Collectives,
        is_pending: Callable[[int], bool],
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._placements = buffers.placements
        self._buckets = buffers.buckets
        self._names = names
        self._expected = expected
        self._order = plan.reduce_order
        self._num_tensors = [len(bucket.spec.slices) for bucket in buffers.buckets]
        self._exchange = exchange
        self._collectives = collectives
        self._is_pending = is_pending
        self._waiting = waiting
        # Scaled before the sum, as DistributedDataParallel does: at two ranks the bits are its own.
        self._scale = 1.0 / collectives.world_size
        self._reset()

    def _reset(self) -> None:
        self._num_calls = [0] * len(self._placements)
        self._collected = [False] * len(self._placements)
        self._missing = list(self._num_tensors)
        self._works: dict[int, Work] = {}

    def on_gradient(self, index: int) -> None:
        """Parameter `index` has a new `.grad`: takes it once the recorded number of calls is met.

        Raises:
            RuntimeError: If its bucket has already been reduced in this step.
        """
        self._num_calls[index] += 1
        if self._num_calls[index] >= self._expected[index]:
            self._collect(index)
            self._launch_ready()

    def check_was_complete(self, index: int) -> None:
        """Raises `RuntimeError` if parameter `index` is still being gathered."""
        if any(self._is_pending(number) for number in self._placements[index].buckets):
            raise RuntimeError(
                f"A gradient arrived for '{self._names[index]}' although its new value was still"
                " being gathered: forward read it through a reference that strategy='dear' cannot"
                " see (a compiled graph, or a tensor kept outside the module)."
                " Read it as an attribute of its module, or call strategy.complete_parameters()"
                " before reading it."
            )

    def _collect(self, index: int) -> None:
        placement = self._placements[index]
        gradient, home = placement.parameter.grad, placement.gradient
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError(
                f"'{self._names[index]}' has a sparse gradient, which strategy='dear' does not"
                " reduce; use sparse=False in its embedding."
            )
        if home is not None:
            self._take(index, gradient, home)
            placement.parameter.grad = None
        if not self._collected[index]:
            self._collected[index] = True
            for number in placement.buckets:
                self._missing[number] -= 1

    def _take(self, index: int, gradient: Tensor, home: Tensor) -> None:
        if not self._collected[index]:
            torch.mul(gradient, self._scale, out=home)
            return
        if any(number in self._works for number in self._placements[index].buckets):
            raise RuntimeError(
                f"A second gradient for '{self._names[index]}' arrived after the first had been"
                " reduced: this step ran backward through it more often than the first step did."
                " Run every backward but the step's last one in"
                " `with trainer.strategy.block_backward_sync():`."
            )
        home.add_(gradient, alpha=self._scale)

    def _launch_ready(self) -> None:
        while len(self._works) < len(self._order):
            number = self._order[len(self._works)]
            if self._missing[number]:
                return
            self._works[number] = self._exchange.launch_reduce(self._buckets[number])

    def finish(self) -> list[bool]:
        """Launches what backward left over and blocks until every gradient shard is there.

        Parameters without a gradient on this rank contribute zeros. Clears the parameters'
        `.grad`, which is not the reduced gradient (but not at world size 1, where it is).

        Returns:
            Per parameter whether any rank had a gradient for it.
        """
        for index, placement in enumerate(self._placements):
            gradient = placement.parameter.grad
            if gradient is not None and placement.gradient is None and not gradient.is_sparse:
                self._collected[index] = True
            elif gradient is not None:
                self._collect(index)
            elif not self._collected[index] and placement.gradient is not None:
                placement.gradient.zero_()
        self._missing = [0] * len(self._buckets)
        self._launch_ready()
        used = torch.ones(
            len(self._collected), dtype=torch.uint8, device=self._buckets[0].parameters.device
        )
        uses_all = all(self._collected)
        if not uses_all:
            used.copy_(torch.tensor(self._collected))
        flags = self._collectives.launch_any(used)
        with self._waiting("gradients"):
            for work in (*self._works.values(), flags):
                work.wait()
        # Flags from or to a GPU block the host, and where this rank used everything they can say
        # nothing new.
        anyone = self._collected if uses_all else used.bool().tolist()
        self._reset()
        return anyone
