"""The shortest step that planning/predict.py finds for a replayed model on a link without overhead.

    python -m tests.benchmarks.possible bert_base 0.5 1 1.33 2 4

Whole tensors, caps from 1 to 32 MiB; the optimizer's step takes no time. For each of the given
ratios of communication to forward and backward, at two ranks, it prints the step over
max(forward + backward, bytes / rate). Pure: the same on every machine.
"""

from __future__ import annotations

import sys

from lightning_dear.planning import LinkCost, ThresholdFusion
from lightning_dear.planning.predict import predict
from lightning_dear.workloads.replay import load_profile
from lightning_dear.workloads.replay.profile import planned
from tests.planning.models import bounds_s

WORLD_SIZE = 2
BYTES_PER_S = 125e6
CAPS_MB = (1, 2, 4, 8, 16, 32)


def possible_over_bound(name: str, ratio: float) -> float:
    """The best step over the bound, at `ratio` seconds of communication to one of compute."""
    profile = load_profile(name)
    communication_s = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * profile.nbytes / BYTES_PER_S
    tensors, times = planned(profile.with_compute(communication_s / ratio))
    link = LinkCost(0.0, 1 / BYTES_PER_S)
    steps = []
    for cap_mb in CAPS_MB:
        plan = ThresholdFusion(bucket_cap_mb=cap_mb, first_bucket_cap_mb=1).plan(
            tensors, WORLD_SIZE
        )
        steps.append(predict(plan, tensors, times, link).step_s)
    # It is the same for all caps.
    return min(steps) / bounds_s(plan, times, link)[0]


if __name__ == "__main__":
    for text in sys.argv[2:]:
        print(f"{sys.argv[1]} at ratio {text}: {possible_over_bound(sys.argv[1], float(text)):.2f}")
