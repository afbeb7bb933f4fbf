"""Finds a plan on real steps: measures compute, codecs, the link and plans, and keeps the best.

Every measurement and every decision is shared: times are those of the slowest rank, plans are rank
0's, so that ranks never part ways.
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
    """Drives one planner's search over the steps of one training.

    Args:
        pipeline: Its plan is changed, weights and optimizer state stay; it has one optimizer.
        planner: Whose search it is.
        say: Takes lines for people, on every rank.
        found: `BucketPlan.to_dict` of a plan found before, to be used if it fits.

    Attributes:
        plan: What was found, and is in use; None until then.
        found: The same for a checkpoint, as `BucketPlan.to_dict`.
        reason: What the search said of its plan; empty until then.
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
        # Another one, once optimizers were exchanged.
        return self._pipeline.parts[0]

    def before_forward(self) -> None:
        """To be called between steps, before a forward. Collective, blocks.

        Does nothing if there was no optimizer step since (a GradScaler leaves some out), or at
        world size 1, where there is nothing to find.
        """
        if self._part.num_steps == self._num_steps:
            return
        self._num_steps = self._part.num_steps
        if self._tensors is not None and self._part.tensors is not self._tensors:
            # The training has other parameters than those planned for.
            self._search = None
            self._course = self._run()
        # Each step of the course yields None; `self` stands for its end.
        self._has_ended = next(self._course, self) is self

    @property
    def is_searching(self) -> bool:
        """Whether the search has begun and not ended."""
        return self._tensors is not None and not self._has_ended

    # --- one `yield` is one optimizer step ----------------------------------------------------

    def _run(self) -> Generator[None, None, None]:
        while self._part.plan is None:
            yield
        self._tensors = self._part.tensors
        if self._collectives.world.size == 1 or self.plan is not None:
            return
        times = yield from self._profile()
        has_compressor = self._pipeline.options.compressor is not None
        start: BucketPlan | None = None
        # A planner that says nothing of predictions needs no such yardstick.
        is_predicting = has_compressor and isinstance(self._planner, PredictingPlanner)
        if is_predicting and self._part.uses_configured_compressor:
            start, start_s = self._part.plan, (yield from self._measure_steps())
        link = measure_link(self._pipeline)
        costs: tuple[Any, ...] = (link,)
        if has_compressor:
            codecs = measure_codecs(self._pipeline)
            # A schedule may have changed it meanwhile.
            if start is not None and self._part.uses_configured_compressor:
                # What its step takes beyond its prediction, every plan's does.
                seen_s = predict(start, self._tensors, times, link, codecs).step_s
                codecs = replace(codecs, unseen_s=start_s - seen_s, fitted_to=start)
            costs = link, codecs
        if self._collectives.world.rank == 0:
            # On rank 0 alone: a search may compute other bits on another kind of host.
            self._search = self._planner.search(
                self._tensors, self._collectives.world.size, times, *costs
            )
        while (plan := self._next_plan()) is not None:
            self._use(plan)
            step_s = yield from self._measure_steps()
            # A schedule may have changed it meanwhile.
            if self._search is not None and self._part.uses_configured_compressor:
                self._search.tell(plan, step_s)
        search = self._search
        plan, self.reason = self._rank_0s(search and (search.best, search.reason))
        self.plan = self._use(plan)
        self.found = self.plan.to_dict(self._part.tensors)
        self._say(self.reason)

    def _next_plan(self) -> BucketPlan | None:
        # Steps that a schedule encodes otherwise say nothing of those that are planned for.
        if not self._part.uses_configured_compressor:
            return None
        plan: BucketPlan | None = self._rank_0s(self._search and self._search.next())
        return plan

    def _take_found_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan | None:
        """The plan found before, if it fits what has just been recorded. Local.

        From the first step on: what a compressor loses depends on the plan, so that with another
        one in between a training that resumes would not have the same bits.
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
                raise ValueError(f"it all-reduces {what}")
        except ValueError as error:
            self._say(f"The plan found before is not used, another one is searched for: {error}")
            return None
        self.plan = self._allowed(plan)
        self.found = self.plan.to_dict(tensors)
        self._say(f"The plan found before is used again: {plan.name}")
        return self.plan

    def _profile(self) -> Generator[None, None, ModelTimes]:
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
        """Seconds a step of the slowest rank; the median, as a validation may come between."""
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
        """`plan` without what is not done here."""
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
