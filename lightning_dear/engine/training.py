"""What all optimizers of one module share: `Training`, buffers, gradients of no optimizer."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_dear.collectives.launch_log import UNHELD_TAG
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.collectives.world import World
from lightning_dear.engine.module_tree import ModuleTree
from lightning_dear.engine.notes import Signal
from lightning_dear.engine.trained_parameters import unheld_parameters
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.replicated import TWIN
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
        parameters: All parameters that the optimizers hold, frozen ones too.
        signal: Note that carries each rank's wish to stop; it travels with each round.
        unheld: Averages the gradients of the module's other parameters.
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
    signal: Signal = field(default_factory=Signal)

    def __post_init__(self) -> None:
        self.unheld = UnheldGradients(self.collectives)

    def follow_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Stores the optimizers, and which parameters they hold. To be called after `check_layout`.

        To list the module's parameters in each step would wait for their all-gathers.
        """
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.parameters = frozenset(chain.from_iterable(group["params"] for group in groups))
        self.unheld.begin(unheld_parameters(self.module, optimizers))

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
            RuntimeError: If `optimizer` is not in `optimizers` and holds any of `parameters`, or
                what `UnheldGradients.check` raises.
        """
        is_ours = optimizer in self.optimizers or TWIN in vars(optimizer)
        is_known = is_ours or REFUSALS in vars(optimizer)
        # Without buckets `.grad` holds the gradient as under plain torch, for any optimizer.
        if is_known or not self.uses_buckets:
            return
        stepped = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        if not self.parameters.isdisjoint(stepped):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that the training does not know steps parameters of"
                f" the {type(self.module).__name__} that another optimizer of the training holds."
                " Give each parameter to one optimizer, and return both from configure_optimizers,"
                " or pass both to fabric.setup. The .grad which it uses is not the mean over ranks."
            )
        self.unheld.check(stepped)


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


PATIENCE = 32
"""Number of backwards without any gradient after which ranks ask each other no more for them."""


class UnheldGradients:
    """Averages gradients of the module's parameters that no optimizer of the training holds.

    They are averaged in `.grad`, after each backward after which DistributedDataParallel would have
    averaged them, without a compressor. Ranks first exchange which parameters have a gradient. If
    no rank has one after `PATIENCE` backwards, they stop asking. A rank that gets one later tells
    the others in the flags of the next round. They are averaged then, and after each backward.

    Args:
        collectives: Launches the messages.

    Attributes:
        signal: Note that tells of a gradient, while nobody asks.
        is_due: Whether DDP would have averaged after the backward that runs now; to be assigned to.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._named: Sequence[tuple[str, Parameter]] = ()
        # Number of backwards after which ranks still ask, equal on all ranks.
        self._patience: float = 0
        self.is_due = False
        self.signal = Signal()
        self.signal.ask = lambda: int(not self._patience and any(self._own()))
        self.signal.on_heard = self._hear

    def begin(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Begins with other parameters, whose names and `requires_grad` are equal on all ranks.

        Args:
            named: (name, parameter) of each, frozen ones too.
        """
        self._named = named if self._collectives.world.size > 1 else ()
        self._patience = PATIENCE if any(one.requires_grad for _, one in self._named) else 0

    @property
    def remark(self) -> str | None:
        """Sentences for the user about what a step costs. None means that it costs nothing."""
        found = [(name, one) for name, one in self._named if one.requires_grad]
        if not found:
            return None
        size = self._collectives.world.size
        sent = 2 * sum(one.nbytes for _, one in found) * (size - 1) // size
        return (
            f"No optimizer of the training holds '{found[0][0]}' ({len(found)} such parameters)."
            " Their gradients are averaged after backward, as under DDP, and each rank sends up to"
            f" {sent:,} bytes a step for that. Freeze those that nothing trains, with"
            " requires_grad_(False)."
        )

    @property
    def is_asked(self) -> bool:
        """Whether `average` is to be called after a backward. Equal on all ranks."""
        return self._patience > 0

    def _own(self) -> list[bool]:
        """Whether this rank has a gradient, for each parameter."""
        return [one.requires_grad and one.grad is not None for _, one in self._named]

    def _hear(self, _: int) -> None:
        if not self._patience:
            self._patience = 1
            self.average()

    def check(self, stepped: Sequence[Parameter]) -> None:
        """Raises if an optimizer steps `stepped`, and a gradient of these waits to be averaged."""
        known = set(map(id, stepped)) if not self._patience else ()
        for name, one in self._named:
            if one.grad is not None and id(one) in known:
                raise RuntimeError(
                    f"An optimizer that the training does not know steps '{name}', whose first"
                    f" gradient came after {PATIENCE} backwards or was not the strategy's, and was"
                    " not averaged over ranks. Use self.manual_backward or fabric.backward, and"
                    " step it after the next step of the training's own optimizers: other ranks"
                    " hear of the gradient there."
                )

    @torch.no_grad()
    def average(self) -> None:
        """Averages each `.grad` that any rank has, over all ranks. Collective, blocks.

        Where only other ranks have one, this rank gets one, too. Gradients that no rank has stay
        None.

        Raises:
            RuntimeError: If a gradient is sparse.
        """
        self.is_due = False
        own = self._own()
        flags = torch.tensor(own, dtype=torch.uint8, device=self._collectives.flags_device)
        self._collectives.launch_max(flags).wait()
        # If all flags of this rank are set they are the maxima, and the host waits for no device.
        used = own if all(own) else flags.tolist()
        self._patience = math.inf if any(used) else self._patience - 1
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for (name, one), is_used in zip(self._named, used, strict=True):
            if is_used:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                _check_dense(name, one.grad)
                by_dtype.setdefault(one.dtype, []).append(one.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([one.reshape(-1) for one in gradients])
            flat.mul_(1 / self._collectives.world.size)
            self._collectives.launch_all_reduce(flat, UNHELD_TAG).wait()
            parts = torch.split(flat, [one.numel() for one in gradients])
            pairs = zip(parts, gradients, strict=True)
            torch._foreach_copy_(gradients, [part.view_as(one) for part, one in pairs])


def _check_dense(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            f"'{name}' has a sparse gradient, which strategy='dear' does not reduce. Use"
            " sparse=False in its embedding, or freeze it."
        )
