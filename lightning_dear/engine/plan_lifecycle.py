"""From the recorded step to a plan, and from one plan to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.checkpoint.whole_state import whole_state
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Compressor, check_replaces
from lightning_dear.engine.active_plan import (
    ActivePlan,
    Recording,
    activate,
    agree_on_plan,
    agree_on_recording,
)
from lightning_dear.engine.read_order import ForwardRecorder
from lightning_dear.engine.reducer import on_each_gradient
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.exchange import LossScale
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.figures import figures_of
from lightning_dear.optimizers.masters import MASTER_KEY, LeftWeights
from lightning_dear.optimizers.sharded import ShardedOptimizer
from lightning_dear.planning import BucketPlan, FusionPlanner, TensorSpec
from lightning_dear.planning.plan import MAX_BUCKETS
from lightning_dear.planning.whole import with_whole_tensors
from lightning_dear.telemetry.statistics import Instruments


def _no_scale() -> None:
    return None


class PlanChanges:
    """Makes plans and puts them to work; a part of `OptimizerPipeline`.

    Attributes:
        loss_scale: See `CodedExchange`; to be assigned to by whoever scales losses.
        launches_in_backward: Whether full buckets are sent then, rather than before the step.
        find_plan: Asked for the plan of what was recorded, before the planner is, which makes one
            if it returns None; to be assigned to by whoever knows plans, the same on all ranks.
    """

    optimizer: Optimizer
    plan: BucketPlan | None
    sharded: ShardedOptimizer
    _module: Module
    _number: int
    _collectives: Collectives
    _fusion: FusionPlanner
    _options: ExchangeOptions
    _instruments: Instruments
    _active: ActivePlan | None
    _codec: Compressor | None = None
    _recording: Recording | None
    _trained: TrainedParameters
    _recorder: ForwardRecorder
    _hooks: list[RemovableHandle]
    early_refusal: str | None
    all_reduce_refusal: str | None = None
    loss_scale: LossScale = staticmethod(_no_scale)
    launches_in_backward: bool = True
    find_plan: Callable[[Sequence[TensorSpec]], BucketPlan | None] | None = None
    _residuals: ResidualKeeper
    _left: LeftWeights
    _uses_buckets: bool
    _has_new: bool
    _is_sending: bool
    _is_reduced: bool

    def complete_parameters(self, reason: str = "read") -> None:
        """See `OptimizerPipeline`."""
        raise NotImplementedError

    def _on_gradient(self, index: int) -> None:
        raise NotImplementedError

    def _on_arrival(self, number: int) -> None:
        raise NotImplementedError

    def _start_recording(self) -> None:
        self._trained = TrainedParameters(self._module, self.optimizer)
        self._recorder = ForwardRecorder(self._module, self.parameters)
        watched = self.parameters if self._uses_buckets else []
        self._hooks = on_each_gradient(watched, self._on_gradient)

    def _start(self) -> ActivePlan:
        """Makes the plan that the recorded step asks for, and puts it to work. Collective."""
        self._recording = agree_on_recording(
            self._trained.names,
            self.parameters,
            self._recorder,
            self._collectives,
            self._options,
        )
        tensors, world_size = self._recording.tensors, self._collectives.world_size
        found = None if self.find_plan is None else self.find_plan(tensors)
        plan = self._fusion.plan(tensors, world_size) if found is None else found
        agree_on_plan(plan, self._recording, self._collectives)
        return self._activate(plan)

    def _activate(self, plan: BucketPlan) -> ActivePlan:
        assert self._recording is not None
        plan = self._without_refused(plan)
        if self._options.is_of_gradients:
            plan = with_whole_tensors(plan, self._recording.tensors)
        self.plan = plan
        self._active = activate(
            plan,
            self._recording,
            self._module,
            self.parameters,
            self._collectives,
            self._instruments.waiting,
            self._number * MAX_BUCKETS,
            self._options,
            self._on_arrival,
            lambda: self.loss_scale(),
        )
        if self._codec is not None:
            self._active.exchange.use(self._codec)
        rank, num_shards = self._options.shards(self._collectives)
        self.sharded.attach(self._active.flat, self.parameters, rank, num_shards)
        coded, seed = self._active.exchange.coded, self._recording.seed
        self._residuals.attach(coded, self.parameters, seed)
        return self._active

    def _without_refused(self, plan: BucketPlan) -> BucketPlan:
        """`plan` without what is not done here, of which people are told."""
        for does, what, refusal in (
            (
                "gathers",
                plan.early and f"{len(plan.early)} buckets during backward",
                self.early_refusal,
            ),
            (
                "all-reduces",
                plan.all_reduced and f"{len(plan.all_reduced)} buckets",
                self.all_reduce_refusal,
            ),
        ):
            if what and refusal is not None and self._collectives.rank == 0:
                warnings.warn(
                    f"The plan '{plan.name}' {does} {what}, which is not done here: {refusal}.",
                    stacklevel=2,
                )
        return replace(
            plan,
            early=plan.early if self.early_refusal is None else (),
            all_reduced=plan.all_reduced if self.all_reduce_refusal is None else (),
        )

    def use_codec(self, codec: Compressor) -> None:
        """Encodes with `codec` from the next step on. All ranks call, after the same step. Local.

        Blocks while another thread waits for parameters. Gradients that have been sent, or whose
        sending has begun, go on as they have begun.

        Raises:
            ValueError: Without a compressor, and for one that keeps something else between steps,
                or that would have been refused instead of the configured one.
        """
        check_replaces(codec, self._options.codec)
        if not codec.is_identity and codec != self._codec:
            replace(self._options, codec=codec)
        self._codec = codec
        if self._active is not None:
            has_reduced = self._is_reduced or self._active.reducer.has_begun
            is_idle = not (self._is_sending or has_reduced)
            # Another thread that reads parameters may complete them just now.
            with self._active.gatherer.arriving:
                self._active.exchange.use(codec, is_idle=is_idle)

    @property
    def uses_configured_codec(self) -> bool:
        """Whether steps are encoded as was configured; not while a schedule says otherwise."""
        return self._codec in (None, self._options.codec)

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """What encoding saves and what it leaves over; empty without a codec.

        Local; waits only for the device, where counts of `OkTopk` in mode "static" are read.

        "compression_ratio": bytes of both halves without it, over those with it; of sparse
        all-reduces, whose messages differ from step to step, what is usual (of `topkdsa` the most).
        "residual_norm": 2-norm of what this rank has still to send; with feedback at a rate, its
        residuals over the rate; of sparse all-reduces with what is on its way. "lag": 2-norm of how
        far parameters are behind this rank's shards, over that of the shards; of buckets that have
        arrived. Of sparse all-reduces also what `figures_of` says of their last step.
        """
        exchange = None if self._active is None else self._active.exchange
        if self._active is None or exchange is None or not exchange.coded:
            return {}
        figures: dict[str, Tensor | float] = {"compression_ratio": exchange.compression_ratio}
        norms = [norm for coded in exchange.coded for norm in coded.residual_norms]
        if norms:
            figures["residual_norm"] = torch.stack(norms).norm()
        tallies = [one.tally for one in exchange.coded if one.tally and one.tally.num_wanted]
        if tallies:
            figures.update(figures_of(tallies, self._collectives.world_size))
        arrived = [
            bucket
            for bucket in self._active.flat.buckets
            if bucket.lags and not self._active.gatherer.is_pending(bucket.number)
        ]
        if arrived:
            behind = [
                torch.dist(bucket.shard.float(), bucket.replica.float()) for bucket in arrived
            ]
            whole = [torch.linalg.vector_norm(bucket.shard.float()) for bucket in arrived]
            figures["lag"] = torch.stack(behind).norm() / torch.stack(whole).norm()
        return figures

    def replan(self, plan: BucketPlan) -> None:
        """Trains on with another plan; weights and optimizer state stay, bit for bit.

        Collective, blocks. To be called between a step and the next forward.

        Args:
            plan: Over the tensors of `tensors`, the same on all ranks.

        Raises:
            RuntimeError: Before the first step, or with gradients that no step has used yet.
            ValueError: If ranks have other plans, or the plan is for another model.
        """
        if self._active is None or self._has_new or self._is_sending or self._is_reduced:
            raise RuntimeError(
                "replan() belongs between an optimizer step and the next forward, from the first"
                " step on: there are gradients that no step has used yet, or there is no plan."
            )
        assert self._recording is not None
        agree_on_plan(plan, self._recording, self._collectives)
        self._put_state_together()
        self._active.release()
        # Its buffers are not needed any more, and the new ones are as large.
        self._active = None
        self._activate(plan)
        self.sharded.adopt_state()

    def _take_over(self, but: Collection[int] = ()) -> None:
        """What was written to parameters, and given as state, since the last step; writes win.

        16-bit weights whose masters come from a checkpoint were perhaps changed after it: there the
        bits tell.

        Args:
            but: Numbers of buckets whose parameters are left alone.
        """
        self._left.follow(self.parameters)
        if self._active is not None:
            self._active.adopt_writes(but)
            if self.sharded.adopt_state():
                self._active.adopt_writes(but)
            if self._options.encodes_differences:
                # What has its master there still is in no plan.
                self._left.note(list(self.optimizer.state))

    def masters_dropped(self) -> None:
        """See `StepListener`. Rank 0 warns, once a load; all ranks may call."""
        if self._collectives.rank == 0:
            warnings.warn(
                f"The masters in a checkpoint ('{MASTER_KEY}') are dropped, where weights differ:"
                " these are behind them by what a compressor had left to be sent, are rounded, or"
                " were written to after loading, and this training goes on from them, as they are"
                " now. To lose nothing, resume"
                " with the compressor, gather and precision of the run that saved; to change the"
                " compressor or gather, let that run call strategy.sync_replicas() before it"
                " saves.",
                stacklevel=2,
            )

    def _put_state_together(self) -> None:
        """Completes parameters and makes `optimizer.state` whole again. Collective, blocks."""
        assert self.plan is not None
        self.complete_parameters("re-plan")
        assert self._active is not None
        self._take_over()
        with self._instruments.not_counting():
            state = whole_state(self.sharded, self.plan, self.parameters, self._collectives)
            self._residuals.release()
        self.sharded.detach()
        self.optimizer.state.update(state)

    def _dissolve(self) -> None:
        """Back to before the first step, values and optimizer state kept. Collective, blocks."""
        if self._active is not None:
            self._put_state_together()
            buckets, placements = self._active.flat.buckets, self._active.flat.placements
            self._left.note(one.parameter for one in placements if buckets[one.buckets[0]].lags)
        self._release()
        # The state is whole in `optimizer.state`, until there is another plan.
        self.plan = None
        self._start_recording()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._active is not None:
            self._active.release()
        self._active = None

    @property
    def tensors(self) -> list[TensorSpec]:
        """What the plan is over: one for each of `parameters`; empty before the first step."""
        return [] if self._recording is None else self._recording.tensors

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What is trained, in the order of the plan's tensor numbers."""
        return self._trained.parameters
