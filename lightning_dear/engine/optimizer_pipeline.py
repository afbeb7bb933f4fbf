"""One optimizer's part of the pipeline: its parameters' plan, and the way of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.collectives.work import Collectives
from lightning_dear.engine import gradients
from lightning_dear.engine.active_plan import ActivePlan, Recording, audit
from lightning_dear.engine.early_steps import EarlySteps
from lightning_dear.engine.mean_gradients import MeanGradients
from lightning_dear.engine.plan_lifecycle import PlanChanges
from lightning_dear.engine.reducer import warn_of_leftovers
from lightning_dear.engine.state_dicts import SavedState
from lightning_dear.engine.step_times import TimesRecorder
from lightning_dear.engine.trained_parameters import check_momentum
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.masters import LeftWeights
from lightning_dear.optimizers.replicated import ReplicatedOptimizer
from lightning_dear.optimizers.sharded import ShardedOptimizer
from lightning_dear.planning import BucketPlan, FusionPlanner
from lightning_dear.planning.times import ModelTimes
from lightning_dear.telemetry.statistics import Instruments


class OptimizerPipeline(MeanGradients, PlanChanges, SavedState):
    """Reduces, steps and gathers the parameters of one optimizer.

    `Pipeline` calls it around forwards and backwards; `ShardedOptimizer` (as `StepListener`) when
    the user calls the optimizer.

    Args:
        module: Mutated from the first step on: parameters become views of flat buffers.
        optimizer: Mutated: step hooks and `zero_grad`.
        number: Position among the pipeline's optimizers.
        collectives: What moves the bytes.
        fusion: Makes the plan from the recorded first step.
        instruments: Told of every wait.
        on_reduce: Called when a step's last reduce-scatters are launched, before they are there.
        on_step: Called when a step has ended.
        options: What travels, and how.

    Attributes:
        optimizer: The user's.
        plan: None until the first step has been recorded; stays readable after `detach`.
        times: Of the step that `measure_next_step` asked for, on this rank; None until its end.
        num_steps: Optimizer steps so far, without those that a GradScaler left out.
        early_refusal: See `Pipeline`.
        sharded: The optimizer's state and pieces on this rank.
        may_step_early: Whether backwards at present run inside `optimizer.step(closure)` and
            nothing but the step uses their gradients, so that buckets may be stepped in them.
    """

    def __init__(
        self,
        module: Module,
        optimizer: Optimizer,
        number: int,
        collectives: Collectives,
        fusion: FusionPlanner,
        instruments: Instruments,
        on_reduce: Callable[[], None],
        on_step: Callable[[], None],
        options: ExchangeOptions,
    ) -> None:
        self.optimizer = optimizer
        self.plan: BucketPlan | None = None
        self.times: ModelTimes | None = None
        self.num_steps = 0
        self.early_refusal: str | None = None
        self.sharded: ShardedOptimizer = (
            ReplicatedOptimizer(optimizer, self, decouple=not options.all_reduces)
            if options.is_of_gradients
            else ShardedOptimizer(optimizer, self)
        )
        self._residuals = ResidualKeeper(optimizer, collectives)
        self._left = LeftWeights(optimizer)
        self._module, self._number = module, number
        self._collectives = collectives
        self._fusion = fusion
        self._options = options
        self._uses_buckets = options.uses_buckets(collectives)
        self._instruments = instruments
        self._on_reduce = on_reduce
        self._on_step = on_step
        self._active: ActivePlan | None = None
        self._recording: Recording | None = None
        self._times_recorder: TimesRecorder | None = None
        self.may_step_early = False
        self._early_steps: EarlySteps | None = None
        self._synchronize = True
        self._has_leftovers = False
        # What has happened since the gradients were last reduced, dropped or stepped.
        self._is_sending = self._has_new = self._is_reduced = False
        self._is_exposed = self._was_changed = False
        self._start_recording()

    # --- forward and backward -----------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Takes parameters that are new in the optimizer into another plan. May block."""
        self._end_broken_step()
        self._trained.restore_replaced()
        if not self._trained.have_grown():
            return
        if self._active is not None and self._is_sending:
            # What other ranks wait for is sent first.
            self._active.reducer.reduce()
            raise RuntimeError(
                "Parameters began to require gradients after a backward whose gradients no step"
                " has used yet; let them do so between an optimizer step and the next forward."
            )
        self._dissolve()

    def watching(self, *, audits: bool) -> AbstractContextManager[Any]:
        """Around a training forward: records or times it, or audits every read, or nothing."""
        if self._times_recorder is not None and self._active is not None:
            return self._times_recorder.forward()
        if self._uses_buckets:
            if self._active is None:
                return self._recorder.recording()
            if audits:
                return audit(self._trained, self._active)
        return nullcontext()

    def measure_next_step(self) -> None:
        """Lets `times` be measured anew: forward will wait for nothing. May block. Local."""
        self.times = None
        if self._recording is None:
            return
        self._times_recorder = TimesRecorder(
            self._module, self.parameters, self._recording.ungated, self._instruments.clock
        )
        self.complete_parameters("measuring")

    def complete_entry(self, *, completes_all: bool) -> None:
        """Completes what is read outside any module; all, where no gate sees reads. May block."""
        if self._active is not None and completes_all:
            self._active.gatherer.complete(reason="compiled region")
        elif self._active is not None:
            self._active.gatherer.complete_entry()

    @contextmanager
    def backward(self, *, synchronize: bool) -> Iterator[None]:
        """Around a backward; see `Pipeline.backward`."""
        if self._is_exposed or self._was_changed:
            self._check_may_add_to_means()
        before, self._synchronize = self._synchronize, synchronize
        if synchronize:
            self._is_sending = True
        self._is_reduced = self._is_exposed = False
        if synchronize and self._active is not None:
            self._active.reducer.expect()
        recorder = self._times_recorder if synchronize else None
        if synchronize and self.may_step_early and recorder is None:
            self._early_steps = self._begin_early_steps()
        try:
            with nullcontext() if recorder is None else recorder.backward():
                yield
        finally:
            self._synchronize, self._early_steps = before, None
        if synchronize and self._active is None and self._uses_buckets:
            # As from the next step on: what `.grad` holds would not be the mean.
            self.reduce()

    def _on_gradient(self, index: int) -> None:
        self._has_new = True
        if self._active is not None:
            self._active.reducer.check_was_complete(index)
        if not self._synchronize:
            return
        self._is_sending = True
        if self._times_recorder is not None:
            self._times_recorder.note_gradient(index)
        if self._active is None:
            self._recorder.note_gradient(index)
        else:
            with self._leaving_out_codecs():
                self._active.reducer.on_gradient(index, launches=self.launches_in_backward)
        if self._early_steps is not None:
            self._early_steps.poll()

    def _begin_early_steps(self) -> EarlySteps | None:
        if self._active is None or not self._active.plan.early:
            return None
        self._active.reducer.steps_early = True
        self._active.gatherer.expect(early=True)
        return EarlySteps(self._active, self.sharded)

    # --- gradients between backward and step -----------------------------------------------------

    def reduce(self, *, votes: bool = False) -> None:
        """Blocks until this rank's shards hold the mean gradient. All ranks call; idempotent.

        Makes the plan in the first step. Afterwards `.grad` is None (at world size 1: what it was).

        Args:
            votes: Whether to ask all ranks, if gradients were reduced before, for new ones that
                came outside `backward`, and perhaps on some ranks only.
        """
        if self._is_reduced and not self._has_new_gradients(votes):
            if self._is_exposed:
                self._conceal()
            return
        if self._trained.have_grown():
            raise RuntimeError(
                "Parameters began to require gradients, or a parameter group was added, between a"
                " forward and its optimizer step; do it before the forward."
            )
        if self._has_leftovers and self._collectives.rank == 0:
            warn_of_leftovers(self.optimizer)
        self.complete_parameters("step")
        active = self._active or self._start()
        self.sharded.set_gradients(active.reducer.reduce(self._on_reduce))
        # Without buckets the shards' gradients are views of `.grad`, and nobody tells of new ones.
        self._is_reduced = self._uses_buckets
        self._is_sending = self._has_new = self._is_exposed = False

    def _has_new_gradients(self, votes: bool) -> bool:
        if votes and self._collectives.reads_flags_freely:
            return gradients.anyone(self._has_new, self._collectives)
        return self._has_new

    # --- the step: see `StepListener` -------------------------------------------------------------

    def drop_gradients(self) -> None:
        """See `StepListener`. Other ranks drop theirs too, so what was begun is ended first."""
        if self._active is not None:
            if self._active.reducer.steps_early:
                raise RuntimeError(
                    "zero_grad() was called between the backward of a step and its end, when part"
                    " of the parameters had been updated. Call it before backward."
                )
            if self._is_sending:
                self.complete_parameters("zero_grad")
                self._active.reducer.reduce()
            self._active.reducer.drop()
            self.sharded.clear_gradients()
        self._recorder.gradients.clear()
        self._has_leftovers = False
        self._is_sending = self._has_new = self._is_reduced = False
        self._is_exposed = self._was_changed = False

    def before_step(self) -> None:
        """See `StepListener`: the last reduce-scatters, and at the first step the plan."""
        check_momentum(self.optimizer, self._options)
        self.reduce(votes=True)
        assert self._active is not None
        self._active.exchange.check()
        self._take_over(but=self.sharded.stepped_early)
        # From here to the end of the step nobody reads parameters: others' may arrive.
        self._active.gatherer.begin_step()
        self._active.gatherer.expect(early=False)
        if self._times_recorder is not None:
            self._times_recorder.step_begins()

    def steps_first(self) -> Sequence[int]:
        """See `StepListener`: all ranks gather in one order, whatever was stepped in backward."""
        assert self._active is not None
        return self._active.plan.gather_order

    def stepping(self) -> None:
        """See `StepListener`."""
        self._step_began = self._instruments.mark()

    def stepped(self, number: int) -> None:
        """See `StepListener`: the bucket's all-gather starts before the next run is stepped."""
        self._instruments.record_step(f"bucket {number}", self._step_began)
        self.launch(number)
        self._step_began = self._instruments.mark()

    def launch(self, number: int) -> None:
        """See `GatherListener`."""
        assert self._active is not None
        with self._leaving_out_codecs():
            self._active.gatherer.launch(number)

    def _leaving_out_codecs(self) -> AbstractContextManager[None]:
        recorder = self._times_recorder
        return nullcontext() if recorder is None else recorder.leaving_out_codecs()

    def _on_arrival(self, number: int) -> None:
        if isinstance(self.sharded, ReplicatedOptimizer):
            began, recorder = self._instruments.mark(), self._times_recorder
            with nullcontext() if recorder is None else recorder.late_step():
                self.sharded.step_bucket(number)
            self._instruments.record_step(f"bucket {number}", began)

    def after_step(self) -> None:
        """See `StepListener`: from here on reads wait."""
        assert self._active is not None
        # First, since another thread may complete what is behind a gate at once.
        self._active.reducer.end_step()
        self._active.gatherer.close_gates()
        self._is_reduced = self._is_exposed = self._was_changed = False
        self.num_steps += 1
        self._has_leftovers = self._uses_buckets
        if self._times_recorder is not None:
            self._times_recorder.step_ends()
            self.times = self._times_recorder.times
            if self.times is not None:
                self._times_recorder = None
        self._on_step()
        if self.sharded.has_foreign_post_hooks():
            self.complete_parameters("optimizer step hook")

    def _end_broken_step(self) -> None:
        if self._active is not None:
            self._active.gatherer.end_step()

    def without_arrivals(self) -> AbstractContextManager[Any]:
        """See `StepListener`."""
        return nullcontext() if self._active is None else self._active.gatherer.arriving

    # --- for whoever looks in from outside ------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent."""
        if self._active is not None:
            self._active.gatherer.complete(reason=reason)

    def abandon(self) -> None:
        """After an exception, perhaps in a step: puts the optimizer's groups right; never waits."""
        self.sharded.restore()
        self._end_broken_step()

    def detach(self) -> None:
        """The module and the optimizer are as they were. Parameters should be complete."""
        self._release()
        self.sharded.remove_hooks()
        for part in (self.sharded, self._residuals, self._left):
            part.detach()
