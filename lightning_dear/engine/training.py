"""What all optimizers of one module share: `Training`, buffers, gradients of no optimizer."""

import math
import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn, optim

from lightning_dear import planning, private_names
from lightning_dear.collectives.launch_log import UNHELD_TAG
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.engine import batch_weights, gradient_collector, shared_end, trained_parameters
from lightning_dear.engine.bucket_round import of_any_rank
from lightning_dear.engine.module_tree import ModuleTree, aliased_names
from lightning_dear.engine.notes import Signal
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.pieces import parameters_of
from lightning_dear.optimizers.replicated import TWIN
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
        all_reduce_refusal: Why no bucket of a plan may be all-reduced, for the user. None means
            that all-reduced buckets of plans are.
        has_compiled_region: Whether a part of the module is compiled. Its reads of parameters
            cannot be seen, so forward first waits for all parameters.
        is_in_forward: Whether a training forward runs at present.
        optimizers: The optimizers of the training.
        parameters: All parameters that the optimizers hold, frozen ones too.
        aliased: What `aliased_names` returned on rank 0 before the first training forward. None
            means that there was no such forward on this rank, or that it is not rank 0.
        weights: Weights of batches. Off unless the strategy's option `weights` is given.
        signal: Note that carries each rank's wish to stop; it travels with each round.
        end: What ranks know of the end of an epoch; to be assigned to. At first nothing is asked.
        unheld: Averages the gradients of the module's other parameters.
        buffers: Sends the module's buffers from rank 0.
    """

    module: nn.Module
    collectives: Collectives
    fusion: planning.FusionPlanner
    options: ExchangeOptions
    instruments: Instruments
    tree: ModuleTree
    all_reduce_refusal: str | None = None
    has_compiled_region: bool = False
    is_in_forward: bool = False
    optimizers: Sequence[optim.Optimizer] = ()
    parameters: Set[nn.Parameter] = frozenset()
    aliased: Set[str] | None = None
    signal: Signal = field(default_factory=Signal)
    end: shared_end.SharedEnd = field(default_factory=shared_end.SharedEnd)

    def __post_init__(self) -> None:
        # The ranks that train: their number, their hosts, and this rank's number.
        self.world = self.collectives.world
        waiting = partial(self.instruments.waiting, "reduce_scatter")
        self.weights = batch_weights.BatchWeights(self.collectives, waiting)
        self.unheld = UnheldGradients(self.collectives, self.weights)
        self.buffers = BufferBroadcast(self.tree, self.collectives, self.instruments)

    def follow_optimizers(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Stores the optimizers, and which parameters they hold. To be called after `check_layout`.

        To list the module's parameters in each step would wait for their all-gathers.
        """
        self.optimizers = optimizers
        self.parameters = frozenset(parameters_of(*optimizers))
        self.unheld.begin(trained_parameters.unheld_parameters(self.module, optimizers))

    def warn_of_aliases(self, names: Sequence[str]) -> None:
        """Warns of those of `names` that other tensors share the memory of. Only on rank 0. Local.

        To be called after the first forward. Only names that were aliased before it, too, are
        reported. Before it a module may hold an alias itself (`spectral_norm`), after it a graph.
        """
        still = self.aliased & aliased_names(self.module) if self.aliased else ()
        if found := [name for name in names if name in still]:
            warnings.warn(
                f"Other tensors share the memory of '{found[0]}' ({len(found)} such parameters),"
                " such as those of a state_dict() or .data that was kept, a NumPy array or a flat"
                " vector. They keep their present values, since strategy='dear' moves parameters to"
                " other memory. Take them anew after the first step, or call module.share_memory()"
                " before the fit: that memory is kept up to date.",
                stacklevel=2,
            )

    @property
    def uses_buckets(self) -> bool:
        """Whether gradients pass through buckets: there are other ranks, or a compressor is used.

        If not, `.grad` holds the gradient that is stepped, as under plain torch.
        """
        return self.world.size > 1 or self.options.compressor is not None

    def refuse_stranger(self, optimizer: optim.Optimizer) -> None:
        """Refuses a step of an unknown optimizer that holds parameters of this training's module.

        Called before every step of any optimizer in the process. Does nothing if gradients pass
        through no buckets, or if `fabric.setup` has ended the optimizer's training (`REFUSALS`).

        Raises:
            RuntimeError: If `optimizer` is not in `optimizers` and holds any of `parameters`, or
                what `UnheldGradients.check` raises.
        """
        is_known = optimizer in self.optimizers or {TWIN, REFUSALS} & vars(optimizer).keys()
        # Without buckets `.grad` holds the gradient as under plain torch, for any optimizer.
        if is_known or not self.uses_buckets:
            return
        stepped = {*parameters_of(optimizer)}
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
    launched before the step, after the last gradients, and waited for when the step ends. That is
    enough for buffers which forward writes. If a rank has written to a buffer between a step and
    the next forward, all ranks broadcast before forward from then on, too, as under DDP: they
    *watch* the buffers. Writes through `.data` are not seen.

    Before some forwards ranks ask each other with one byte (`prepare`). Before the others they do
    not: a write is told with the next round's flags. By then one forward has used each rank's own
    values, and the lowest rank that has written warns.

    Args:
        tree: Tree of the module. On ranks other than 0 the module's buffers are overwritten, except
            those that `ignored_names` returns.
        collectives: Launches the broadcasts.
        instruments: Measures the waits.

    Attributes:
        is_on: Whether ranks get rank 0's buffers; to be assigned to. If not, each rank keeps its
            own, and methods do nothing. False at world size 1.
        asks: Whether ranks tell each other of writes before the next forward that may need a
            broadcast; to be assigned to, on all ranks alike.
        signal: Note that tells of writes where nobody asks.
    """

    def __init__(
        self, tree: ModuleTree, collectives: Collectives, instruments: Instruments
    ) -> None:
        self._tree, self._collectives, self._instruments = tree, collectives, instruments
        self.is_on, self.asks = collectives.world.size > 1, True
        # `_is_due`: whether a forward has run since the last broadcast. It may change the buffers
        # of each rank in another way.
        self._is_due, self._is_watched, self._is_after_step = True, False, True
        # Work and bytes of the broadcast that is to be waited for.
        self._launched: tuple[Work, Tensor] | None = None
        # Buffers, and their versions, as all ranks had them last. Empty before the first broadcast.
        self._seen: tuple[Sequence[list[Tensor]], Sequence[int]] = (), ()
        # Names of buffers that this rank has written, until other ranks have been told.
        self._written: Sequence[str] = ()
        own = 255 - min(collectives.world.rank, 254)
        self.signal = Signal(lambda: own if self._written else 0, self._hear)

    def prepare(self, *, synchronize: bool, asks: bool = False) -> None:
        """Gives all ranks rank 0's buffers before a forward that reads them, where DDP does so.

        To be called before each forward. Collective. Blocks if a message is sent: before the first
        two forwards, when asked to, and always once buffers are watched. The first call broadcasts,
        so that all ranks begin with the same values. In the second one ranks ask each other. Does
        nothing in a forward that follows an accumulating one: DDP does not broadcast there.

        Args:
            synchronize: Whether the forward is one of a last backward, so that a step follows.
            asks: Whether ranks tell each other of writes now. They also do if `self.asks`.
        """
        self.finish()
        is_after_step, self._is_after_step = self._is_after_step, synchronize
        buffers = self._tree.buffers() if self.is_on and is_after_step else ()
        if buffers and self._is_needed(buffers, asks):
            self._is_due = True
            self.launch()
            self.finish()
        self._is_due = True

    def _is_needed(self, buffers: Sequence[list[Tensor]], asks: bool) -> bool:
        if self._is_watched or not self._seen[0]:
            return True
        asks, self.asks = asks or self.asks, False
        written = () if self._is_due else self._names(buffers)
        if asks:
            (self._is_watched,) = of_any_rank([bool(written)], self._collectives)
        elif written:
            self._written = written
        return self._is_watched

    def _names(self, now: Sequence[list[Tensor]]) -> Sequence[str]:
        """Names of the buffers that were written or replaced on this rank since the last step."""
        buffers, versions = self._seen
        if buffers is now and versions == _versions(buffers):
            return ()
        before = dict(zip(map(id, chain(*buffers)), versions, strict=True))
        named = self._tree.named_buffers()
        return [name for name, one in named if [before.get(id(one))] != _versions([[one]])]

    def _hear(self, number: int) -> None:
        """Begins to watch buffers, since a rank has written some. The lowest such rank warns."""
        self._is_watched = True
        if self.signal.ask() == number:
            warnings.warn(
                f"The buffer '{self._written[0]}' ({len(self._written)} such buffers) was written"
                " between a step and the next forward. That forward has used each rank's own"
                " values. From now on rank 0's are sent before each forward, which waits for them,"
                " as under DDP. To avoid that, write buffers in forward, the same values on all"
                " ranks, or pass DearStrategy(broadcast_buffers=False).",
                stacklevel=2,
            )
        self._written = ()

    @torch.no_grad()
    def launch(self) -> None:
        """Launches the broadcast of rank 0's present buffer values. Does not block.

        Does nothing without buffers, or if no forward has run since the last broadcast.

        To be called after the last reduce-scatter was launched. Some ranks launch that one in
        backward, and ranks that lack a gradient launch it only before the step. The broadcast is in
        the other process group, and NCCL needs one order of launches over both groups on all ranks.
        """
        is_due, self._is_due = self._is_due and self.is_on, False
        if is_due and (buffers := self._tree.buffers()):
            message = torch.cat([flat_of(one).view(torch.uint8) for one in buffers])
            self._launched = self._collectives.launch_broadcast(message, 0), message
            self._seen = buffers, _versions(buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the broadcast, and then writes rank 0's values into the other ranks' buffers.

        Rank 0 writes nothing. Blocks the host on gloo, and the current stream on NCCL. Does nothing
        if none was launched since the last call.
        """
        if self._launched is None:
            return
        (work, message), buffers = self._launched, self._seen[0]
        with self._instruments.waiting("all_gather", "module buffers"):
            work.wait()
        self._launched = None
        if self._collectives.world.rank != 0:
            sizes = [sum(buffer.nbytes for buffer in one) for one in buffers]
            for flat, own in zip(torch.split(message, sizes), buffers, strict=True):
                copy_flat(flat.view(own[0].dtype), own)
            # What this rank has written since the launch is overwritten. Rank 0's writes stay.
            self._seen = buffers, _versions(buffers)


def flat_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all elements of tensors of one dtype, in one new tensor."""
    return torch.cat([one.reshape(-1) for one in tensors])


def copy_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies into `tensors` what `flat_of` has made of such tensors. Mutates them."""
    parts = torch.split(flat, [one.numel() for one in tensors])
    torch._foreach_copy_([*tensors], [*map(Tensor.view_as, parts, tensors)])


def _versions(buffers: Sequence[Sequence[Tensor]]) -> Sequence[int]:
    """Version of each buffer, which counts the writes to it. Those of inference mode have none."""
    version = attrgetter(private_names.VERSION.name)
    try:
        return [*map(version, chain(*buffers))]
    except RuntimeError:
        return [0 if one.is_inference() else version(one) for one in chain(*buffers)]


PATIENCE = 32
"""Number of backwards without any gradient after which ranks ask each other no more for them."""


class UnheldGradients:
    """Averages gradients of the module's parameters that no optimizer of the training holds.

    They are averaged in `.grad`, after the same backwards as under DistributedDataParallel. No
    compressor is used. Ranks first exchange which parameters have a gradient. If no rank has one
    after `PATIENCE` backwards, ranks stop asking. A rank that gets one later tells
    the others in the flags of the next round. They are averaged then, and after each backward.

    Args:
        collectives: Launches the messages.
        weights: Weights by which ranks count.

    Attributes:
        signal: Note that tells of a gradient, while nobody asks.
        patience: Number of backwards after which ranks still ask, equal on all ranks; read-only.
        is_due: Whether DDP would have averaged after the backward that runs now; to be assigned to.
    """

    def __init__(self, collectives: Collectives, weights: batch_weights.BatchWeights) -> None:
        self._collectives, self._weights = collectives, weights
        self._named: Sequence[tuple[str, nn.Parameter]] = ()
        self.patience: float = 0
        self.is_due = False
        self.signal = Signal(lambda: int(not self.patience and any(self._own())), self._hear)

    def begin(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Begins with other parameters, whose names and `requires_grad` are equal on all ranks.

        Args:
            named: (name, parameter) of each, frozen ones too.
        """
        self._named = named if self._collectives.world.size > 1 else ()
        self.patience = PATIENCE if any(one.requires_grad for _, one in self._named) else 0

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

    def _own(self) -> list[bool]:
        """Whether this rank has a gradient, for each parameter."""
        return [one.requires_grad and one.grad is not None for _, one in self._named]

    def _hear(self, _: int) -> None:
        if not self.patience:
            self.patience = 1
            self.average()

    def check(self, stepped: Set[nn.Parameter]) -> None:
        """Raises if one of `stepped` has a gradient that was not averaged."""
        for name, one in () if self.patience else self._named:
            if one.grad is not None and one in stepped:
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
        used = of_any_rank(self._own(), self._collectives)
        self.patience = math.inf if any(used) else self.patience - 1
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for (name, one), is_used in zip(self._named, used, strict=True):
            if is_used:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                if one.grad.is_sparse:
                    raise gradient_collector.sparse_gradient(name)
                by_dtype.setdefault(one.dtype, []).append(one.grad)
        for gradients in by_dtype.values():
            flat = flat_of(gradients)
            # Multiplied by 0, inf would become nan.
            flat.mul_(self._weights.scale) if self._weights.own else flat.zero_()
            self._collectives.launch_all_reduce(flat, UNHELD_TAG).wait()
            copy_flat(flat, gradients)
