"""One optimizer's mean gradient, between the last backward and the step: what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.engine.hooks import warn_of_leftovers
from lightning_dear.engine.plan_lifecycle import PlanLifecycle
from lightning_dear.engine.step_state import StepProgress, StepState
from lightning_dear.engine.training import Training
from lightning_dear.optimizers.sharded import SteppedPieces


@dataclass(eq=False)
class MeanGradient:
    """Brings the mean gradient to this rank's shards, tells its norm, shows it and changes it.

    All ranks call each of its methods, and in one order. Each reduces first, if nothing has.

    Attributes:
        training: What the optimizer is a part of.
        progress: Where the optimizer's step is; told what happens.
        plans: Makes its plan when it is reduced for the first time.
        stepper: Has the shards, which are mutated.
        has_leftovers: Whether under plain torch gradients of the last step would still count; to be
            assigned to.
    """

    training: Training
    progress: StepProgress
    plans: PlanLifecycle
    stepper: SteppedPieces
    has_leftovers: bool = False

    def reduce(self) -> None:
        """Blocks until this rank's shards hold the mean gradient. All ranks call; idempotent.

        Makes the plan in the first step. Afterwards `.grad` is None (at world size 1: what it was).
        """
        self._bring()
        if self.progress.state is StepState.EXPOSED:
            self._conceal()

    def _conceal(self) -> None:
        active = self.plans.present
        active.whole_gradients.conceal()
        self.stepper.set_gradients(active.round.used)
        self.progress.enter(StepState.CHANGED)

    def _bring(self) -> None:
        """As `reduce`, but leaves them exposed where they are."""
        self.progress.check_is_on()
        if self.progress.has_means:
            self.plans.trained.check_unchanged(counts_thawed=False)
            return
        self.plans.trained.check_unchanged()
        if self.has_leftovers and self.training.world.rank == 0:
            warn_of_leftovers(self.stepper.optimizer)
        self.plans.complete_parameters("step")
        active = self.plans.active or self.plans.start()
        self.finish_rounds(active, sends_buffers=True)
        self.stepper.set_gradients(active.round.used)
        self.progress.enter(StepState.REDUCED)

    def finish_rounds(self, active: ActivePlan, *, sends_buffers: bool = False) -> None:
        """Sends all gradients that are left and blocks until their means are there.

        All ranks call. Clears `.grad` of parameters that have a place in a bucket. Another round
        follows for as long as any rank has late gradients; means add up over the step.

        Args:
            active: The plan at work.
            sends_buffers: Whether the module's buffers follow the last gradients.
        """
        is_late = True
        while is_late:
            active.round.set_means_aside()
            says = active.collector.collect_rest()
            active.round.launch_all()
            if sends_buffers:
                self.training.launch_buffers()
            is_late = active.round.finish(says)
            active.collector.begin()
            self._check_none_came_after_its_step(active)
        active.exchange.note_used(active.round.used, keeps=True)

    def _check_none_came_after_its_step(self, active: ActivePlan) -> None:
        """Refuses a late gradient of an early bucket, on all ranks alike, stepped yet or not."""
        for index in active.round.late:
            if not active.round.watched.isdisjoint(active.flat.placements[index].buckets):
                raise RuntimeError(
                    f"Another gradient for '{self.plans.trained.names[index]}' came after its first"
                    " had been used for an update during backward: this step ran backward through"
                    " it more often than the recorded one did. Use a fusion without early gathers,"
                    " such as fusion='threshold'."
                )

    def _refuse_changes(self) -> None:
        if self.plans.active is not None and self.plans.active.round.watched:
            raise RuntimeError(
                "Gradients cannot be changed after a backward that has used part of them for its"
                " early gathers. Override on_before_optimizer_step or configure_gradient_clipping"
                " to change them there, which turns early gathers off, or use fusion='threshold'."
            )

    def expose(self) -> None:
        """Puts the mean gradient into every `.grad`, as DDP leaves it. All ranks call; blocks.

        Costs an all-gather. What is done to `.grad` counts: it is taken back before the step.
        """
        if self.progress.state is StepState.EXPOSED:
            return
        self._refuse_changes()
        self._bring()
        self.plans.present.whole_gradients.expose()
        self.progress.enter(StepState.EXPOSED)

    @contextmanager
    def _on_shards(self, *, mutates: bool) -> Iterator[list[Tensor]]:
        """This rank's pieces, with mean gradients; the user's `.grad` stays exposed if it was."""
        if mutates:
            self._refuse_changes()
        was_exposed = self.progress.state is StepState.EXPOSED
        self._bring()
        if was_exposed:
            self._conceal()
        if mutates:
            self.progress.enter(StepState.CHANGED)
        yield [piece.parameter for piece in self.stepper.pieces]
        if was_exposed:
            # What each rank has of its own is elsewhere only where means are cut into shards.
            is_lost = mutates or self.training.options.is_scattered
            whole = self.plans.present.whole_gradients
            whole.expose() if is_lost else whole.show()
            self.progress.enter(StepState.EXPOSED)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Its norm, as it came. All ranks call; blocks.

        The next step uses it, or what is left of it if it is encoded to be gathered.
        """
        with self._on_shards(mutates=False):
            return self.plans.present.global_norm(self.stepper.pieces, norm_type)

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales it to a norm of at most `max_norm`; returns its norm before. Blocks."""
        with self._on_shards(mutates=True) as pieces:
            norm = self.plans.present.global_norm(self.stepper.pieces, norm_type)
            clip_grads_with_norm_(pieces, max_norm, norm)
            return norm

    def clip_by_value(self, clip_value: float) -> None:
        """Clips every element to [-clip_value, clip_value]. Blocks."""
        with self._on_shards(mutates=True) as pieces:
            # torch's own raises if there is none, as on a rank that has no shard of what was used.
            if any(one.grad is not None for one in pieces):
                clip_grad_value_(pieces, clip_value)

    def unscale(self, unscale: Callable[[Optimizer], None]) -> None:
        """Calls a GradScaler's `unscale_` on the shards; inf on one rank is inf on all. Blocks."""
        with self._on_shards(mutates=True):
            self.plans.present.unscale(unscale, self.stepper)
