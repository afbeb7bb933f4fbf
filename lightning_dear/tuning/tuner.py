"""Finds a plan while training runs: measures compute, link, codec and plans, and uses the best.

All ranks use the same measurements and decisions, so that their plans never differ: times are those
of the slowest rank, and plans are rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lightning_dear.collectives.work import Collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.planning import BucketPlan, PlanSearch, SearchingPlanner, TensorSpec, predict
from lightning_dear.planning.measured import ModelTimes, combined_times
from lightning_dear.planning.search import (
    NUM_DROPPED_STEPS,
    NUM_MEASURED_STEPS,
    NUM_PROFILED_STEPS,
    PredictingPlanner,
)
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.codec_cost import measure_codecs
from lightning_dear.tuning.link_cost import measure_link


class Tuning:
    """Runs one planner's search during the first steps of a training.

    Args:
        pipeline: Training with one optimizer. Its plan is changed; weights and optimizer state keep
            their values.
        planner: Planner whose search is run.
        say: Called with lines for people, on every rank.
        found: `BucketPlan.to_dict` of a plan that an earlier run found; it is used if it fits. None
            means that a plan is searched for.

    Attributes:
        plan: Plan that was found and is used. None means that none was found yet.
        found: The same plan as `BucketPlan.to_dict`, for checkpoints. None means that none was
            found yet.
        reason: `PlanSearch.reason` of the plan. Empty means that the search has not ended.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        planner: SearchingPlanner,
        say: Callable[[str], None],
        found: dict[str, Any] | None = None,
    ) -> None:
        self.plan: BucketPlan | None = None
        self.reason = ""
        self._pipeline = pipeline
        self._planner, self._say, self.found = planner, say, found
        self._search: PlanSearch | None = None
        self._has_ended = False
        self._num_steps = 0
        self._tensors: Sequence[TensorSpec] | None = None
        self._course = self._run()
        self._part.plans.find_plan = self._take_found_plan

    @property
    def _collectives(self) -> Collectives:
        return self._pipeline.collectives

    @property
    def _part(self) -> OptimizerPipeline:
        # Looked up each time, since it is another object once the user has exchanged optimizers.
        return self._pipeline.parts[0]

    def before_forward(self) -> None:
        """Goes on with the search; to be called before each forward. Collective. Blocks.

        Does nothing if there was no optimizer step since the last call (a GradScaler leaves some
        out), or at world size 1, where all plans are equally fast.
        """
        if self._part.num_steps == self._num_steps:
            return
        self._num_steps = self._part.num_steps
        if self._tensors is not None and self._part.tensors is not self._tensors:
            # The trained parameters have changed, so that a new search has to begin.
            self._search = None
            self._course = self._run()
        # The generator yields None once for each step. `next` returns `self` when it has ended.
        self._has_ended = next(self._course, self) is self

    @property
    def is_searching(self) -> bool:
        """Tells whether the search has begun and not ended."""
        return self._tensors is not None and not self._has_ended

    # --- one `yield` is one optimizer step ----------------------------------------------------

    def _run(self) -> Generator[None, None, None]:
        """Measures and searches, and then uses the plan that was found; see `before_forward`."""
        while self._part.plan is None:
            yield
        self._tensors = self._part.tensors
        if self._collectives.world.size == 1 or self.plan is not None:
            return
        times = yield from self._profile()
        has_compressor = self._pipeline.options.compressor is not None
        start: BucketPlan | None = None
        # Only planners that predict need a measured step to compare predictions with.
        is_predicting = has_compressor and isinstance(self._planner, PredictingPlanner)
        if is_predicting and self._part.uses_configured_compressor:
            start, start_s = self._part.plan, (yield from self._measure_steps())
        link = measure_link(self._pipeline)
        costs: tuple[Any, ...] = (link,)
        if has_compressor:
            codecs = measure_codecs(self._pipeline)
            # The schedule of a callback may have changed the compressor during `measure_link`.
            if start is not None and self._part.uses_configured_compressor:
                # Measured minus predicted seconds of this plan; added to every plan's prediction.
                seen_s = predict(start, self._tensors, times, link, codecs).step_s
                codecs = replace(codecs, unseen_s=start_s - seen_s, fitted_to=start)
            costs = link, codecs
        if self._collectives.world.rank == 0:
            # Only on rank 0: on another kind of host a search may compute other bits.
            self._search = self._planner.search(
                self._tensors, self._collectives.world.size, times, *costs
            )
        while (plan := self._next_plan()) is not None:
            self._use(plan)
            step_s = yield from self._measure_steps()
            # A schedule may have changed the compressor during these steps.
            if self._search is not None and self._part.uses_configured_compressor:
                self._search.tell(plan, step_s)
        search = self._search
        plan, self.reason = self._rank_0s(search and (search.best, search.reason))
        self.plan = self._use(plan)
        self.found = self.plan.to_dict(self._part.tensors)
        self._say(self.reason)

    def _next_plan(self) -> BucketPlan | None:
        # Steps with another compressor, which a schedule has set, tell nothing about the configured
        # one, for which a plan is searched.
        if not self._part.uses_configured_compressor:
            return None
        plan: BucketPlan | None = self._rank_0s(self._search and self._search.next())
        return plan

    def _take_found_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan | None:
        """Returns the plan that an earlier run found, if it fits the recorded tensors. Local.

        It is used from the first step on. The errors of a compressor depend on the plan, so that a
        resumed training with another plan in between would not compute the same bits.

        Args:
            tensors: Tensors of the recorded step.

        Returns:
            The plan. None means that the planner makes one.
        """
        self.plan = None
        found, world_size = self.found, self._collectives.world.size
        if found is None or world_size == 1:
            return None
        self.found = None
        try:
            plan = BucketPlan.from_dict(found, tensors, world_size)
            share, most = plan.all_reduced_share, getattr(self._planner, "all_reduced_share", 1)
            if share > most:
                what = f"{share:.0%} of all elements, more than all_reduced_share={most}"
                raise ValueError(f"It all-reduces {what}.")
        except ValueError as error:
            self._say(f"The plan found before is not used, another one is searched for: {error}")
            return None
        self.plan = self._allowed(plan)
        self.found = self.plan.to_dict(tensors)
        self._say(f"The plan found before is used again: {plan.name}")
        return self.plan

    def _profile(self) -> Generator[None, None, ModelTimes]:
        """Returns the times of a step without communication. Takes `NUM_PROFILED_STEPS` steps."""
        own: list[ModelTimes] = []
        while len(own) < NUM_PROFILED_STEPS:
            self._pipeline.measure_next_step()
            yield
            if self._part.timer.times is not None:
                own.append(self._part.timer.times)
        everyones = self._collectives.all_gather_object(combined_times(own, median))
        return replace(
            combined_times(everyones, max),
            allows_early=self._pipeline.training.early_refusal is None,
            allows_all_reduce=self._pipeline.training.all_reduce_refusal is None,
            allows_cuts=not self._pipeline.options.is_of_gradients,
        )

    def _measure_steps(self) -> Generator[None, None, float]:
        """Returns the median seconds of a step on the slowest rank. Takes `STEPS_PER_TRIAL` steps.

        The median, since a validation between two steps would spoil the mean.
        """
        clock = clock_of(self._part.parameters[0].device)
        for _ in range(NUM_DROPPED_STEPS):
            yield
        marks = [clock.mark()]
        for _ in range(NUM_MEASURED_STEPS):
            yield
            marks.append(clock.mark())
        moments = [clock.seconds(mark) for mark in marks]
        own = median(end - begin for begin, end in zip(moments, moments[1:], strict=False))
        return max(self._collectives.all_gather_object(own))

    def _allowed(self, plan: BucketPlan) -> BucketPlan:
        """Returns `plan` without the early or all-reduced buckets that this training refuses."""
        if self._pipeline.training.early_refusal is not None:
            plan = replace(plan, early=())
        if self._pipeline.training.all_reduce_refusal is not None:
            plan = replace(plan, all_reduced=())
        return plan

    def _use(self, plan: BucketPlan) -> BucketPlan:
        plan = self._allowed(plan)
        if plan != self._part.plan:
            self._part.replan(plan)
        return plan

    def _rank_0s(self, value: Any) -> Any:
        return self._collectives.all_gather_object(value)[0]
