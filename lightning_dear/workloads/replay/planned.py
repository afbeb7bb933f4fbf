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
    ends_s = list(accumulate(layer.backward_s for layer in reversed(profile.layers)))
    due = list(zip(begins_s, reversed(ends_s), strict=False))
    owned = [
        (number, place, math.prod(shape))
        for number, layer in enumerate(profile.layers)
        for place, shape in enumerate(layer.shapes)
    ]
    tensors = [
        TensorSpec(
            index=index,
            name=f"layers.{number}.{place}",
            numel=numel,
            itemsize=_FP32_BYTES,
            family="float32",
            first_use=index,
            ready=len(owned) - 1 - index,
        )
        for index, (number, place, numel) in enumerate(owned)
    ]
    first_use_s, ready_s = (
        {index: due[number][half] for index, (number, _, _) in enumerate(owned)} for half in (0, 1)
    )
    return tensors, ModelTimes(profile.forward_s, profile.backward_s, first_use_s, ready_s)
