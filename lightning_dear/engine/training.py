"""What all optimizers of one training share."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.collectives.world import World
from lightning_dear.engine.bucket_round import Signal
from lightning_dear.engine.module_tree import ModuleTree
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner
from lightning_dear.telemetry.statistics import Instruments

REFUSALS = "_lightning_dear_refusals"
"""Attribute of an optimizer that was one of ours: its own hooks, which say that it has ended."""


@dataclass(eq=False)
class Training:
    """One module and what trains it. `Pipeline` owns it, and each of its parts asks it.

    Attributes:
        module: Mutated with each plan: parameters become views of its flat buffers.
        collectives: What moves the bytes.
        fusion: Makes each optimizer's plan from its recorded first step.
        options: What travels, and how.
        instruments: Told of every wait.
        tree: The module's tree, looked at in front of each forward.
        broadcast: Sends the module's buffers. None means that each rank keeps its own.
        early_refusal: Why no bucket is gathered before backward has ended, whatever the plan says.
            None means that buckets may be.
        all_reduce_refusal: Why no bucket is all-reduced, whatever the plan says. None means that
            buckets may be.
        has_compiled_region: Whether a part of the module is compiled, so that its reads of
            parameters are not seen.
        is_in_forward: Whether a training forward is under way.
        optimizers: The optimizers of the training.
        parameters: All parameters that are trained, or may be.
        signal: What ranks tell each other of a wish to stop.
    """

    module: Module
    collectives: Collectives
    fusion: FusionPlanner
    options: ExchangeOptions
    instruments: Instruments
    tree: ModuleTree
    broadcast: BufferBroadcast | None = None
    early_refusal: str | None = None
    all_reduce_refusal: str | None = None
    has_compiled_region: bool = False
    is_in_forward: bool = False
    optimizers: Sequence[Optimizer] = ()
    parameters: AbstractSet[Parameter] = frozenset()
    signal: Signal = field(default_factory=Signal)

    @property
    def world(self) -> World:
        """The ranks that train, and this one's place among them."""
        return self.collectives.world

    @property
    def uses_buckets(self) -> bool:
        """Whether gradients pass through buckets: they travel, or are encoded and decoded."""
        return self.world.size > 1 or self.options.compressor is not None

    def launch_buffers(self) -> None:
        """Launches the module's buffers, once a forward, behind the last reduce-scatters.

        Not before those: some ranks launch their last ones in backward, others lack a gradient and
        launch theirs only now. The buffers travel in the other group, and NCCL wants one order over
        both on all ranks.
        """
        if self.broadcast is not None and self.broadcast.are_due:
            self.broadcast.launch()

    def finish_buffers(self) -> None:
        """Blocks until the buffers that were launched are here."""
        if self.broadcast is not None and self.broadcast.launched:
            with self.instruments.waiting("all_gather", "module buffers"):
                self.broadcast.wait()

    def refuse_stranger(self, optimizer: Optimizer) -> None:
        """In front of every step of any optimizer: refuses one that steps the module's parameters.

        Raises:
            RuntimeError: If it does, and is no optimizer of the training.
        """
        # An optimizer that has the state of one of ours stands for that, see `DeferredStep`.
        is_ours = any(optimizer.state is one.state for one in self.optimizers)
        is_known = is_ours or REFUSALS in vars(optimizer)
        # Without buckets gradients are where anybody finds them.
        if is_known or not self.uses_buckets:
            return
        groups = optimizer.param_groups
        if any(one in self.parameters for group in groups for one in group["params"]):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that the training does not know steps parameters of"
                f" the {type(self.module).__name__}, whose .grad is not the mean over ranks. What"
                " is to be trained is returned from configure_optimizers; under Fabric"
                " fabric.setup takes it."
            )


class BufferBroadcast:
    """Broadcasts the buffers of a module from rank 0, one flat message per dtype.

    DistributedDataParallel does so in front of each forward and waits. Here the broadcast is
    launched before the step, behind the last gradients, and waited for when the step ends.

    Args:
        tree: Of the module. On ranks other than 0 its buffers are overwritten, but for those that
            `ignored_names` tells.
        collectives: What moves them.

    Attributes:
        are_due: Whether a forward may have changed the buffers since, on each rank in its own way;
            to be assigned to.
        launched: What is being sent: works, flat messages, and the buffers in each.
    """

    def __init__(self, tree: ModuleTree, collectives: Collectives) -> None:
        self.are_due = True
        self._tree, self._collectives = tree, collectives
        self.launched: list[tuple[Work, Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def launch(self) -> None:
        """Starts the broadcast of the buffers' present values. Does not block."""
        is_alone = self._collectives.world.size == 1
        for number, buffers in enumerate(() if is_alone else self._tree.buffers()):
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            work = self._collectives.launch_broadcast(flat, number)
            self.launched.append((work, flat, buffers))
        self.are_due = False

    @torch.no_grad()
    def wait(self) -> None:
        """Blocks until the broadcast is here, then writes rank 0's values into the buffers."""
        for work, flat, buffers in self.launched:
            work.wait()
            if self._collectives.world.rank != 0:
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                pairs = zip(parts, buffers, strict=True)
                torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in pairs])
        self.launched.clear()
