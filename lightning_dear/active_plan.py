"""A plan at work: its buffers and both halves of the exchange, from the recorded step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import Module, Parameter

from lightning_dear.bucket import FlatBuffers, allocate
from lightning_dear.exchange import DenseExchange
from lightning_dear.gatherer import ParameterGatherer
from lightning_dear.layout import tensor_specs
from lightning_dear.planning import BucketPlan, FusionPlanner
from lightning_dear.recorder import ForwardRecorder
from lightning_dear.reducer import GradientReducer
from lightning_dear.work import Collectives

Waiting = Callable[[str, str], AbstractContextManager[None]]
"""(lane, reason) -> context in which the engine waits for communication."""


@dataclass(frozen=True)
class ActivePlan:
    """What exists between the recorded step and the end, or the next plan.

    Attributes:
        plan: Equal on all ranks.
        flat: Its buffers; the parameters are views of them.
        reducer: The reduce-scatter half.
        gatherer: The all-gather half.
    """

    plan: BucketPlan
    flat: FlatBuffers
    reducer: GradientReducer
    gatherer: ParameterGatherer

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Takes over what was written from outside: to a parameter, or in place of its data."""
        for placement in self.flat.placements:
            if placement.was_replaced():
                placement.adopt_replacement()
        for bucket in self.flat.buckets:
            bucket.adopt_writes()

    def release(self) -> None:
        """Removes hooks and gates and gives every parameter storage of its own again."""
        self.gatherer.detach()
        for placement in self.flat.placements:
            parameter = placement.parameter
            if not placement.was_replaced():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


@torch.no_grad()
def activate(
    module: Module,
    names: Sequence[str],
    parameters: Sequence[Parameter],
    recorder: ForwardRecorder,
    fusion: FusionPlanner,
    collectives: Collectives,
    waiting: Waiting,
    first_number: int,
) -> ActivePlan:
    """Makes the plan that rank 0's recording asks for, and all it needs. Collective, blocks.

    Mutates each parameter's `data`: values stay, storage changes. `first_number`: see
    `DenseExchange`.
    """
    recorded = collectives.all_gather_object((recorder.first_use, recorder.gradients))
    first_use, gradients = recorded[0]
    world_size = collectives.world_size
    plan = fusion.plan(tensor_specs(names, parameters, first_use, list(gradients)), world_size)
    flat = allocate(plan, parameters, collectives.rank, collectives.scratch_numel)
    exchange = DenseExchange(collectives, first_number)
    gatherer = ParameterGatherer(
        module,
        flat,
        exchange,
        recorder.ungated,
        partial(waiting, "all_gather"),
        is_gated=world_size > 1,
    )
    reducer = GradientReducer(
        flat,
        names,
        [gradients.get(index, 1) for index in range(len(parameters))],
        plan,
        exchange,
        collectives,
        gatherer.is_pending,
        partial(waiting, "reduce_scatter"),
    )
    return ActivePlan(plan, flat, reducer, gatherer)
