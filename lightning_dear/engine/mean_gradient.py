"""The mean gradient of one optimizer: reduced, measured, clipped and shown before the step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, optim
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from lightning_dear.engine import active_plan, bucket_round, hooks, plan_lifecycle
from lightning_dear.engine.step_state import StepProgress, StepState
from lightning_dear.engine.training import Training
from lightning_dear.optimizers.pieces import SteppedPieces

_HAS_OWN_GRADIENTS = (StepState.ACCUMULATING, StepState.SENDING)


@dataclass(eq=False)
class MeanGradient:
    """Reduces one optimizer's gradients, and lets callers use the mean before the step.

    `OptimizerPipeline` owns it. Strategies and GradScalers call it between the last backward and
    the step. It runs rounds (see `BucketRound`) until no gradient is late, which means that it came
    after its bucket was launched. Then it gives the means to the stepper's pieces. It knows the
    states of a step, but not how buckets travel or how an optimizer steps.

    Every public method is collective: all ranks call the same methods in one order. Every one
    reduces first, unless the gradients of this step have been reduced.

    Attributes:
        training: What all optimizers of the module share.
        progress: State of the optimizer's step, which the methods change.
        plans: Makes the plan at the first reduction.
        stepper: Has this rank's pieces, whose gradients are mutated.
        has_leftovers: Whether `zero_grad` was not called since the last step, so that plain torch
            would add to the last step's gradients. If so, the next reduction warns on rank 0; to be
            assigned to.
    """

    training: Training
    progress: StepProgress
    plans: plan_lifecycle.PlanLifecycle
    stepper: SteppedPieces
    has_leftovers: bool = False
    _have_asked: bool = False

    def reduce(self) -> None:
        """Blocks until this rank's shards hold the mean gradient. Collective, idempotent.

        Makes the plan in the first step. Afterwards `.grad` is None. If `.grad` showed the mean
        gradient (`expose`), it is taken from there with the user's changes. If gradients pass
        through no buckets (world size 1, no compressor) `.grad` is left as it is.

        Raises:
            RuntimeError: After `detach`, or if the optimizer's parameters have changed since
                forward. Also what the backend raises.
            ValueError: If ranks have different learning rates or other options.
        """
        self._bring()
        if self.progress.state is StepState.EXPOSED:
            active = self.plans.present
            active.conceal_gradients()
            self.stepper.set_gradients(active.round.used)
            self.progress.enter(StepState.CHANGED)

    def _bring(self) -> None:
        """Does what `reduce` does, but leaves an exposed mean gradient in `.grad`."""
        self.progress.check_is_on()
        if self.progress.has_means:
            self.plans.trained.check_unchanged(counts_thawed=False)
            return
        self.plans.trained.check_unchanged()
        if self.has_leftovers and self.training.world.rank == 0:
            hooks.warn_of_leftovers(self.stepper.optimizer)
        self.plans.complete_parameters("step")
        active = self.plans.active or self.plans.start()
        self.finish_rounds(active, sends_buffers=True)
        if not self.training.uses_buckets:
            self.training.weights.scale_alone(self.plans.trained.parameters)
        self.stepper.set_gradients(active.round.used)
        self.progress.enter(StepState.REDUCED)

    def finish_rounds(self, active: active_plan.ActivePlan, *, sends_buffers: bool = False) -> None:
        """Launches all buckets that are left, and blocks until their means have arrived.

        Collective. Clears `.grad` of parameters whose gradients lie in buckets. Runs another round
        as long as a rank has late gradients. The means of all rounds of a step add up.

        Args:
            active: The present plan.
            sends_buffers: Whether to broadcast the module's buffers after the round's last bucket
                was launched, if a forward has run since their last broadcast.
        """
        self.training.weights.launch()
        is_late = True
        while is_late:
            active.round.set_means_aside()
            says = active.collector.collect_rest()
            active.round.launch_all()
            if sends_buffers:
                self.training.buffers.launch()
            is_late = active.round.finish(says)
            self.training.weights.finish()
            active.collector.begin()
        active.exchange.note_used(active.round.used, keeps=True)

    def expose(self) -> None:
        """Puts the whole mean gradient into every `.grad`, as DDP does. Collective, blocks.

        Costs one all-gather of every bucket. The step uses `.grad` with all changes made to it. A
        `.grad` is None if no rank had a gradient. Does nothing if the gradient is exposed already.
        Without buckets `.grad` is left as it is.

        Raises:
            RuntimeError: What `reduce` raises.
        """
        if self.progress.state is StepState.EXPOSED:
            return
        self._bring()
        self.plans.present.expose_gradients()
        self.progress.enter(StepState.EXPOSED)

    def expose_to_hooks(self, *, is_here: bool) -> bool:
        """Exposes the mean gradient if any rank has pre-hooks of `step`. Collective, blocks.

        Ranks tell each other in each round whether they have any. A first hook counts in this step
        if it is registered before the round. On NCCL it counts one step later.

        Args:
            is_here: Whether this rank has any now.

        Returns:
            Whether the mean gradient is exposed, the same on all ranks.
        """
        self._bring()
        collectives, is_anywhere = self.training.collectives, bool(self.plans.hooks_signal.heard)
        if not collectives.wait_blocks_host and not self._have_asked:
            # On NCCL no round has brought anything before the second step.
            self._have_asked = True
            is_anywhere = any(collectives.all_gather_object(is_here))
        if is_anywhere:
            self.expose()
        return is_anywhere

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """A context in which `.grad` holds the mean, see `expose` and `reduce`. Collective."""
        self.expose()
        yield
        self.reduce()

    @contextmanager
    def on_shards(self, *, mutates: bool) -> Iterator[list[Tensor]]:
        """A context that gives this rank's pieces, whose `.grad` is their part of the mean.

        If the mean gradient was exposed in the user's `.grad`, it is exposed again afterwards.

        Args:
            mutates: Whether the caller changes these gradients. If so, the state becomes CHANGED.
        """
        was_exposed = self.progress.state is StepState.EXPOSED
        self.reduce()
        if mutates:
            self.progress.enter(StepState.CHANGED)
        yield [piece.parameter for piece in self.stepper.pieces]
        if was_exposed:
            # If nothing was changed, buckets still hold the whole mean, which needs no gather. With
            # regions (Ok-Topk) they do not.
            is_lost = mutates or self.training.options.is_scattered
            active = self.plans.present
            active.expose_gradients() if is_lost else active.show_gradients()
            self.progress.enter(StepState.EXPOSED)

    def before_state_access(self, reads: bool) -> None:
        """Called before other code uses the optimizer's state with gathered gradients. May block.

        Each rank then has all of it.
        """
        self.plans.complete_parameters("optimizer state")
        if reads and self.training.uses_buckets and self.progress.state in _HAS_OWN_GRADIENTS:
            raise RuntimeError(
                f"The state of this {type(self.stepper.optimizer).__name__} was read while"
                " gradients of this rank are not averaged yet. Read it after step(), or on all"
                " ranks in `with strategy.on_shards(optimizer):`, where .grad is the mean."
            )

    @contextmanager
    def for_other_code(self) -> Iterator[None]:
        """A context in which the optimizer holds this rank's pieces and their state.

        `.grad` of a piece is its part of the mean. It is None if no rank has a gradient. With
        gathered gradients the optimizer holds whole parameters. Collective, blocks. See
        `PipelineStrategy.on_shards`.
        """
        is_whole, parameters = self.training.options.is_of_gradients, self.plans.trained.parameters
        # A plain backward, of which the strategy was not told, leaves the state as it is.
        is_here = self.progress.state is not StepState.EMPTY or any(
            one.grad is not None for one in parameters
        )
        (has_gradient,) = bucket_round.of_any_rank([is_here], self.training.collectives)
        means = self.exposed() if is_whole else self.on_shards(mutates=True)
        with means if has_gradient else nullcontext():
            active = None if is_whole else self.plans.active
            try:
                with nullcontext() if active is None else self.stepper.on_shards():
                    yield
            finally:
                # Also after an error in the block: other ranks gather, and it may be caught.
                if active is not None:
                    self._gather(active)

    def _gather(self, active: active_plan.ActivePlan) -> None:
        """Gathers all parameters, since other code may have written to pieces. Blocks."""
        self.stepper.note_written()
        active.gatherer.begin_step()
        for bucket in active.flat.buckets:
            active.gatherer.launch(bucket.number)
        active.gatherer.close_gates()
        self.plans.complete_parameters("on_shards")

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of the whole mean gradient, as a scalar. Collective, blocks.

        With `gather="gradients"` and a compressor of that half, the gradient that is stepped is the
        decoded one, so that its norm may differ.
        """
        with self.on_shards(mutates=False):
            return self.plans.present.global_norm(self.stepper.pieces, norm_type)

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the mean gradient, as `torch.nn.utils.clip_grad_norm_` does. Collective, blocks.

        If its norm is larger than `max_norm`, the mean gradient is scaled so that its norm becomes
        `max_norm`. If not, it is left as it is. Returns the norm before clipping, as a scalar.
        """
        with self.on_shards(mutates=True) as pieces:
            norm = self.plans.present.global_norm(self.stepper.pieces, norm_type)
            clip_grads_with_norm_(pieces, max_norm, norm)
            return norm

    def clip_by_value(self, clip_value: float) -> None:
        """Clips each element of the mean gradient to [-clip_value, clip_value].

        Collective, since it reduces first. Blocks. Raises a TypeError for complex parameters.
        """
        if any(one.is_complex() for one in self.plans.trained.parameters):
            raise TypeError("Complex gradients have no order to clip by value. Clip by norm.")
        with self.on_shards(mutates=True) as pieces:
            # torch raises if there is no gradient, and this rank may own no shard of a parameter
            # that has one.
            if any(piece.grad is not None for piece in pieces):
                clip_grad_value_(pieces, clip_value)

    def unscale(self, unscale: Callable[[optim.Optimizer], None]) -> None:
        """Calls a GradScaler's `unscale_` on the shards' mean gradients. Collective, blocks.

        See `ActivePlan.unscale`.
        """
        with self.on_shards(mutates=True):
            self.plans.present.unscale(unscale, self.stepper)
