"""The plans of one optimizer: from the recorded step to the first one, and from one to the next."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch.nn import Parameter

from lightning_dear.bucket import allocate, hash_of_bits
from lightning_dear.checkpoint.optimizer_state import hand_on, spread_state
from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.collectives.work import Collectives, uncounted
from lightning_dear.compression import Compressor, check_replaces
from lightning_dear.engine.active_plan import ActivePlan, Recording
from lightning_dear.engine.bucket_round import BucketRound
from lightning_dear.engine.gradient_collector import GradientCollector
from lightning_dear.engine.hooks import OnGradient
from lightning_dear.engine.notes import LaunchDigest, Notes, RingTrial, SharedOptions, Signal
from lightning_dear.engine.parameter_gatherer import ParameterGatherer
from lightning_dear.engine.shared_end import BatchesAhead
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.engine.training import Training
from lightning_dear.exchange import LossScale, Traffic, new_exchange
from lightning_dear.optimizers import replicated, sharded
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState, drop_masters
from lightning_dear.optimizers.pieces import SpreadState
from lightning_dear.planning.plan import MAX_BUCKETS, BucketPlan, TensorSpec, with_whole_tensors


class PlanLifecycle:
    """Makes one optimizer's plans, builds what each of them needs, and moves state between them.

    `OptimizerPipeline` owns it, and calls it before forward, at the first reduction, and in the
    step. The only place that builds an `ActivePlan`: flat buffers, exchange, `BucketRound`,
    collector and gatherer. It knows nothing of the states of a step.

    Args:
        training: What all optimizers of the module share.
        stepper: Gets the pieces of each plan, and keeps the optimizer's state between two plans.
        number: Optimizer number, unique among optimizers that share process groups.
        on_gradient: Called whenever a parameter's `.grad` was accumulated.
        on_arrival: With gathered gradients, called with a bucket number when the bucket's mean
            gradients have arrived. Otherwise it is not called.

    Attributes:
        plan: The present plan. None until the first step has been recorded, and after `dissolve`.
            Stays readable after `detach`.
        active: What the present plan needs. None while there is no plan, and after `detach`.
        recording: Results of the last recorded step. None until the first one has been recorded.
        trained: The optimizer's parameters, as they were when recording began.
        follows_reads: Whether the recorded forward has read parameters after a step in it, so that
            the next forward looks for the modules that must wait; to be assigned to.
        looks_again: Whether the next forward is recorded, although there is a plan, since modules
            were replaced. See `follow_readers`.
        number: Same as the argument.
        compressor: Compressor in the place of the configured one. None means the configured one.
        residuals: Keeps residuals between plans, trainings and checkpoints.
        loss_scale: Function that returns the present loss scale, see `Traffic`; to be assigned to.
            At first it returns None: gradients are not scaled.
        find_plan: Optional function: tensors of the recording -> plan. It is asked before the
            planner, so that a plan found by an earlier run is used again. It must return the same
            on all ranks. If it returns None, or is None, the planner makes the plan. To be assigned
            to.
        hooks_signal: Note that tells whether a rank has step hooks that may read gradients.
        is_moving: Whether state is being moved to another plan. If that has raised, it stays True:
            part of the state is lost, and `OptimizerPipeline.prepare_state` raises.
    """

    def __init__(
        self,
        training: Training,
        stepper: sharded.ShardedOptimizer | replicated.ReplicatedOptimizer,
        number: int,
        on_gradient: OnGradient,
        on_arrival: Callable[[int], None],
    ) -> None:
        self.plan: BucketPlan | None = None
        self.active: ActivePlan | None = None
        self.recording: Recording | None = None
        self._training, collectives = training, training.collectives
        self.residuals = ResidualKeeper(stepper.optimizer, collectives, training.options)
        shared = SharedOptions(collectives, stepper, number, training.weights)
        self.hooks_signal = Signal()
        told = training.signal, training.unheld.signal, training.buffers.signal, self.hooks_signal
        # The second is the last note, since its number of bytes may change during a training.
        ring = RingTrial(training.instruments, collectives, number)
        last = ring, BatchesAhead(lambda: training.end)
        self._notes = Notes([shared, LaunchDigest(collectives, number), *told, *last])
        self.loss_scale: LossScale = lambda: None
        self.find_plan: Callable[[Sequence[TensorSpec]], BucketPlan | None] | None = None
        self.number, self._stepper = number, stepper
        self._on_gradient, self._on_arrival = on_gradient, on_arrival
        self.compressor: Compressor | None = None
        self.is_moving = False
        # For parameters whose weights lagged behind their masters at the end: hash of the weights.
        self._lagging_at_end: dict[Parameter, int] = {}
        self._start_recording()

    @property
    def present(self) -> ActivePlan:
        """Returns `active`. To be read only while there is a plan."""
        assert self.active is not None
        return self.active

    def complete_parameters(self, reason: str) -> None:
        """Blocks until all parameters have the values of the last step. Local, idempotent.

        Does nothing while there is no plan.

        Args:
            reason: What forces the wait, for the timeline.
        """
        if self.active is not None:
            self.active.gatherer.complete(reason=reason)

    # --- from a recording to a plan -------------------------------------------------------------

    def _start_recording(self) -> None:
        self.looks_again = self.follows_reads = False
        training = self._training
        streams = training.collectives.streams
        self.trained = TrainedParameters(training.tree, self._stepper.optimizer, streams)
        if training.uses_buckets:
            self.trained.watch(self._on_gradient)

    def start(self) -> ActivePlan:
        """Makes a plan from the recorded step (or finds one), and builds it. Collective, blocks."""
        training, collectives = self._training, self._training.collectives
        recording = Recording.agreed(self.trained, collectives, training.options)
        self.recording, tensors = recording, recording.tensors
        training.warn_of_aliases(self.trained.names)
        found = None if self.find_plan is None else self.find_plan(tensors)
        plan = training.fusion.plan(tensors, training.world.size) if found is None else found
        recording.check(plan, collectives)
        return self._activate(plan, recording)

    def _activate(self, plan: BucketPlan, recording: Recording) -> ActivePlan:
        plan = self._all_reduced(plan)
        if self._training.options.is_of_gradients:
            plan = with_whole_tensors(plan, recording.tensors)
        self.plan = plan
        self.active = self._build(plan, recording)
        if self.compressor is not None:
            self.active.exchange.use(self.compressor)
        left = self._stepper.left
        self._stepper.attach(self.active.flat, self.trained.parameters)
        # If the moved state has masters: the user may have written to weights while there was no
        # plan. Such weights are not their rounded masters any more, and replace them.
        if left is not None and self._hand_on(left):
            self.active.flat.adopt_writes()
        coded = self.active.exchange.coded
        self.residuals.attach(coded, self.trained.parameters, recording.seed)
        return self.active

    @torch.no_grad()
    def _build(self, plan: BucketPlan, recording: Recording) -> ActivePlan:
        """Makes all that `plan` needs. Parameters become views of flat buffers. Local.

        Parameters keep their values.
        """
        training, collectives = self._training, self._training.collectives
        options = training.options
        sends_bytes = options.compressor is not None and options.ranks_together(collectives) == 1
        # Any stream may still read the former memory of parameters, which is freed here.
        collectives.streams.synchronize()
        collectives.begin_plan(self.number * MAX_BUCKETS)
        # Scratch is for receiving gradients. Encoded bytes are received in other buffers.
        place = training.world.rank, (lambda _: 0) if sends_bytes else collectives.scratch_numel
        tensors = plan, self.trained.parameters, partial(options.role_of, plan)
        flat = allocate(*tensors, *place, keeps_gradients=training.uses_buckets)
        codecs = [recording.codecs[bucket.slices[0].tensor] for bucket in plan.buckets]
        what = flat, options.is_of_gradients, plan.uncompressed, lambda: self.loss_scale()
        traffic = Traffic(collectives, self.number * MAX_BUCKETS, *what)
        exchange = new_exchange(options, codecs, traffic)
        waiting = training.instruments.waiting
        for_gradients = partial(waiting, "reduce_scatter")
        names, order = self.trained.names, plan.reduce_order
        bucket_round = BucketRound(flat, order, exchange, names, self._notes, for_gradients)
        bucket_round.weights = training.weights
        collector = GradientCollector(recording.expected, bucket_round)
        where = training.module, flat, exchange, recording.ungated
        on_arrival = self._on_arrival if options.is_of_gradients else None
        gatherer = ParameterGatherer(*where, partial(waiting, "all_gather"), on_arrival)
        return ActivePlan(plan, flat, collector, bucket_round, gatherer, exchange)

    def follow_parameters(self) -> None:
        """Looks for parameters and modules that were replaced in the trained module. Local.

        Replaced parameters are put back, with the new values (`TrainedParameters.have_moved`). New
        modules have no gates yet. If modules that own parameters were replaced, it blocks until all
        parameters are complete, and lets the next forward be recorded (`looks_again`). It does
        neither while there is no plan, or if gradients pass through no buckets.
        """
        if self.follows_reads and self.recording is not None and self.active is not None:
            self.follows_reads = False
            self.active.gatherer.follow(self._training.module, self.recording.ungated)
        has_moved = self.trained.have_moved()
        if has_moved and self._training.uses_buckets and self.active is not None:
            self.complete_parameters("exchanged modules")
            self.trained.recorder = self.trained.new_recorder()
            self.looks_again = True

    def follow_readers(self) -> None:
        """Gives gates to replaced modules, if the last forward was recorded because of them.

        Otherwise does nothing. From then on the modules wait that own parameters now, or that were
        seen to read parameters in that forward. Local. No bucket may be pending.
        """
        if not self.looks_again or self.recording is None or self.active is None:
            return
        self.looks_again = False
        ungated, present = self.trained.recorder.ungated, {None, *self._training.module.modules()}
        for index, users in self.recording.ungated.items():
            # If the module that has read the parameter is gone, None lets every forward wait for
            # the parameter before it begins.
            ungated[index] = ungated.get(index, set()) | (users & present) or {None}
        self.recording = replace(self.recording, ungated=ungated)
        self.active.gatherer.follow(self._training.module, ungated)

    def _all_reduced(self, plan: BucketPlan) -> BucketPlan:
        """Returns `plan`, with all buckets all-reduced if that sends less between hosts.

        It sends less if hosts have several ranks, but not equally many. Otherwise the plan is
        returned as it is. If the training refuses all-reduced buckets (`all_reduce_refusal`), it is
        returned without: those buckets are then reduce-scattered, and stepped and gathered in the
        step, and rank 0 warns.
        """
        training, refusal = self._training, self._training.all_reduce_refusal
        if refusal is None and training.collectives.favors_all_reduce:
            return replace(plan, all_reduced=tuple(range(len(plan.buckets))))
        if refusal is None or not plan.all_reduced:
            return plan
        if training.world.rank == 0:
            warnings.warn(
                f"The plan '{plan.name}' all-reduces {len(plan.all_reduced)} buckets, which this"
                " training does not do. Use another plan, such as of fusion='threshold', or ignore"
                f" this. The reason: {refusal}.",
                stacklevel=2,
            )
        return replace(plan, all_reduced=())

    # --- compressors, and writes between two steps ----------------------------------------------

    def use_compressor(self, compressor: Compressor, *, is_idle: bool) -> None:
        """Encodes with another compressor from now on; see `OptimizerPipeline.use_compressor`.

        Args:
            compressor: The compressor of the next steps.
            is_idle: Whether no bucket was launched since the last step. If not, the compressor is
                used from the next step on.

        Raises:
            ValueError: If no compressor is configured, if the new one keeps other residuals between
                steps than the configured one, or if it does not fit the other options.
        """
        check_replaces(compressor, self._training.options.compressor)
        if not compressor.is_identity and compressor != self.compressor:
            # Only for the constructor's checks, which raise if these options do not fit together.
            _ = replace(self._training.options, compressor=compressor)
        self.compressor = compressor
        if self.active is not None:
            # Another thread that reads parameters must not decode them meanwhile.
            with self.active.gatherer.arriving:
                self.active.exchange.use(compressor, is_idle=is_idle)

    def take_over(self) -> None:
        """Adopts weights and optimizer state that the user has written since the last step. Local.

        State moves from `optimizer.state` to the shards. With gathered gradients it stays there,
        without masters. Masters in the shards follow written weights. If the user has loaded
        masters whose rounded values are not the weights, the weights win, and rank 0 warns. Does
        nothing while there is no plan.
        """
        if self.active is None:
            self._stepper.drop_removed()
            return
        if self.active.flat.adopt_writes() and self._training.uses_buckets:
            self.trained.watch(self._on_gradient)
        if self._tell_of_masters(self._stepper.adopt_state()):
            # Masters were loaded. The user may have changed weights since these were saved, and
            # weights win: once more compare weights with masters.
            self.active.flat.adopt_writes()
        if self._training.options.encodes_differences:
            # Masters still in `optimizer.state` are of parameters in no plan, and are dropped.
            self._tell_of_masters(AdoptedState(False, drop_masters(self._stepper.optimizer)))

    def _tell_of_masters(self, adopted: AdoptedState) -> bool:
        """Warns on rank 0 if masters were dropped. Returns whether a piece took its master over."""
        if adopted.loses_masters and self._training.world.rank == 0:
            warnings.warn(
                f"The checkpoint's weights count. Its masters ('{MASTER_KEY}') are dropped where"
                " they differ. To lose nothing, resume with the compressor, gather and precision of"
                " the run that saved, or let that run call strategy.sync_replicas() before saving.",
                stacklevel=2,
            )
        return adopted.brings_masters

    # --- from one plan to the next --------------------------------------------------------------

    def replan(self, plan: BucketPlan) -> None:
        """Goes on with another plan; see `OptimizerPipeline.replan`. Collective, blocks."""
        assert self.recording is not None
        self.recording.check(plan, self._training.collectives)
        self._leave_plan()
        self._release_active()
        self._activate(plan, self.recording)

    def dissolve(self) -> None:
        """Ends the present plan, if there is one: the next step is recorded, and makes another.

        Collective, blocks. Weights keep their values, and the optimizer's state stays in shards.
        Exception: weights that lag behind their masters (`Role.lags`) become equal to them, and the
        masters are dropped. Without a plan it could not be seen later which was written last.
        """
        if self.active is not None:
            left = self._leave_plan(syncs_replicas=True)
            left.take(MASTER_KEY, set(self.active.flat.lagging))
        self.release()
        self.plan = None
        self._start_recording()

    def inherit(self, others: "Sequence[PlanLifecycle]") -> None:
        """Takes over optimizer state and residuals of trainings that have ended.

        Collective, blocks. To be called before the first step. State that the user has loaded since
        such a training has ended stays, in place of the training's state.

        Args:
            others: Ended lifecycles of the same optimizer. Mutated: their state moves to this one.
        """
        self.residuals.inherit([other.residuals for other in others])
        collectives = self._training.collectives
        for other in others:
            left, was_written = other.hand_over(collectives)
            if left is not None:
                flags = zip(*collectives.all_gather_object([*was_written.values()]), strict=True)
                lost = left.take(MASTER_KEY, {*compress(was_written, map(any, flags))})
                self._tell_of_masters(AdoptedState(False, bool(lost.entries)))
                self._stepper.left = left
                self._stepper.guard()
                lagging = was_written.keys() & set(self._training.module.parameters())
                self._sync(left.take(MASTER_KEY, lagging - set(self.trained.parameters)))
        if isinstance(self._stepper, replicated.ReplicatedOptimizer):
            # Whole tensors are stepped now: state of an ended training that stays in shards would
            # be of no use. Every rank needs memory for all of it.
            own = spread_state(self._stepper, collectives)
            self._stepper.leave(None)
            self._hand_on(own)

    @torch.no_grad()
    def _sync(self, masters: SpreadState) -> None:
        """Makes weights that this training does not step equal to their masters.

        The masters are dropped. Collective, blocks.
        """
        self._hand_on(masters)
        for parameter in masters.entries:
            parameter.copy_(self._stepper.optimizer.state[parameter].pop(MASTER_KEY))

    def hand_over(self, through: Collectives) -> tuple[SpreadState | None, dict[Parameter, bool]]:
        """Gives away the state of this training, which has ended. Collective, blocks.

        Args:
            through: Collectives of the next training.

        Returns:
            Two results. First, the state, or None if the user has loaded another state since the
            end. Second, a dict: parameter -> whether its weights were written to since the end. It
            has the parameters whose weights lagged behind their masters then.
        """
        was_loaded = self._stepper.optimizer.state is not self._stepper.state_at_end
        self._stepper.drop_removed()
        left = None if was_loaded else spread_state(self._stepper, through)
        self._stepper.leave(None)
        at_end = self._lagging_at_end.items()
        return left, {one: hash_of_bits(one) != before for one, before in at_end}

    def _hand_on(self, left: SpreadState) -> bool:
        """Moves state to the ranks that step it now, or into `optimizer.state` if no rank does.

        Collective, blocks. Rank 0 warns if masters that differ from weights are dropped.

        Args:
            left: State of the plan before. Mutated: what was sent is dropped.

        Returns:
            Whether pieces of this rank got masters.
        """
        known = set(self._training.module.parameters())
        # If moving raises, the flag stays True: part of the state is lost then.
        self.is_moving = True
        with uncounted(self._training.collectives):
            moved = hand_on(left, self._stepper, known, self._training.collectives)
        self.is_moving = False
        return self._tell_of_masters(moved)

    def _leave_plan(self, *, syncs_replicas: bool = False) -> SpreadState:
        """Ends the present plan, and returns its state, which stays in shards. Collective, blocks.

        Before that it waits for all parameters, and adopts what the user has written.

        Args:
            syncs_replicas: Whether to make lagging weights equal to their masters.
        """
        self.complete_parameters("re-plan")
        self.take_over()
        if syncs_replicas:
            self.present.sync_replicas()
        with uncounted(self._training.collectives):
            self.residuals.release()
        # Any stream may still read the flat buffers, which the caller frees.
        self._training.collectives.streams.synchronize()
        left = spread_state(self._stepper, self._training.collectives)
        self._stepper.leave(left)
        return left

    def release(self) -> None:
        """Removes hooks and gates, and gives each parameter its own memory again. Local.

        A parameter that was in shared memory before goes back there. Parameters keep the values
        that they have. Buckets that are pending would keep old values.
        """
        self.trained.hooks.remove()
        self._release_active()

    @torch.no_grad()
    def _release_active(self) -> None:
        # To save memory, buffers of gradients are freed before parameters are copied, one by one.
        views = () if self.active is None else self.active.release()
        self.active = None
        for parameter, former in views:
            values = parameter.data
            # In shared memory other processes still read, and a next training finds it again.
            parameter.data = values.clone() if former is None else former.copy_(values)

    def detach(self) -> None:
        """Ends the training: removes hooks, gates and flat buffers. Local.

        The caller must have completed all parameters: a bucket that is still pending keeps old
        values. State and residuals stay in this object, for `hand_over` and checkpoints.
        """
        active = None if self._training.collectives.was_discarded else self.active
        lagging = [] if active is None else active.flat.lagging
        self.release()
        # A training that inherits masters must know whether weights were written to since: these
        # replace their masters. Lagging weights differ from their masters anyway, so `hand_over`
        # compares hashes of the weights.
        self._lagging_at_end.update((parameter, hash_of_bits(parameter)) for parameter in lagging)
        self._stepper.detach()
        self.residuals.detach()
