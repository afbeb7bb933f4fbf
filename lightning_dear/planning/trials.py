"""Planners that measure plans on real training steps and keep the fastest.

`AutoFusion` measures the plans that are predicted to be fastest. `BayesianFusion` uses no
predictions. It searches for the cap (largest size) of buckets with a Gaussian process, as DeAR
(arXiv 2302.12445) does, but with three differences. The cap is searched on a logarithmic scale.
Step times are normalised before the Gaussian process gets them, so that expected improvement means
the same for steps of 5 ms and of 5 s. Only caps whose plans have not been measured yet are
suggested, and the plan that is used in the end has been measured. The fixed buckets of a planner
are those that `ThresholdFusion` makes with its options.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, mean, pstdev

from typing_extensions import override

from lightning_dear.names import need
from lightning_dear.planning import fusion, predicting, refine, search
from lightning_dear.planning.plan import BucketPlan, distinct
from lightning_dear.planning.predict import StepModel

_CAP_RANGE = (1 / 32, 32.0)
"""Smallest and largest cap that `AutoFusion` tries, as multiples of the fixed buckets' cap. With
the default cap at two ranks that is 0.25 to 256 MiB."""

_MIN_GAIN = 5e-3
"""`AutoFusion` ranks caps by how much longer their predicted steps are than the shortest one, in
units of this share, rounded down. Of caps with the same rank it prefers the larger."""

_MIN_CAP_RATIO = 2.0
"""The caps that `AutoFusion` measures, besides that of the fixed buckets, differ from each other by
this factor or more."""

_MAX_SINGLE_RATIO = 1.3
"""`AutoFusion` measures the plan of one bucket if its predicted step is at most this many times as
long as the shortest predicted step of the other plans."""

_MAX_DDP_RATIO = 1.2
"""`AutoFusion(all_reduced_share=1)` measures all-reduces of DDP's buckets if their predicted step
is at most this many times as long as the shortest predicted step of the other plans."""

_DDP_DIVISORS = (1, 4, 16)
"""Divisors of DDP's caps for which a step is predicted: with the full caps, small models have only
one or two buckets."""


class AutoFusion(fusion.ThresholdFusion, search.StepModelPlanner):
    """Predicts plans from measured times, measures the best on real steps, and keeps the fastest.

    The fixed buckets, which `ThresholdFusion` makes, are always measured. They are compared with
    the plan of `MergeCompFusion`, with the caps that have the shortest predicted steps, and with
    one bucket for all tensors if its predicted step is not much longer. If all-reducing some
    buckets is predicted to be faster than the best of these plans, that is measured, too. As many
    plans are measured as `num_steps` allows. The fixed buckets and the two best other plans are
    measured twice, apart in time, so that a passing disturbance does not decide. The fixed buckets
    are used unless the mean of one of these two plans is lower.

    Args:
        num_steps: Most optimizer steps that the search may take, together with the recorded (first)
            step and the profiled steps before it.
        bucket_cap_mb: Cap of the fixed buckets, MiB. None means `ThresholdFusion`'s default. Other
            caps are tried from 1/32 of it to 32 times as much.
        first_bucket_cap_mb: Cap of the fixed bucket nearest the input, MiB.
        all_reduced_share: Largest share of all elements, 0..1, that may lie in all-reduced buckets.
            Every rank has the whole optimizer state of these elements. 0 means that no bucket is
            all-reduced. 1 means that a plan that all-reduces everything is measured, too, if its
            predicted step is not much longer. Its buckets have DDP's caps, or 1/4 or 1/16 of them.

    Raises:
        ValueError: If `num_steps` is too small to compare two plans, a cap is not positive, or
            `all_reduced_share` is not 0..1.
    """

    name = "auto"

    def __init__(
        self,
        *,
        num_steps: int = 60,
        bucket_cap_mb: float | None = None,
        first_bucket_cap_mb: float = 1.0,
        all_reduced_share: float = 0.1,
    ) -> None:
        least = search.STEPS_BEFORE_SEARCH + 4 * search.STEPS_PER_TRIAL
        if num_steps < least:
            raise ValueError(f"fusion='auto': num_steps must be >= {least}, got {num_steps}.")
        if not 0 <= all_reduced_share <= 1:
            raise ValueError(f"fusion=auto has all_reduced_share={all_reduced_share}. Set 0 to 1.")
        # Plans that a search found are saved under a key that lists the options in the order in
        # which they are assigned here. So this order must not change.
        self.num_steps = num_steps
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)
        self.all_reduced_share = all_reduced_share

    @override
    def search_for(self, model: StepModel) -> search.PlanSearch:
        """Returns a search that compares other plans with the plan of the fixed buckets."""
        tensors, world_size = model.tensors, model.world_size
        fixed = self.plan(tensors, world_size)
        _, cap_mb = self.caps_mb(world_size)
        least_mb, most_mb = (cap_mb * factor for factor in _CAP_RANGE)
        others = self.plans_of_caps(tensors, world_size, least_mb, most_mb)
        candidates = _candidates(fixed, others, model)
        if model.times.allows_all_reduce and self.all_reduced_share > 0 and world_size > 1:
            pairs = _all_reducing([fixed, *candidates[:3]], model, self.all_reduced_share)
            candidates = [*candidates[:1], *pairs, *candidates[1:]]
        num_trials = (self.num_steps - search.STEPS_BEFORE_SEARCH) // search.STEPS_PER_TRIAL
        # One trial is the first measurement of the fixed buckets, and NUM_REPEATED trials are
        # second measurements.
        num_candidates = max(num_trials - 1 - search.NUM_REPEATED, 1)
        _, *candidates = distinct([fixed, *candidates])
        return AutoSearch(fixed, candidates[:num_candidates], model.step_s)


def _all_reducing(plans: Sequence[BucketPlan], model: StepModel, share: float) -> list[BucketPlan]:
    """Returns plans with all-reduced buckets that are worth measuring; perhaps none.

    If all-reducing some buckets of one of `plans` is predicted to be faster than all `plans`, the
    fastest such plan is returned, followed by the same plan without all-reduces. If `share` is 1, a
    plan that all-reduces everything follows, unless its predicted step is much longer.

    Args:
        plans: Plans of which some buckets may be all-reduced.
        model: Training that is planned for.
        share: Largest share of all elements that may be all-reduced, 0..1.
    """
    tensors, step_s = model.tensors, model.step_s
    chosen: list[BucketPlan] = []
    changed = {refine.choose_all_reduce(plan, model, share): plan for plan in plans}
    best = min(changed, key=step_s)
    if best.all_reduced and step_s(best) < min(map(step_s, plans)):
        chosen += [best, changed[best]]
    if share == 1:
        tried = [refine.everything_all_reduced(tensors, model.world_size, d) for d in _DDP_DIVISORS]
        everything = min(tried, key=step_s)
        if step_s(everything) <= _MAX_DDP_RATIO * min(map(step_s, [*plans, *chosen])):
            chosen.append(everything)
    return chosen


def _candidates(
    fixed: BucketPlan, others: Mapping[float, BucketPlan], model: StepModel
) -> list[BucketPlan]:
    """Returns plans to compare with `fixed`, the most promising first; some may occur twice.

    Args:
        fixed: Plan of the fixed buckets.
        others: Cap in MiB -> plan, of other caps.
        model: Training that is planned for.
    """
    step_s, programme = model.step_s, predicting.MergeCompFusion().best_plan(model)
    steps_s = {cap_mb: step_s(plan) for cap_mb, plan in others.items()}
    best_s = min(steps_s.values())
    # If caps count as equally good, the largest comes first, since it has the fewest messages.
    order = sorted(others, key=lambda cap_mb: (_gains_lost(steps_s[cap_mb], best_s), -cap_mb))
    # Neighbouring caps make almost the same buckets, so that measuring both would tell little.
    apart: list[float] = []
    for cap_mb in order:
        if all(max(cap_mb, cap) >= _MIN_CAP_RATIO * min(cap_mb, cap) for cap in apart):
            apart.append(cap_mb)
    chosen = [programme, *(others[cap_mb] for cap_mb in apart[:2])]
    single = fusion.SingleFusion().plan(model.tensors, model.world_size)
    if step_s(single) <= _MAX_SINGLE_RATIO * min(map(step_s, [fixed, *chosen])):
        chosen.append(single)
    return chosen + [others[cap_mb] for cap_mb in apart[2:]]


def _gains_lost(step_s: float, best_s: float) -> int:
    """Returns how much longer `step_s` is than `best_s`, in units of `_MIN_GAIN`, rounded down."""
    if step_s <= best_s:
        return 0
    # If `best_s` is 0, the ratio is infinite for any longer step.
    return int((step_s / best_s - 1) / _MIN_GAIN) if best_s else sys.maxsize


class AutoSearch(search.Contest):
    """Contest of `AutoFusion`: candidates against the fixed buckets, which are the incumbent."""

    @property
    @override
    def reason(self) -> str:
        """Returns one line for people that says what `best` is, and why."""
        best, fixed, fixed_ms = self.best, self.incumbent, 1e3 * self.mean_s(self.incumbent)
        what = f"auto: {search.described(best)}"
        num_measured = sum(self.count(plan) > 0 for plan in self.plans)
        if not num_measured:
            return f"{what}, nothing measured"
        if best is fixed:
            others = f"none of {num_measured - 1} others was faster"
            return f"{what} of {best.name} stay: {fixed_ms:.4g} ms/step, {others}"
        best_ms = 1e3 * self.mean_s(best)
        return f"{what}, {best_ms:.4g} ms/step against {fixed_ms:.4g} ms of {fixed.name}"


class BayesianFusion(fusion.ThresholdFusion, search.StepModelPlanner):
    """Tries a few caps for `ThresholdFusion` on real steps; a Gaussian process chooses them.

    The fixed buckets, which `ThresholdFusion` makes, are measured first. The measured times of
    compute, link and codec are not used, only those of steps with the tried plans.

    Args:
        num_trials: Most plans to measure, the fixed buckets included. Fewer are measured if there
            are not so many different plans.
        min_cap_mb: Smallest cap that is tried, MiB.
        max_cap_mb: Largest cap that is tried, MiB.
        bucket_cap_mb: Cap of the fixed buckets, MiB. None means `ThresholdFusion`'s default.
        first_bucket_cap_mb: Cap of the bucket nearest the input, MiB; see `ThresholdFusion`.
        seed: Seed of the Gaussian process's random numbers.

    Raises:
        ValueError: If `num_trials` is below 2, if not 0 < `min_cap_mb` < `max_cap_mb`, or if a cap
            of the first plan is not positive.
        ModuleNotFoundError: If scikit-learn is missing; the extra `apps` installs it.
    """

    name = "bayesian"
    plans_for_codecs = True

    def __init__(
        self,
        *,
        num_trials: int = 8,
        min_cap_mb: float = 0.25,
        max_cap_mb: float = 256.0,
        bucket_cap_mb: float | None = None,
        first_bucket_cap_mb: float = 1.0,
        seed: int = 0,
    ) -> None:
        if num_trials < 2:
            raise ValueError(f"fusion={self.name!r}: num_trials must be >= 2, got {num_trials}.")
        need('fusion="bayesian"', "sklearn")
        if not 0 < min_cap_mb < max_cap_mb < math.inf:
            raise ValueError(
                f"fusion='bayesian' has min_cap_mb={min_cap_mb} and max_cap_mb={max_cap_mb}. Set"
                " both above 0, and min_cap_mb below max_cap_mb."
            )
        self.num_trials = num_trials
        self.min_cap_mb = min_cap_mb
        self.max_cap_mb = max_cap_mb
        self.seed = seed
        # Plans that a search found are saved under a key that lists the options in the order in
        # which they are assigned here. So this order must not change.
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)

    @override
    def search_for(self, model: StepModel) -> search.PlanSearch:
        """Returns a search over caps. It uses the tensors and the world size of `model` only."""
        known = model.tensors, model.world_size
        _, cap_mb = self.caps_mb(model.world_size)
        plans = self.plans_of_caps(*known, self.min_cap_mb, self.max_cap_mb)
        start = self.plan(*known)
        # If a cap makes the same buckets as `start`, its plan is replaced by `start`, so that the
        # same buckets are not measured twice.
        equal = (cap for cap, plan in plans.items() if plan.has_buckets_of(start))
        plans[next(equal, cap_mb)] = start
        return BayesianSearch(plans, start, self.num_trials, self.seed)


@dataclass(eq=False)
class BayesianSearch:
    """A `PlanSearch` over caps. Deterministic: equal measurements lead to equal suggestions.

    Attributes:
        plans: Cap in MiB -> plan; no two plans have the same buckets.
        start: Plan that is measured first; one of `plans`. It is used until a plan is measured.
        num_trials: Most plans to measure, `start` included.
        seed: Seed of the Gaussian process's random numbers.
    """

    plans: dict[float, BucketPlan]
    start: BucketPlan
    num_trials: int
    seed: int
    _measured: list[tuple[float, float, BucketPlan]] = field(default_factory=list, init=False)

    @property
    def best(self) -> BucketPlan:
        """Returns the fastest measured plan, or `start` if none was measured."""
        return min(self._measured)[2] if self._measured else self.start

    @property
    def reason(self) -> str:
        """Returns one line for people that says what `best` is, and why."""
        if not self._measured:
            return f"bayesian: {search.described(self.start)}, nothing measured"
        step_s, cap_mb, plan = min(self._measured, key=lambda trial: trial[:2])
        cost = f"(cap {cap_mb:.3g} MiB), {1e3 * step_s:.4g} ms/step"
        best = f"the best of {len(self._measured)} caps measured"
        return f"bayesian: {search.described(plan)} {cost}, {best}"

    def next(self) -> BucketPlan | None:
        """Returns the plan to measure next. None means that the search is over.

        First comes `start`. Then come the plans of two caps, at 1/5 and 4/5 of the list of all
        caps. All further plans are those that the Gaussian process suggests. No plan is returned
        again once `tell` was called with it.
        """
        left = sorted(set(self.plans) - {cap_mb for _, cap_mb, _ in self._measured})
        if not self._measured:
            return self.start
        if len(self._measured) >= self.num_trials or not left:
            return None
        if len(self._measured) > 2:
            return self.plans[left[self._most_promising(left)]]
        # These two caps are far apart, so that the Gaussian process knows the whole range.
        caps = sorted(self.plans)
        number = (len(caps) - 1) * (0.2 if len(self._measured) == 1 else 0.8)
        return self.plans[min(left, key=lambda cap: (abs(caps.index(cap) - number), cap))]

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Stores a measurement of one of `plans`.

        Args:
            plan: Plan with which steps were trained.
            step_s: Seconds of a step of the slowest rank.

        Raises:
            StopIteration: If none of `plans` has the buckets of `plan`.
        """
        cap_mb = next(cap for cap, other in self.plans.items() if plan.has_buckets_of(other))
        self._measured.append((step_s, cap_mb, plan))

    def _most_promising(self, caps: Sequence[float]) -> int:
        """Returns the index in `caps` of the cap with the largest expected improvement.

        Improvements are measured in standard deviations of the measured times, so that they do not
        depend on the length of a step.
        """
        # Imported here, since the import takes a second, which other planners do not need.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        smooth = Matern(length_scale=2.0, length_scale_bounds=(0.5, 10.0), nu=2.5)
        noise = WhiteKernel(noise_level=1e-2, noise_level_bounds=(1e-4, 0.3))
        process = GaussianProcessRegressor(smooth + noise, random_state=self.seed)
        steps_s = [step_s for step_s, _, _ in self._measured]
        # If all steps took equally long, the deviation is 0, and it is replaced by 1 for the
        # division below.
        scale_s = pstdev(steps_s) or 1.0
        targets = [(step_s - mean(steps_s)) / scale_s for step_s in steps_s]
        # With few points the fitted length scale may lie at its bound, which is harmless.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(_column([cap_mb for _, cap_mb, _ in self._measured]), targets)
        expected, spread = process.predict(_column(caps), return_std=True)
        gains = list(map(_expected_improvement, min(targets) - expected, spread))
        return gains.index(max(gains))


def _expected_improvement(gain: float, deviation: float) -> float:
    """Returns the expectation of max(0, x) for a normally distributed x.

    Args:
        gain: Mean of x.
        deviation: Standard deviation of x.
    """
    normal = NormalDist()
    ratio = gain / max(deviation, 1e-9)
    return gain * normal.cdf(ratio) + deviation * normal.pdf(ratio)


def _column(caps: Sequence[float]) -> list[list[float]]:
    """Returns log2 of each cap, as the one-column matrix that scikit-learn takes."""
    return [[math.log2(cap_mb)] for cap_mb in caps]
