"""Planners that try plans on real steps, and keep the fastest.

`AutoFusion` measures what is predicted to be best. `BayesianFusion` looks at no prediction: it
searches for the bucket cap as DeAR tunes it (arXiv 2302.12445), with its faults cured. The cap is
searched on a logarithmic scale. Step times are normalised before the Gaussian process sees them, so
that expected improvement means the same for steps of 5 ms and of 5 s. A cap is only suggested if
its plan has not been measured, and what is used in the end was measured.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, mean, pstdev

from typing_extensions import override

from lightning_dear.names import need
from lightning_dear.planning import refine, search
from lightning_dear.planning.fusion import SingleFusion, ThresholdFusion
from lightning_dear.planning.plan import BucketPlan, distinct
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.predicting import MergeCompFusion

_CAP_RANGE = (1 / 32, 32.0)
"""Caps that are tried, as shares of the fixed buckets': 0.25 to 256 MiB at two ranks."""

_MIN_GAIN = 5e-3
"""Share of the step by which predictions must differ."""

_MIN_CAP_RATIO = 2.0
_MAX_SINGLE_RATIO = 1.3
_MAX_DDP_RATIO = 1.2
_DDP_DIVISORS = (1, 4, 16)
"""What DDP's caps are divided by, as they leave small models one bucket or two."""


class AutoFusion(ThresholdFusion, search.StepModelPlanner):
    """Predicts plans from the measured times, measures the best on real steps, keeps the fastest.

    Against each other stand `ThresholdFusion`'s buckets (always), those of `MergeCompFusion`, the
    caps with the shortest predicted steps, and one bucket for all if it is predicted to be not far
    behind. If all-reducing some buckets is predicted to be better than any of these, that is
    measured too. The fixed buckets and the two best others are measured twice, apart in time, so
    that a passing disturbance does not decide; the fixed ones stay unless another plan's mean is
    lower.

    Args:
        num_steps: Optimizer steps that all of it may take, the recorded and profiled ones included.
        bucket_cap_mb: Cap of the fixed buckets, MiB; see `ThresholdFusion`. Other caps are looked
            for between a 32nd and 32 times as much.
        first_bucket_cap_mb: Cap of the fixed bucket nearest the input, MiB.
        all_reduced_share: Most of all elements, 0..1, that may be all-reduced instead of sharded:
            their optimizer state is then whole on every rank. 0 forbids it; at 1, everything
            all-reduced in DDP's buckets (or, for small models, smaller ones) is measured as well if
            it is predicted to be not far behind.

    Raises:
        ValueError: If the steps are too few to compare two plans, a cap is not positive, or the
            share is not 0..1.
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
            raise ValueError(f"num_steps must be >= {least}, got {num_steps}.")
        if not 0 <= all_reduced_share <= 1:
            raise ValueError(f"all_reduced_share must be 0..1, got {all_reduced_share}.")
        # The order of attributes is that in which plans found before name their planner's options.
        self.num_steps = num_steps
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)
        self.all_reduced_share = all_reduced_share

    @override
    def search_for(self, model: StepModel) -> search.PlanSearch:
        """See `SearchingPlanner`; `plan` makes what is to be beaten."""
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
        # All are measured once, the fixed plan among them, and some once more.
        num_candidates = max(num_trials - 1 - search.NUM_REPEATED, 1)
        _, *candidates = distinct([fixed, *candidates])
        return AutoSearch(fixed, candidates[:num_candidates], model.step_s)


def _all_reducing(plans: Sequence[BucketPlan], model: StepModel, share: float) -> list[BucketPlan]:
    """What to try with at most this share all-reduced, each followed by the same without."""
    tensors, step_s = model.tensors, model.step_s
    chosen: list[BucketPlan] = []
    known = model.times, model.link, share
    changed = {refine.choose_all_reduce(plan, tensors, *known): plan for plan in plans}
    best = min(changed, key=step_s)
    if best.all_reduced and step_s(best) < min(map(step_s, plans)):
        chosen += [best, changed[best]]
    if share == 1:
        world_size = model.world_size
        tried = [refine.everything_all_reduced(tensors, world_size, d) for d in _DDP_DIVISORS]
        everything = min(tried, key=step_s)
        if step_s(everything) <= _MAX_DDP_RATIO * min(map(step_s, [*plans, *chosen])):
            chosen.append(everything)
    return chosen


def _candidates(
    fixed: BucketPlan, others: Mapping[float, BucketPlan], model: StepModel
) -> list[BucketPlan]:
    """What to try against `fixed`, the most promising first; perhaps some of it twice."""
    tensors, known, step_s = model.tensors, (model.times, model.link), model.step_s
    programme = MergeCompFusion().best_plan(model)
    by_cap = {cap_mb: refine.choose_early(plan, tensors, *known) for cap_mb, plan in others.items()}
    steps_s = {cap_mb: step_s(plan) for cap_mb, plan in by_cap.items()}
    best_s = min(steps_s.values())
    # Of equally good ones those with fewer messages.
    order = sorted(by_cap, key=lambda cap_mb: (_gains_lost(steps_s[cap_mb], best_s), -cap_mb))
    # Neighbouring caps make much the same buckets: measuring both would teach little.
    apart: list[float] = []
    for cap_mb in order:
        if all(max(cap_mb, cap) >= _MIN_CAP_RATIO * min(cap_mb, cap) for cap in apart):
            apart.append(cap_mb)
    chosen = [programme, *(by_cap[cap_mb] for cap_mb in apart[:2])]
    single = SingleFusion().plan(tensors, model.world_size)
    if step_s(single) <= _MAX_SINGLE_RATIO * min(map(step_s, [fixed, *chosen])):
        chosen.append(single)
    return chosen + [by_cap[cap_mb] for cap_mb in apart[2:]]


def _gains_lost(step_s: float, best_s: float) -> int:
    if step_s <= best_s:
        return 0
    # Where the best takes no time, whatever takes any is worse than all that does not.
    return int((step_s / best_s - 1) / _MIN_GAIN) if best_s else sys.maxsize


class AutoSearch(search.Contest):
    """See `PlanSearch`: candidates against the fixed plan, which is the incumbent."""

    @property
    @override
    def reason(self) -> str:
        """See `PlanSearch`."""
        best, fixed, fixed_ms = self.best, self.incumbent, 1e3 * self.mean_s(self.incumbent)
        what = f"auto: {search.described(best)}"
        if not self.num_measured:
            return f"{what}, nothing measured"
        if best is fixed:
            others = f"none of {self.num_measured - 1} others was faster"
            return f"{what} of {best.name} stay: {fixed_ms:.4g} ms/step, {others}"
        best_ms = 1e3 * self.mean_s(best)
        return f"{what}, {best_ms:.4g} ms/step against {fixed_ms:.4g} ms of {fixed.name}"


class BayesianFusion(ThresholdFusion, search.StepModelPlanner):
    """Tries a few caps for `ThresholdFusion` on real steps; a Gaussian process chooses them.

    It starts with `ThresholdFusion`'s own buckets, which are measured first. It needs no times.

    Args:
        num_trials: Plans to measure, the first one included.
        min_cap_mb: Smallest cap, MiB.
        max_cap_mb: Largest cap, MiB.
        bucket_cap_mb: The cap to start with, MiB; None: `ThresholdFusion`'s own.
        first_bucket_cap_mb: Cap of the bucket nearest the input, MiB; see `ThresholdFusion`.
        seed: For the Gaussian process's random numbers.

    Raises:
        ValueError: If there are fewer than two trials, the caps are not 0 < min < max, or one to
            start with is not positive.
        ModuleNotFoundError: If scikit-learn is missing, which the extra `apps` brings.
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
            raise ValueError(f"num_trials must be >= 2, got {num_trials}.")
        need('fusion="bayesian"', "sklearn")
        if not 0 < min_cap_mb < max_cap_mb < math.inf:
            raise ValueError(
                f"caps must be 0 < min_cap_mb < max_cap_mb, got {min_cap_mb} and {max_cap_mb}."
            )
        self.num_trials = num_trials
        self.min_cap_mb = min_cap_mb
        self.max_cap_mb = max_cap_mb
        self.seed = seed
        # The order of attributes is that in which plans found before name their planner's options.
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)

    @override
    def search_for(self, model: StepModel) -> search.PlanSearch:
        """See `SearchingPlanner`; times and costs are not looked at."""
        known = model.tensors, model.world_size
        _, cap_mb = self.caps_mb(model.world_size)
        plans = self.plans_of_caps(*known, self.min_cap_mb, self.max_cap_mb)
        start = self.plan(*known)
        # The start takes the turn of a cap that makes its buckets, so that none is measured twice.
        equal = (cap for cap, plan in plans.items() if plan.has_buckets_of(start))
        plans[next(equal, cap_mb)] = start
        return BayesianSearch(plans, start, self.num_trials, self.seed)


@dataclass(eq=False)
class BayesianSearch:
    """See `PlanSearch`. Deterministic: the same measurements bring the same suggestions.

    Attributes:
        plans: Cap in MiB -> plan; all distinct.
        start: That of them which is measured first; it is there to go back to.
        num_trials: Plans to measure, `start` included.
        seed: For the Gaussian process's random numbers.
    """

    plans: dict[float, BucketPlan]
    start: BucketPlan
    num_trials: int
    seed: int
    _measured: list[tuple[float, float, BucketPlan]] = field(default_factory=list, init=False)

    @property
    def best(self) -> BucketPlan:
        """See `PlanSearch`."""
        return min(self._measured)[2] if self._measured else self.start

    @property
    def reason(self) -> str:
        """See `PlanSearch`."""
        if not self._measured:
            return f"bayesian: {search.described(self.start)}, nothing measured"
        step_s, cap_mb, plan = min(self._measured, key=lambda trial: trial[:2])
        cost = f"(cap {cap_mb:.3g} MiB), {1e3 * step_s:.4g} ms/step"
        best = f"the best of {len(self._measured)} caps measured"
        return f"bayesian: {search.described(plan)} {cost}, {best}"

    def next(self) -> BucketPlan | None:
        """See `PlanSearch`: the start, a fifth from either end, then what is suggested."""
        left = sorted(set(self.plans) - {cap_mb for _, cap_mb, _ in self._measured})
        if not self._measured:
            return self.start
        if len(self._measured) >= self.num_trials or not left:
            return None
        if len(self._measured) < 3:
            # Far apart, so that the process has something to go by.
            caps = sorted(self.plans)
            number = (len(caps) - 1) * (0.2 if len(self._measured) == 1 else 0.8)
            cap_mb = min(left, key=lambda cap: (abs(caps.index(cap) - number), cap))
        else:
            cap_mb = left[self._most_promising(left)]
        return self.plans[cap_mb]

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """See `PlanSearch`."""
        cap_mb = next(cap for cap, other in self.plans.items() if plan.has_buckets_of(other))
        self._measured.append((step_s, cap_mb, plan))

    def _most_promising(self, caps: Sequence[float]) -> int:
        """Number of the cap with the largest expected improvement.

        That is counted in standard deviations of the measurements, so it has no scale of its own.
        """
        # Imported here: it takes a second, which only those who tune should pay.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        smooth = Matern(length_scale=2.0, length_scale_bounds=(0.5, 10.0), nu=2.5)
        noise = WhiteKernel(noise_level=1e-2, noise_level_bounds=(1e-4, 0.3))
        process = GaussianProcessRegressor(smooth + noise, random_state=self.seed)
        steps_s = [step_s for step_s, _, _ in self._measured]
        # Steps that are all the same have no deviation to count in.
        scale_s = pstdev(steps_s) or 1.0
        targets = [(step_s - mean(steps_s)) / scale_s for step_s in steps_s]
        # A few points may leave a length at its bound, which is no fault.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(_column([cap_mb for _, cap_mb, _ in self._measured]), targets)
        expected, spread = process.predict(_column(caps), return_std=True)
        gains = [
            _expected_improvement(min(targets) - float(target), float(deviation))
            for target, deviation in zip(expected, spread, strict=True)
        ]
        return gains.index(max(gains))


def _expected_improvement(gain: float, deviation: float) -> float:
    """Mean of max(0, x) for a normal x with this mean and deviation."""
    normal = NormalDist()
    ratio = gain / max(deviation, 1e-9)
    return gain * normal.cdf(ratio) + deviation * normal.pdf(ratio)


def _column(caps: Sequence[float]) -> list[list[float]]:
    return [[math.log2(cap_mb)] for cap_mb in caps]
