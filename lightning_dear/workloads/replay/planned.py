"""A profile as planners and the simulator see a model: its tensors, and when each is due."""

from __future__ import annotations

import math
from itertools import accumulate

from lightning_dear.planning import ModelTimes, TensorSpec
from lightning_dear.workloads.replay.profile import ModelProfile

_FP32_BYTES = 4


def planned(profile: ModelProfile) -> tuple[list[TensorSpec], ModelTimes]:
    """What a recorded and a measured step of a replay of `profile` would give the planners.

    Forward reads a layer's tensors when it begins; backward has its gradients when it ends. The
    optimizer's step takes no time. Tensors are numbered and named as the replay's parameters.
    """
    begins_s = accumulate((layer.forward_s for layer in profile.layers), initial=0.0)
    ends_s = list(accumulate(layer.backward_s for layer in reversed(profile.layers)))[::-1]
    tensors: list[TensorSpec] = []
    first_use_s: dict[int, float] = {}
    ready_s: dict[int, float] = {}
    due = zip(profile.layers, begins_s, ends_s, strict=False)
    for number, (layer, begin_s, end_s) in enumerate(due):
        for place, shape in enumerate(layer.shapes):
            index = len(tensors)
            first_use_s[index], ready_s[index] = begin_s, end_s
            tensor = TensorSpec(
                index=index,
                name=f"layers.{number}.{place}",
                numel=math.prod(shape),
                itemsize=_FP32_BYTES,
                family="float32",
                first_use=index,
                ready=profile.num_tensors - 1 - index,
            )
            tensors.append(tensor)
    return tensors, ModelTimes(profile.forward_s, profile.backward_s, first_use_s, ready_s)
