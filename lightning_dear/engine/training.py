"""What all optimizers of one module share: `Training`, and the broadcast of module buffers."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.collectives.world import World
from lightning_dear.engine.module_tree import ModuleTree
from lightning_dear.engine.notes import Signal
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner
from lightning_dear.telemetry.statistics import Instruments

REFUSALS = "_lightning_dear_refusals"
"""Name of an attribute that optimizers get when their training has ended under Fabric: the handles
of step hooks, which refuse further steps."""


@dataclass(eq=False)
class Training:
    """Shared context of one module's training: what does not belong to one optimizer.

    `Pipeline` makes and fills it. `OptimizerPipeline` and the objects below it read it. It knows
    the module, the options and the collectives, but no plan and no bucket.

    Attributes:
        module: The module. Each plan mutates it: its parameters become views of flat buffers.
        collectives: Launches all messages.
        fusion: Planner that makes each optimizer's plan from its recorded first step.
        options: Which values travel in the reduce half and in the gather half, and their
            compressor.
        instruments: Measures every wait for gradients, parameters and module buffers.
        tree: The tree of modules. `Pipeline.forward` looks for changes in it.
        broadcast: Sends the module's buffers from rank 0. None means that each rank keeps its own.
        all_reduce_refusal: Why no bucket of a plan may be all-reduced, for the user. None means
            that all-reduced buckets of plans are.
        has_compiled_region: Whether a part of the module is compiled. Its reads of parameters
            cannot be seen, so forward first waits for all parameters.
        is_in_forward: Whether a training forward runs at present.
        optimizers: The optimizers of the training.
        parameters: All parameters of the module, frozen ones too, without `ignored_names`.
        aliased: What `aliased_names` returned on rank 0 before the first training forward. None
            means that there was no such forward on this rank, or that it is not rank 0.
        signal: Note that carries each rank's wish to stop; it travels with each round.
    """

    module: Module
    collectives: Collectives
    fusion: FusionPlanner
    options: ExchangeOptions
    instruments: Instruments
    tree: ModuleTree
    broadcast: "BufferBroadcast | None" = None
    all_reduce_refusal: str | None = None
    has_compiled_region: bool = False
    is_in_forward: bool = False
    optimizers: Sequence[Optimizer] = ()
    parameters: AbstractSet[Parameter] = frozenset()
    aliased: AbstractSet[str] | None = None
    signal: Signal = field(default_factory=Signal)

    @property
    def world(self) -> World:
        """The ranks that train: their number, their hosts, and this rank's number."""
        return self.collectives.world

    @property
    def uses_buckets(self) -> bool:
        """Whether gradients pass through buckets: there are other ranks, or a compressor is used.

        If not, `.grad` holds the gradient that is stepped, as under plain torch.
        """
        return self.world.size > 1 or self.options.compressor is not None

    def launch_buffers(self) -> None:
        """Launches the broadcast of module buffers. Does not block.

        Does nothing without `broadcast`, or if no forward has run since the last broadcast.

        To be called after the last reduce-scatter was launched. Some ranks launch that one in
        backward, and ranks that lack a gradient launch it only before the step. The broadcast is in
        the other process group, and NCCL needs one order of launches over both groups on all ranks.
        """
        if self.broadcast is not None and self.broadcast.are_due:
            self.broadcast.launch()

    def finish_buffers(self) -> None:
        """Blocks until a launched broadcast has arrived, and writes the buffers; see `wait`.

        Does nothing if none was launched since the last call.
        """
        if self.broadcast is not None and self.broadcast.launched:
            with self.instruments.waiting("all_gather", "module buffers"):
                self.broadcast.wait()

    def refuse_stranger(self, optimizer: Optimizer) -> None:
        """Refuses a step of an unknown optimizer that holds parameters of this training's module.

        Called before every step of any optimizer in the process. Does nothing if gradients pass
        through no buckets, or if `fabric.setup` has ended the optimizer's training (`REFUSALS`).

        Raises:
            RuntimeError: If `optimizer` is not in `optimizers` and holds any of `parameters`.
        """
        # Compared by state: with gathered gradients buckets are stepped by copies of an optimizer,
        # which share its state (see `DeferredStep`).
        is_ours = any(optimizer.state is one.state for one in self.optimizers)
        is_known = is_ours or REFUSALS in vars(optimizer)
        # Without buckets `.grad` holds the gradient as under plain torch, for any optimizer.
        if is_known or not self.uses_buckets:
            return
        groups = optimizer.param_groups
        if any(one in self.parameters for group in groups for one in group["params"]):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that the training does not know steps parameters of"
                f" the {type(self.module).__name__}. Return this optimizer from"
                " configure_optimizers, or pass it to fabric.setup. Without that the .grad which it"
                " uses is not the mean over ranks."
            )


class BufferBroadcast:
    """Broadcasts the buffers of a module from rank 0, as one message of bytes.

    DistributedDataParallel broadcasts before each forward, and waits. Here the broadcast is
    launched before the step, after the last gradients, and waited for when the step ends.

    Args:
        tree: Tree of the module. On ranks other than 0 the module's buffers are overwritten, except
            those that `ignored_names` returns.
        collectives: Launches the broadcasts.

    Attributes:
        are_due: Whether a forward has run since the last broadcast; to be assigned to. A forward
            may change the buffers of each rank in another way.
        launched: The message's work, the message, and the buffers in it, a list for each dtype, in
            order. None means that no message is to be waited for.
    """

    def __init__(self, tree: ModuleTree, collectives: Collectives) -> None:
        self.are_due = True
        self._tree, self._collectives = tree, collectives
        self.launched: tuple[Work, Tensor, Sequence[list[Tensor]]] | None = None

    @torch.no_grad()
    def launch(self) -> None:
        """Launches the broadcast of rank 0's present buffer values. Does not block.

        At world size 1, or without buffers, nothing is launched.
        """
        self.are_due = False
        # The widest elements first, so that each dtype begins at a multiple of its own width.
        kinds = sorted(self._tree.buffers(), key=lambda one: -one[0].element_size())
        if self._collectives.world.size > 1 and kinds:
            flats = [torch.cat([buffer.reshape(-1) for buffer in one]) for one in kinds]
            message = torch.cat([flat.view(torch.uint8) for flat in flats])
            self.launched = self._collectives.launch_broadcast(message, 0), message, kinds

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for the broadcast, and then writes rank 0's values into the other ranks' buffers.

        Rank 0 writes nothing. Blocks the host on gloo, and the current stream on NCCL.
        """
        if self.launched is None:
            return
        work, message, kinds = self.launched
        work.wait()
        sizes = [sum(buffer.nbytes for buffer in one) for one in kinds]
        for flat, buffers in zip(torch.split(message, sizes), kinds, strict=True):
            if self._collectives.world.rank != 0:
                values, numbers = flat.view(buffers[0].dtype), [one.numel() for one in buffers]
                parts = torch.split(values, numbers)
                pairs = zip(parts, buffers, strict=True)
                torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in pairs])
        self.launched = None
