"""Finds a plan while training runs: measures compute, link, codec and plans, and uses the best.

All ranks use the same plan in the same step: times are those of the slowest rank, rank 0 alone runs
the search, and all ranks use the plans that it decides on.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.planning import BucketPlan, TensorSpec, predict, search
from lightning_dear.planning.measured import ModelTimes, combined_times
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.codec_cost import measure_codecs
from lightning_dear.tuning.link_cost import measure_link


@dataclass(eq=False)
class Tuning:
    """Runs one planner's search during the first steps of a training.

    Args:
        pipeline: Training with one optimizer. Its plan is changed; weights and optimizer state keep
            their values.
        planner: Planner whose search is run.
        say: Function that is called with lines for people, on every rank.
        found: `BucketPlan.to_dict` of a plan that an earlier run found. If it fits this training,
            it is used and no plan is searched for. None means that a plan is searched for.

    Attributes:
        plan: Plan that was found and is used. None means that no plan was found yet.
        found: The same plan as `BucketPlan.to_dict`, for checkpoints. Until the first step has been
            recorded, the argument. None means that no plan was found yet.
        reason: `PlanSearch.reason` of the plan. Empty means that the search has not ended, or that
            there was none.
    """

    pipeline: Pipeline
    planner: search.SearchingPlanner
    say: Callable[[str], None]
    found: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.plan: BucketPlan | None = None
        self.reason = ""
        self._search: search.PlanSearch | None = None
        self._has_ended = False
        self._num_steps = 0
        self._tensors: Sequence[TensorSpec] | None = None
        self._course = self._run()
        self._part.plans.find_plan = self._take_found_plan

    @property
    def _part(self) -> OptimizerPipeline:
        # Looked up each time, since it is another object once the user has replaced the optimizer.
        return self.pipeline.parts[0]

    def before_forward(self) -> None:
        """Goes on with the search: measures, changes the plan, or does nothing in this step.

        To be called before each forward. Does nothing if there was no optimizer step since the last
        call (a GradScaler leaves some steps out), once the search has ended, or at world size 1,
        where all plans are equally fast. A new search begins if the trained parameters have
        changed. Collective. Blocks.
        """
        if self._part.num_steps == self._num_steps:
            return
        self._num_steps = self._part.num_steps
        if self._tensors is not None and self._part.tensors is not self._tensors:
            # There is a new recording, since the trained parameters have changed. The plan that was
            # found is for other tensors.
            self._search = None
            self._course = self._run()
        # The generator yields None once for each step. `next` returns `self` when it has ended.
        self._has_ended = next(self._course, self) is self

    @property
    def is_searching(self) -> bool:
        """Tells whether the search has begun, after the recorded step, and not ended."""
        return self._tensors is not None and not self._has_ended

    # --- one `yield` is one optimizer step ----------------------------------------------------

    def _run(self) -> Generator[None, None, None]:
        """Measures, searches, and then uses the plan that was found; see `before_forward`.

        Ends without a search at world size 1, or if a plan of an earlier run is used.
        """
        while self._part.plan is None:
            yield
        self._tensors = self._part.tensors
        if self.pipeline.collectives.world.size == 1 or self.plan is not None:
            return
        times = yield from self._profile()
        has_compressor = self.pipeline.options.compressor is not None
        start: BucketPlan | None = None
        # Only planners that predict need a measured step, with which predictions are compared.
        is_predicting = has_compressor and isinstance(self.planner, search.PredictingPlanner)
        if is_predicting and self._part.uses_configured_compressor:
            start, start_s = self._part.plan, (yield from self._measure_steps())
        link = measure_link(self.pipeline)
        costs: tuple[Any, ...] = (link,)
        if has_compressor:
            codecs = measure_codecs(self.pipeline)
            # The schedule of a callback may have changed the compressor since the step was
            # measured. Then the measured step tells nothing about the configured compressor.
            if start is not None and self._part.uses_configured_compressor:
                # `unseen_s` is what the prediction of this plan is wrong by. It is added to the
                # prediction of every plan.
                seen_s = predict(start, self._tensors, times, link, codecs).step_s
                codecs = replace(codecs, unseen_s=start_s - seen_s, fitted_to=start)
            costs = link, codecs
        if self.pipeline.collectives.world.rank == 0:
            # Only rank 0 searches: on another kind of host a search may compute other bits, and so
            # decide otherwise.
            world_size = self.pipeline.collectives.world.size
            self._search = self.planner.search(self._tensors, world_size, times, *costs)
        while (plan := self._next_plan()) is not None:
            self._use(plan)
            step_s = yield from self._measure_steps()
            # A measurement is dropped if a schedule has changed the compressor meanwhile.
            if self._search is not None and self._part.uses_configured_compressor:
                self._search.tell(plan, step_s)
        known = self._search
        plan, self.reason = self._rank_0s(known and (known.best, known.reason))
        self.plan = self._use(plan)
        self.found = self.plan.to_dict(self._part.tensors)
        self.say(self.reason)

    def _next_plan(self) -> BucketPlan | None:
        """Returns the plan to measure next, as rank 0's search says. None ends the search.

        Returns None, too, if a schedule has replaced the configured compressor. Otherwise
        collective and blocks.
        """
        # A plan is searched for the configured compressor. Steps with another compressor tell
        # nothing about it.
        if not self._part.uses_configured_compressor:
            return None
        plan: BucketPlan | None = self._rank_0s(self._search and self._search.next())
        return plan

    def _take_found_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan | None:
        """Returns the plan that an earlier run found, if it fits the recorded tensors. Local.

        The engine calls it at the end of the recorded step, and trains with the returned plan from
        then on. Training does not begin with another plan, because the errors of a compressor
        depend on the plan: a resumed training would not compute the same bits. If the plan does not
        fit, `say` is called with the reason.

        Args:
            tensors: Tensors of the recorded step.

        Returns:
            The plan, without all-reduced buckets if this training refuses these. None means that
            the planner makes a plan: no plan was found before, it does not fit, or the world size
            is 1.
        """
        self.plan = None
        found, world_size = self.found, self.pipeline.collectives.world.size
        if found is None or world_size == 1:
            return None
        self.found = None
        try:
            plan = BucketPlan.from_dict(found, tensors, world_size)
            share, most = plan.all_reduced_share, getattr(self.planner, "all_reduced_share", 1)
            if share > most:
                what = f"{share:.0%} of all elements, more than all_reduced_share={most}"
                raise ValueError(f"It all-reduces {what}.")
        except ValueError as error:
            self.say(f"The plan found before is not used, another one is searched for: {error}")
            return None
        self.plan = self._allowed(plan)
        self.found = self.plan.to_dict(tensors)
        self.say(f"The plan found before is used again: {plan.name}")
        return self.plan

    def _profile(self) -> Generator[None, None, ModelTimes]:
        """Returns the times of a step without communication, on the slowest rank.

        Takes `NUM_PROFILED_STEPS` steps, or more if some of them could not be measured. Collective
        after the last one.
        """
        own: list[ModelTimes] = []
        while len(own) < search.NUM_PROFILED_STEPS:
            self.pipeline.measure_next_step()
            yield
            if self._part.timer.times is not None:
                own.append(self._part.timer.times)
        everyones = self.pipeline.collectives.all_gather_object(combined_times(own, median))
        times, may_cut = combined_times(everyones, max), not self.pipeline.options.is_of_gradients
        may_all_reduce = self.pipeline.training.all_reduce_refusal is None
        return replace(times, allows_all_reduce=may_all_reduce, allows_cuts=may_cut)

    def _measure_steps(self) -> Generator[None, None, float]:
        """Returns the median seconds of a step on the slowest rank. Takes `STEPS_PER_TRIAL` steps.

        The median counts, since a validation between two steps would spoil the mean. Collective
        after the last step.
        """
        clock = clock_of(self._part.parameters[0].device)
        for _ in range(search.NUM_DROPPED_STEPS):
            yield
        marks = [clock.mark()]
        for _ in range(search.NUM_MEASURED_STEPS):
            yield
            marks.append(clock.mark())
        moments = [clock.seconds(mark) for mark in marks]
        own = median(end - begin for begin, end in zip(moments, moments[1:], strict=False))
        return max(self.pipeline.collectives.all_gather_object(own))

    def _allowed(self, plan: BucketPlan) -> BucketPlan:
        """Returns `plan` without the all-reduced buckets that this training refuses."""
        is_refused = self.pipeline.training.all_reduce_refusal is not None
        return replace(plan, all_reduced=()) if is_refused else plan

    def _use(self, plan: BucketPlan) -> BucketPlan:
        """Trains with `plan` from now on, without buckets that are refused; returns this plan.

        Collective and blocks, unless it is the present plan.
        """
        plan = self._allowed(plan)
        if plan != self._part.plan:
            self._part.replan(plan)
        return plan

    def _rank_0s(self, value: Any) -> Any:
        """Returns the `value` that rank 0 passes. Collective. Blocks."""
        return self.pipeline.collectives.all_gather_object(value)[0]
