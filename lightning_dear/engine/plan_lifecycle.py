"""From the recorded step to a plan, and from one plan to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.nn import Parameter

from lightning_dear.bucket import allocate
from lightning_dear.checkpoint.optimizer_state import hand_on, spread_state
from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.collectives.work import Collectives, uncounted
from lightning_dear.compression import Compressor, check_replaces
from lightning_dear.engine.active_plan import ActivePlan, Recording
from lightning_dear.engine.bucket_round import BucketRound, Notes
from lightning_dear.engine.gradient_collector import GradientCollector
from lightning_dear.engine.hooks import OnGradient
from lightning_dear.engine.parameter_gatherer import ParameterGatherer
from lightning_dear.engine.shared_options import SharedOptions
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.engine.training import Training
from lightning_dear.engine.whole_gradients import WholeGradients
from lightning_dear.exchange import LossScale, Traffic, new_exchange
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState, drop_masters
from lightning_dear.optimizers.replicated import ReplicatedOptimizer
from lightning_dear.optimizers.sharded import ShardedOptimizer, SpreadState
from lightning_dear.planning import BucketPlan, TensorSpec
from lightning_dear.planning.plan import MAX_BUCKETS, with_whole_tensors


class PlanLifecycle:
    """Makes one optimizer's plans and puts them to work.

    Args:
        training: What the optimizer is a part of.
        stepper: Gets each plan's pieces, and the state between two plans.
        number: Of the optimizer among all whose pipelines share process groups.
        on_gradient: Called whenever a parameter's `.grad` has been accumulated.
        on_arrival: Called with a bucket's number when its mean gradient has arrived, if these are
            gathered.

    Attributes:
        plan: None until the first step has been recorded; stays readable after `release`.
        active: The plan at work; None while the first step is recorded.
        recording: What was seen in the recorded step; None before its end.
        trained: What the optimizer trains.
        looks_again: Whether the next forward is recorded beside the plan at work.
        number: Of the optimizer among all whose pipelines share process groups.
        compressor: What encodes in place of the configured codec; None for that one.
        residuals: What encoding has left to be sent.
        loss_scale: See `Traffic`; to be assigned to by whoever scales losses.
        find_plan: Asked for the plan of what was recorded, before the planner is, which makes one
            if it returns None; to be assigned to by whoever knows plans, the same on all ranks.
    """

    def __init__(
        self,
        training: Training,
        stepper: ShardedOptimizer | ReplicatedOptimizer,
        number: int,
        on_gradient: OnGradient,
        on_arrival: Callable[[int], None],
    ) -> None:
        self.plan: BucketPlan | None = None
        self.active: ActivePlan | None = None
        self.recording: Recording | None = None
        self._training = training
        present = partial(getattr, training, "collectives")
        self.residuals = ResidualKeeper(stepper.optimizer, present, training.options)
        shared = SharedOptions(training, stepper.optimizer, number)
        self._notes = Notes((shared, training.signal))
        self.loss_scale: LossScale = lambda: None
        self.find_plan: Callable[[Sequence[TensorSpec]], BucketPlan | None] | None = None
        self.number, self._stepper = number, stepper
        self._on_gradient, self._on_arrival = on_gradient, on_arrival
        self.compressor: Compressor | None = None
        self.is_moving = False
        self._lagging_at_end: dict[Parameter, int] = {}
        self._start_recording()

    @property
    def present(self) -> ActivePlan:
        """The plan at work, where there must be one."""
        assert self.active is not None
        return self.active

    def complete_parameters(self, reason: str) -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent."""
        if self.active is not None:
            self.active.gatherer.complete(reason=reason)

    # --- from a recording to a plan -------------------------------------------------------------

    def _start_recording(self) -> None:
        self.looks_again = False
        training = self._training
        tree, streams = training.tree, training.collectives.streams
        self.trained = TrainedParameters(training.module, self._stepper.optimizer, tree, streams)
        if training.uses_buckets:
            self.trained.watch(self._on_gradient)

    def start(self) -> ActivePlan:
        """Makes the plan that the recorded step asks for, and puts it to work. Collective."""
        training, collectives = self._training, self._training.collectives
        self.recording = Recording.agreed(self.trained, collectives, training.options)
        tensors = self.recording.tensors
        found = None if self.find_plan is None else self.find_plan(tensors)
        plan = training.fusion.plan(tensors, training.world.size) if found is None else found
        self.recording.check(plan, collectives)
        return self._activate(plan)

    def _activate(self, plan: BucketPlan) -> ActivePlan:
        assert self.recording is not None
        plan = self._for_hosts(self._without_refused(plan))
        if self._training.options.is_of_gradients:
            plan = with_whole_tensors(plan, self.recording.tensors)
        self.plan = plan
        self.active = self._build(plan, self.recording)
        if self.compressor is not None:
            self.active.exchange.use(self.compressor)
        left = self._stepper.left
        self._stepper.attach(self.active.flat, self.trained.parameters)
        # What was written to 16-bit weights while there was no plan: there the bits tell.
        if left is not None and self._hand_on(left):
            self.active.flat.adopt_writes()
        coded, seed = self.active.exchange.coded, self.recording.seed
        self.residuals.attach(coded, self.trained.parameters, seed)
        return self.active

    @torch.no_grad()
    def _build(self, plan: BucketPlan, recording: Recording) -> ActivePlan:
        """Makes all that `plan` needs; the parameters move, and keep their values. Local."""
        training, collectives = self._training, self._training.collectives
        options = training.options
        sends_bytes = options.compressor is not None and options.ranks_together(collectives) == 1
        # Any stream may still read where parameters have been.
        collectives.streams.synchronize()
        flat = allocate(
            plan,
            self.trained.parameters,
            partial(options.role_of, plan),
            training.world.rank,
            # Where bytes travel instead of gradients, no scratch is needed for these.
            (lambda _: 0) if sends_bytes else collectives.scratch_numel,
            keeps_gradients=training.uses_buckets,
        )
        codecs = [recording.codecs[bucket.slices[0].tensor] for bucket in plan.buckets]
        what = flat, options.is_of_gradients, plan.uncompressed, lambda: self.loss_scale()
        traffic = Traffic(collectives, self.number * MAX_BUCKETS, *what)
        exchange = new_exchange(options, codecs, traffic)
        waiting = training.instruments.waiting
        for_gradients = partial(waiting, "reduce_scatter")
        names, order = self.trained.names, plan.reduce_order
        bucket_round = BucketRound(flat, order, exchange, names, self._notes, for_gradients)
        collector = GradientCollector(
            flat, names, recording.expected, plan, bucket_round, collectives
        )
        whole = WholeGradients(flat, bucket_round, exchange, for_gradients)
        gatherer = ParameterGatherer(
            training.module,
            flat,
            exchange,
            recording.ungated,
            partial(waiting, "all_gather"),
            self._on_arrival if options.is_of_gradients else None,
        )
        return ActivePlan(plan, flat, collector, bucket_round, whole, gatherer, exchange)

    def follow_parameters(self) -> None:
        """Sees whether other parameters or modules stand in the trained module than before. Local.

        Puts the optimizer's parameters back, with the others' values. Other modules do not wait
        yet: for them it blocks until all is complete, and lets the next forward be recorded.
        """
        if not self.trained.may_have_moved:
            return
        has_moved = self.trained.have_moved()
        if has_moved:
            self.trained.restore_replaced()
            has_moved = self.trained.have_moved()
        self.trained.note_homes()
        if has_moved and self._training.uses_buckets and self.active is not None:
            self.complete_parameters("exchanged modules")
            self.trained.recorder = self.trained.new_recorder()
            self.looks_again = True

    def follow_readers(self) -> None:
        """Waits from now on where parameters were read since. Local; nothing may be pending."""
        if not self.looks_again or self.recording is None or self.active is None:
            return
        self.looks_again = False
        ungated, present = self.trained.recorder.ungated, set(self._training.module.modules())
        for index, user in self.recording.ungated.items():
            # Whoever reads in place of a module that is gone is waited for before forward.
            ungated.setdefault(index, user if user in present else None)
        self.recording = replace(self.recording, ungated=ungated)
        self.active.gatherer.follow(self._training.module, ungated)

    def _for_hosts(self, plan: BucketPlan) -> BucketPlan:
        """`plan`, all-reduced where that sends less between hosts, as on hosts of unequal size."""
        training = self._training
        if not training.collectives.favors_all_reduce or training.all_reduce_refusal is not None:
            return plan
        return replace(plan, early=(), all_reduced=tuple(range(len(plan.buckets))))

    def _without_refused(self, plan: BucketPlan) -> BucketPlan:
        """`plan` without what is not done here, of which people are told."""
        for what, does, refusal in (
            ("early", "gathers {} buckets during backward", self._training.early_refusal),
            ("all_reduced", "all-reduces {} buckets", self._training.all_reduce_refusal),
        ):
            named = getattr(plan, what)
            if not named or refusal is None:
                continue
            if self._training.world.rank == 0:
                warnings.warn(
                    f"The plan '{plan.name}' {does.format(len(named))}, which is not done here:"
                    f" {refusal}.",
                    stacklevel=2,
                )
            none: dict[str, Any] = {what: ()}
            plan = replace(plan, **none)
        return plan

    # --- codecs and writes between two steps ----------------------------------------------------

    def use_compressor(self, compressor: Compressor, *, is_idle: bool) -> None:
        """See `OptimizerPipeline.use_compressor`.

        Args:
            compressor: See there.
            is_idle: Whether no gradient has been sent since the last step.

        Raises:
            ValueError: Without a compressor, and for one that keeps something else between steps,
                or that would have been refused instead of the configured one.
        """
        check_replaces(compressor, self._training.options.compressor)
        if not compressor.is_identity and compressor != self.compressor:
            # Raises as the constructor does.
            _ = replace(self._training.options, compressor=compressor)
        self.compressor = compressor
        if self.active is not None:
            # Another thread that reads parameters may complete them just now.
            with self.active.gatherer.arriving:
                self.active.exchange.use(compressor, is_idle=is_idle)

    def take_over(self, but: Collection[int] = ()) -> None:
        """What was written to parameters, and given as state, since the last step; writes win.

        16-bit weights whose masters come from a checkpoint were perhaps changed after it: there the
        bits tell.

        Args:
            but: Numbers of buckets whose parameters are left alone.
        """
        if self.active is None:
            return
        if self.active.flat.adopt_writes(but) and self._training.uses_buckets:
            self.trained.watch(self._on_gradient)
        if self.adopt_state():
            self.active.flat.adopt_writes(but)
        if self._training.options.encodes_differences:
            # What has a master there still is in no plan, and was loaded.
            self._tell_of_masters(AdoptedState(False, drop_masters(self._stepper.optimizer)))

    def adopt_state(self) -> bool:
        """Takes over state that was given since; says whether masters were among it. Local.

        Rank 0 warns, once a load, if masters are lost; all ranks may call.
        """
        return self._tell_of_masters(self._stepper.adopt_state())

    def _tell_of_masters(self, adopted: AdoptedState) -> bool:
        if adopted.loses_masters and self._training.world.rank == 0:
            warnings.warn(
                f"The masters in a checkpoint ('{MASTER_KEY}') are dropped, where weights differ:"
                " these are behind them by what a compressor had left to be sent, are rounded, or"
                " were written to after loading, and this training goes on from them, as they are"
                " now. To lose nothing, resume with the compressor, gather and precision of the run"
                " that saved; to change the compressor or gather, let that run call"
                " strategy.sync_replicas() before it saves.",
                stacklevel=2,
            )
        return adopted.brings_masters

    # --- from one plan to the next --------------------------------------------------------------

    def replan(self, plan: BucketPlan) -> None:
        """See `OptimizerPipeline.replan`; between two steps."""
        assert self.recording is not None
        self.recording.check(plan, self._training.collectives)
        self._leave_plan()
        self._release_active()
        self._activate(plan)

    def dissolve(self) -> None:
        """Back to before the first step, values and optimizer state kept. Collective, blocks.

        State stays in shards for the next plan. Weights that lag behind their masters become what
        these are, since without a plan neither says by itself which of both is new.
        """
        if self.active is not None:
            left = self._leave_plan(syncs_replicas=True)
            left.take(MASTER_KEY, set(self.active.flat.lagging))
        self.release()
        self.plan = None
        self._start_recording()

    def inherit(self, others: Sequence[PlanLifecycle]) -> None:
        """Goes on with what trainings have left that are over. Collective, blocks.

        Args:
            others: The same optimizer's, mutated: their state is here then.
        """
        self.residuals.inherit([other.residuals for other in others])
        collectives = self._training.collectives
        for other in others:
            left, was_written = other.hand_over(collectives)
            if left is not None:
                everyones = collectives.all_gather_object([*was_written.values()])
                said = zip(*everyones, strict=True)
                pairs = zip(was_written, said, strict=True)
                written = {one for one, is_new in pairs if any(is_new)}
                lost = left.take(MASTER_KEY, written)
                self._tell_of_masters(AdoptedState(False, bool(lost.entries)))
                self._stepper.left = left
                lagging = was_written.keys() & set(self._training.module.parameters())
                self._sync(left.take(MASTER_KEY, lagging - set(self.trained.parameters)))
        if isinstance(self._stepper, ReplicatedOptimizer):
            self._give_back()

    @torch.no_grad()
    def _sync(self, masters: SpreadState) -> None:
        """Weights that no plan will have become what their masters are. Collective, blocks."""
        self._hand_on(masters)
        for parameter in masters.entries:
            parameter.copy_(self._stepper.optimizer.state[parameter].pop(MASTER_KEY))

    def hand_over(self, through: Collectives) -> tuple[SpreadState | None, dict[Parameter, bool]]:
        """Lets go of the state of a training that is over. Collective, blocks.

        Returns:
            The state, or None if another one was loaded since; and of each parameter whose weights
            lagged behind their masters whether somebody has written to it since.
        """
        was_loaded = self._stepper.optimizer.state is not self._stepper.state_at_end
        left = None if was_loaded else spread_state(self._stepper, through)
        self._stepper.leave(None)
        at_end = self._lagging_at_end.items()
        return left, {one: _digest(one) != digest for one, digest in at_end}

    def _give_back(self) -> None:
        """Makes `optimizer.state` whole, on every rank; the plans have ended. Collective, blocks.

        Needs memory for the whole state.
        """
        left = spread_state(self._stepper, self._training.collectives)
        self._stepper.leave(None)
        self._hand_on(left)

    def _hand_on(self, left: SpreadState) -> bool:
        """Moves state to where it is needed now; says whether masters came to pieces."""
        known = set(self._training.module.parameters())
        # Should it raise, part of the state is neither here nor there.
        self.is_moving = True
        with uncounted(self._training.collectives):
            moved = hand_on(left, self._stepper, known, self._training.collectives)
        self.is_moving = False
        return self._tell_of_masters(moved)

    def _leave_plan(self, *, syncs_replicas: bool = False) -> SpreadState:
        """Completes parameters; their state stays in shards. Collective, blocks."""
        self.complete_parameters("re-plan")
        self.take_over()
        if syncs_replicas:
            self.present.sync_replicas()
        with uncounted(self._training.collectives):
            self.residuals.release()
        # Any stream may still read the flat buffers.
        self._training.collectives.streams.synchronize()
        left = spread_state(self._stepper, self._training.collectives)
        self._stepper.leave(left)
        return left

    def release(self) -> None:
        """Removes hooks and gates; parameters have storage of their own again."""
        self.trained.hooks.remove()
        self._release_active()

    @torch.no_grad()
    def _release_active(self) -> None:
        # The gradients' buffers go first, which nobody needs, and the parameters' one by one.
        views = () if self.active is None else self.active.release()
        self.active = None
        for parameter in views:
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def detach(self) -> None:
        """Ends the training: state and residuals stay readable. Parameters should be complete."""
        active = None if self._training.collectives.was_discarded else self.active
        lagging = [] if active is None else active.flat.lagging
        self.release()
        # What is written to weights afterwards wins, and neither they nor masters say it.
        self._lagging_at_end.update((one, _digest(one)) for one in lagging)
        self._stepper.detach()
        self.residuals.detach()


def _digest(parameter: Parameter) -> int:
    return crc32(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
