"""Bayesian search for the bucket cap, as DeAR tunes it (arXiv 2302.12445), with its faults cured.

The cap is searched on a logarithmic scale. Step times are normalised before the Gaussian process
sees them, so that expected improvement means the same for steps of 5 ms and of 5 s. A cap is only
suggested if its plan has not been measured, and what is used in the end was measured.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, mean, pstdev

from typing_extensions import override

from lightning_dear.planning.fusion import ThresholdFusion
from lightning_dear.planning.plan import BucketPlan
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import PlanSearch, StepModelPlanner, described


class BayesianFusion(ThresholdFusion, StepModelPlanner):
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
    def search_for(self, model: StepModel) -> PlanSearch:
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
            return f"bayesian: {described(self.start)}, nothing measured"
        step_s, cap_mb, plan = min(self._measured, key=lambda trial: trial[:2])
        return (
            f"bayesian: {described(plan)} (cap {cap_mb:.3g} MiB),"
            f" {1e3 * step_s:.4g} ms/step, the best of {len(self._measured)} caps measured"
        )

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

        kernel = Matern(length_scale=2.0, length_scale_bounds=(0.5, 10.0), nu=2.5) + WhiteKernel(
            noise_level=1e-2, noise_level_bounds=(1e-4, 0.3)
        )
        process = GaussianProcessRegressor(kernel, random_state=self.seed)
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
