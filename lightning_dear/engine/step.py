"""The step of one optimizer, from the first backward to the next forward."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_dear import compression, planning
from lightning_dear.checkpoint.optimizer_state import ShardedState, gathered, sharded_state
from lightning_dear.collectives.work import uncounted
from lightning_dear.engine.active_plan import ActivePlan, audit
from lightning_dear.engine.hooks import StepHooks
from lightning_dear.engine.mean_gradient import MeanGradient
from lightning_dear.engine.plan_lifecycle import PlanLifecycle
from lightning_dear.engine.step_state import Backward, StepProgress, StepState
from lightning_dear.engine.step_timer import StepTimer
from lightning_dear.engine.trained_parameters import check_momentum
from lightning_dear.engine.training import Training
from lightning_dear.optimizers import replicated, sharded, tensorwise

_WERE_CHANGED = (StepState.CHANGED, StepState.EXPOSED)
_NOTHING_IS_SENT = (StepState.EMPTY, StepState.ACCUMULATING)
# Constants, since to read a member of an Enum takes longer than the comparison.
_NONE, _LOCAL, _DROPPED, _LAST = Backward


class OptimizerPipeline:
    """The step of one optimizer: reduces its gradients, steps it, gathers its parameters.

    `Pipeline` calls it around forwards and backwards. Hooks of parameters and of the optimizer call
    it for each gradient, and when the user calls `step` or `zero_grad`.

    Args:
        training: What all optimizers of the module share.
        optimizer: The user's optimizer. Mutated: it gets hooks, and another `zero_grad`.
        number: Optimizer number, unique among optimizers that share process groups.

    Attributes:
        optimizer: The user's optimizer.
        progress: State of the step.
        mean: Reduces gradients, and gives callers the mean between last backward and step.
        plans: The present plan, and what makes the next one.
        stepper: The optimizer's state and pieces on this rank.
        timer: Times of the step that `measure_next_step` asked for, on this rank.
        num_steps: Optimizer steps so far, without steps that a GradScaler skipped.
        is_held_back: Whether buckets are launched right before the step, and not in backward; to be
            assigned to.
        shows_in_hooks: Whether pre-hooks after backward find the mean gradient; to be assigned to.
    """

    def __init__(self, training: Training, optimizer: optim.Optimizer, number: int) -> None:
        self.optimizer = optimizer
        self._training, self._instruments = training, training.instruments
        self.is_held_back, self.shows_in_hooks = False, True
        self.timer = StepTimer(training.module, self._instruments.clock)
        self.num_steps = 0
        self.progress = StepProgress(partial(getattr, training, "uses_buckets"))
        self._backward = Backward.NONE
        calls = self._before_hooks, self._begin_step, self._on_inner_step
        self._step_hooks = StepHooks(optimizer, *calls)
        self._hooks: list[Any] = [self._step_hooks]
        if training.options.is_of_gradients:
            # State must not be saved or loaded while buckets are still to be stepped at a read.
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._complete_state))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._complete_state))
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._on_zero_grad  # type: ignore[method-assign]
        self.stepper: sharded.ShardedOptimizer | replicated.ReplicatedOptimizer = (
            replicated.ReplicatedOptimizer(
                optimizer,
                decouple=not self._training.options.all_reduces,
                before_access=lambda reads: self.mean.before_state_access(reads),
            )
            if self._training.options.is_of_gradients
            else sharded.ShardedOptimizer(optimizer)
        )
        called = self._on_gradient, self._on_arrival
        self.plans = PlanLifecycle(training, self.stepper, number, *called)
        self._tried = tensorwise.TriedOptions(optimizer, training.options)
        self.plans.hooks_signal.ask = lambda: int(self._step_hooks.are_in_front)
        self.mean = MeanGradient(training, self.progress, self.plans, self.stepper)

    def _complete_state(self, *_: Any) -> None:
        self.plans.complete_parameters("optimizer state")

    def prepare_forward(self) -> bool:
        """Puts back replaced parameters. If modules were replaced, blocks for all parameters.

        If a step has raised, restores the optimizer's groups first, which hold pieces since then.

        Returns True if the optimizer's own parameters have changed: then `follow` must be called.
        """
        self.abandon()
        self.plans.follow_parameters()
        return self.plans.trained.have_changed()

    def follow(self) -> None:
        """Drops the plan, since the optimizer has other parameters now. Collective, blocks.

        Raises RuntimeError after a backward that sends gradients, until a step or `zero_grad`.
        """
        active, is_idle = self.plans.active, self.progress.state in _NOTHING_IS_SENT
        if active is not None and not (is_idle and not active.round.has_begun):
            # Other ranks wait for this rank's buckets, and must raise, too.
            self.mean.finish_rounds(active)
            raise RuntimeError(
                "Parameters began to require gradients, or the optimizer's were replaced, after a"
                " backward whose gradients no step has used yet. Change parameters between an"
                " optimizer step and the next forward."
            )
        self._tried = tensorwise.TriedOptions(self.optimizer, self._training.options)
        self.plans.dissolve()

    def watching(self, *, audits: bool) -> AbstractContextManager[Any]:
        """A context around a training forward: records it if there is no plan, or modules are new.

        If not, times it for `measure_next_step`, or audits it if `audits`, or does nothing.
        """
        active = self.plans.active
        if self._training.uses_buckets and (active is None or self.plans.looks_again):
            return self.plans.trained.recorder.recording()
        if self.timer.is_on and active is not None:
            return self.timer.forward()
        if self._training.uses_buckets and audits and active is not None:
            return audit(self.plans.trained, active)
        return nullcontext()

    def measure_next_step(self) -> None:
        """Lets `timer` measure the next step; see `Pipeline.measure_next_step`. Blocks. Local."""
        recording = self.plans.recording
        self.timer.start(self.parameters, None if recording is None else recording.ungated)
        self.plans.complete_parameters("measuring")

    def complete_entry(self) -> None:
        """Waits for parameters that forward reads outside modules. If it is compiled, for all.

        Also for all after a step within a recorded forward: what it reads then is not known yet.
        """
        active, recorder = self.plans.active, self.plans.trained.recorder
        self.plans.follows_reads |= recorder.is_recording
        if active is not None and (self._training.has_compiled_region or recorder.is_recording):
            active.gatherer.complete(reason="unknown reads")
        elif active is not None:
            active.gatherer.complete(active.gatherer.entry, "training_step")
        recorder.note_step()

    @contextmanager
    def backward(self, *, synchronize: bool | None) -> Iterator[None]:
        """A context around a backward, see `Pipeline.backward`. The recorded one also reduces."""
        compressor, state = self._training.options.compressor, self.progress.state
        if state in _WERE_CHANGED and compressor is not None and compressor.encodes_once:
            raise RuntimeError(
                f"compressor={compressor.name!r} allows no backward after the step's mean gradient"
                " was shown to a hook or in whole_gradients(), or was clipped. Run all backwards"
                " before that, and all but the last in block_backward_sync() or no_backward_sync()."
                " If only hooks see it, you may pass DearStrategy(gradients_in_hooks=False). The"
                " gradient would be encoded twice."
            )
        self.plans.trained.hooks.stay_last()
        if self.progress.is_due and self.progress.state not in (StepState.EMPTY, StepState.EXPOSED):
            self.plans.trained.hooks.refuse_another_sum()
        self.progress.is_due |= synchronize is not False
        if synchronize:
            self.progress.enter(StepState.SENDING)
        elif self.progress.has_means:
            self.progress.enter(StepState.ACCUMULATING)
        if synchronize and self.plans.active is not None:
            self.plans.active.round.expect()
        last = Backward.LAST if self._training.weights.counts else Backward.DROPPED
        before, self._backward = self._backward, last if synchronize else Backward.LOCAL
        try:
            with self.timer.backward() if synchronize else nullcontext():
                yield
        finally:
            self._backward = before
        has_buckets, is_first = self._training.uses_buckets, self.plans.active is None
        if synchronize and (is_first if has_buckets else self._training.weights.is_on):
            # As in later steps, `.grad` must not show the local gradient after the last backward.
            self.mean.reduce()

    def _on_gradient(self, index: int, _: Any, gradients: tuple[Tensor | None]) -> None:
        if gradients[0] is None:
            return
        active = self.plans.active
        if active is not None and active.gatherer.pending:
            active.gatherer.check_was_complete(index, self.plans.trained.names[index])
        if self._backward is not _LAST:
            self._keep_in_grad(index)
            if self._backward is _DROPPED and active is None:
                self.plans.trained.recorder.note_gradient(index)
            return
        if self.progress.state is not StepState.SENDING:
            self.progress.enter(StepState.SENDING)
        if self.timer.is_on:
            self.timer.note_gradient(index)
        if active is None:
            self.plans.trained.recorder.note_gradient(index)
            if (parameter := self.parameters[index]).grad is None:
                # A hook has cleared `.grad`. DistributedDataParallel averages zeros then.
                parameter.grad = torch.zeros_like(parameter)
        elif self.timer.is_on:
            with self.timer.leaving_out_codecs():
                self._collect(active, index)
        else:
            # Runs for every gradient, so that even an empty context would take noticeable time.
            self._collect(active, index)

    def _keep_in_grad(self, index: int) -> None:
        """Leaves a gradient in `.grad`, since its backward sends nothing.

        Other ranks may run no such backward, if the strategy was not told of it. So it does not
        change the state of the step, which is equal on all ranks.

        Raises:
            RuntimeError: If the strategy was not told of this backward, and the mean gradient is
                there.
        """
        if self._backward is _LOCAL:
            if self.progress.state is StepState.EMPTY:
                self.progress.enter(StepState.ACCUMULATING)
        elif self.progress.has_means:
            # Such a gradient needs another round, and perhaps only this rank has one.
            raise RuntimeError(
                f"A gradient for '{self.plans.trained.names[index]}' came from no backward of the"
                " strategy's, after the mean gradient had been read or changed, such as by"
                " clipping. Use torch.autograd.grad, which leaves .grad alone. Or call"
                " self.manual_backward(loss) or fabric.backward(loss), on all ranks, if the"
                " gradient is to count."
            )
        elif self._backward is _NONE:
            self._training.weights.refuse_plain()

    def _collect(self, active: ActivePlan, index: int) -> None:
        active.collector.on_gradient(index)
        if not self.is_held_back:
            active.round.launch_full()

    # --- the step -------------------------------------------------------------------------------

    def _on_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("set_to_none", args[0] if args else True):
            sharded.warn_of_zeros(self.optimizer)
        if self.progress.state is StepState.ENDED:
            # Lightning's wrapper of the optimizer still calls this method after the fit.
            self.optimizer.zero_grad(*args, **kwargs)
            return
        active = self.plans.active
        # Excludes threads that complete gathered gradients: these step buckets, and use `.grad`.
        with nullcontext() if active is None else active.gatherer.arriving:
            self.drop_gradients()
            self._zero_grad(*args, **kwargs)

    def drop_gradients(self) -> None:
        """Forgets gradients that buckets hold, and means. `.grad` is left to `zero_grad`.

        Collective, and blocks, if buckets were launched and not waited for: that round is finished
        first. Raises after `detach`.
        """
        self.progress.check_is_on()
        active = self.plans.active
        if active is not None:
            if self.progress.state is StepState.SENDING:
                self.plans.complete_parameters("zero_grad")
                self.mean.finish_rounds(active)
            active.round.drop()
            active.collector.begin()
            self.stepper.clear_gradients()
        self.plans.trained.recorder.gradients.clear()
        self.mean.has_leftovers = False
        self.progress.enter(StepState.EMPTY)
        self._training.weights.reset()

    @torch.no_grad()
    def _before_hooks(self) -> None:
        """Called before other code's pre-hooks of `step`, which may read parameters and gradients.

        Blocks until all parameters are complete, if this rank has any. After this step's backward
        it is collective, and exposes the mean gradient if any rank has any.
        """
        hooks, was_exposed = self._step_hooks, self.progress.state is StepState.EXPOSED
        tells = self.shows_in_hooks and self._training.uses_buckets
        asks = tells and self.progress.is_due
        if (is_here := hooks.are_in_front) or asks:
            self.abandon()
        if is_here:
            self.plans.complete_parameters("optimizer step hook")
        shows = asks and self.mean.expose_to_hooks(is_here=is_here)
        is_late = asks and is_here and not shows  # Registered after the round: warns on any rank.
        if is_late or (tells and self._training.world.rank == 0):
            hooks.warn_once(shows=shows, costs=shows and not was_exposed)

    @torch.no_grad()
    def _begin_step(self) -> None:
        """Pre-hook of `step`: reduces, then steps this rank's shards. Collective, blocks.

        It steps runs of small buckets at once, and launches a run's gathers after it. The last run
        is left to `step` itself. With gathered gradients it only launches the gathers of means.
        """
        self.abandon()
        active = self._prepare_step()
        self.progress.begin_step()
        self._instruments.begin_step()
        try:
            for numbers in self.stepper.begin_step(active.plan.gather_order):
                self._launch_gathers(numbers)
        except BaseException:
            self.stepper.restore()
            self.progress.end_broken_step()
            raise

    def _prepare_step(self) -> ActivePlan:
        """Reduces, which makes the first plan. Adopts weights and state that the user wrote."""
        check_momentum(self.optimizer, self._training.options)
        self.mean.reduce()
        self._tried.check()
        active = self.plans.present
        active.exchange.check()
        self.plans.take_over()
        self.plans.follow_readers()
        # Until the step ends no module reads parameters, so shards of other ranks may arrive.
        active.gatherer.begin_step()
        active.gatherer.expect()
        self.timer.step_begins()
        return active

    def _launch_gathers(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not self._training.options.is_of_gradients:
                self._instruments.record_step(number)
            with self.timer.leaving_out_codecs():
                self.plans.present.gatherer.launch(number)
            self._instruments.begin_step()

    def _on_inner_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Post-hook of `step`, which has just stepped the last run: launches its gathers.

        From here on reads of parameters wait for gathers. Blocks for module buffers, and for all
        parameters if other code has post-hooks, which may read them.
        """
        self._launch_gathers(self.stepper.finish())
        self.stepper.restore()
        self.stepper.clear_gradients()
        active = self.plans.present
        # Before the gates close: from then on other threads may complete parameters.
        active.round.end_step()
        active.gatherer.close_gates()
        active.collector.begin()
        self.progress.enter(StepState.EMPTY)
        self.mean.has_leftovers = self._training.uses_buckets
        self._tried.note()
        self._training.weights.end_step()
        self.num_steps += 1
        self.timer.step_ends()
        self._training.buffers.finish()
        self._instruments.finish_step()
        if self._training.is_in_forward:
            # Manual optimisation: this forward goes on, and may read parameters outside modules.
            self.complete_entry()
        if self._step_hooks.are_behind:
            self.plans.complete_parameters("optimizer step hook")

    def _on_arrival(self, number: int) -> None:
        """Steps bucket `number`, whose gathered means the calling thread has waited for."""
        assert isinstance(self.stepper, replicated.ReplicatedOptimizer)
        self._instruments.begin_step()
        with self.timer.late_step():
            self.stepper.step_bucket(number)
        self._instruments.record_step(number)

    @property
    def plan(self) -> planning.BucketPlan | None:
        """Present plan. None while there is none yet; see `PlanLifecycle.plan`."""
        return self.plans.plan

    @property
    def tensors(self) -> list[planning.TensorSpec]:
        """Tensors of the plan, one for each of `parameters`. Empty before the first plan."""
        return [] if self.plans.recording is None else self.plans.recording.tensors

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Trained parameters, in the order of the plan's tensor indices."""
        return self.plans.trained.parameters

    @torch.inference_mode(False)
    def replan(self, plan: planning.BucketPlan) -> None:
        """Goes on with another plan; weights and state keep their bits. Collective, blocks.

        To be called between a step and the next forward, with a plan over `tensors`, on all ranks.

        Raises:
            RuntimeError: Before the first step, or with gradients that no step has used.
            ValueError: If ranks pass different plans, or a plan for another model.
        """
        if self.plans.active is None or self.progress.state is not StepState.EMPTY:
            raise RuntimeError(
                "replan() was called before the first step, or with gradients that no step has used"
                " yet. Call it between an optimizer step and the next forward."
            )
        self.plans.replan(plan)

    def use_compressor(self, compressor: compression.Compressor) -> None:
        """Encodes with `compressor` from now on. All ranks must call it after the same step. Local.

        If a bucket was launched since the last step, this step keeps the former compressor. Blocks
        while another thread waits for parameters. Raises what `PlanLifecycle.use_compressor` does.
        """
        active = self.plans.active
        is_idle = self.progress.state in _NOTHING_IS_SENT
        has_begun = active is not None and active.round.has_begun
        self.plans.use_compressor(compressor, is_idle=is_idle and not has_begun)

    @property
    def uses_configured_compressor(self) -> bool:
        """Whether steps use the configured compressor, and not another one of a schedule."""
        return self.plans.compressor in (None, self._training.options.compressor)

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """See `ActivePlan.encoding_figures`. Empty before the first plan."""
        active = self.plans.active
        return {} if active is None else active.encoding_figures()

    # Lightning may save under inference mode (NCCL), and tensors made there refuse later updates.
    @torch.inference_mode(False)
    def optimizer_state_dict(self, *, on_rank_0: bool = False) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole tensors, on every rank. Collective, blocks.

        Sharded tensors become whole copies on the CPU. With `on_rank_0` only rank 0 gets them.
        """
        state, place = self.sharded_state_dict(), (self._training.collectives, self.stepper.device)
        with uncounted(self._training.collectives):
            return gathered(state, *place, on_rank_0=on_rank_0)

    def sharded_state_dict(self) -> ShardedState:
        """`optimizer.state_dict()`; sharded tensors stay on their owners. Collective, blocks."""
        self.prepare_state()
        state = sharded_state(self.stepper, self._training.collectives)
        return self.plans.residuals.add_to_sharded(state)

    def inherit(self, others: "Sequence[OptimizerPipeline]") -> None:
        """Takes over the state that ended trainings of this optimizer hold. Collective, blocks."""
        own = [other for other in others if other.optimizer is self.optimizer]
        for other in own:
            other.prepare_state()
        self.plans.inherit([other.plans for other in own])

    def on_shards(self) -> AbstractContextManager[None]:
        """See `PipelineStrategy.on_shards`. Collective, blocks at the beginning and at the end."""
        self.prepare_state("on_shards")
        return self.mean.for_other_code()

    def sync_replicas(self) -> None:
        """See `ActivePlan.sync_replicas`. Without a plan it does nothing. Collective, blocks."""
        self.prepare_state("sync_replicas")
        if self.plans.active is not None:
            self.plans.active.sync_replicas()

    @torch.inference_mode(False)
    def prepare_state(self, reason: str = "optimizer state") -> None:
        """Completes parameters, and adopts weights and state that were written or loaded. Local.

        Blocks. Restores the optimizer's groups first, if a step has raised. Raises RuntimeError if
        an error has left the state half moved to a new plan.
        """
        if self.plans.is_moving:
            raise RuntimeError(
                "There is no consistent state to save. Load the last checkpoint. An error came when"
                " part of the optimizer's state was already moved to another plan."
            )
        self.stepper.restore()
        self.plans.complete_parameters(reason)
        self.plans.take_over()

    def abandon(self) -> None:
        """If a step has raised, restores the optimizer's groups. If not, does nothing. Local.

        Also lets other threads read parameters again.
        """
        self.stepper.restore()
        if self.plans.active is not None:
            self.plans.active.gatherer.end_step()
        self.progress.end_broken_step()

    def detach(self) -> None:
        """Removes hooks and flat buffers from module and optimizer. Local.

        The caller must have completed all parameters: pending buckets would keep old values.
        """
        for hook in self._hooks:
            hook.remove()
        self.optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self.plans.detach()
        self.progress.state = StepState.ENDED
