"""Small profiles, and a clock that moves only when somebody sleeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_dear.workloads.replay import LayerProfile, ModelProfile
from lightning_dear.workloads.replay.waiter import Waiter


def small_profile(
    forward_s: float = 0.001,
    backward_s: float = 0.002,
    shapes: Sequence[tuple[tuple[int, ...], ...]] = (
        ((30, 7),),
        ((7,), (7,)),
        ((11, 13), (11,), (5,)),
        ((401,),),
    ),
) -> ModelProfile:
    """Layers of different sizes that all take the same time."""
    layers = [
        LayerProfile(f"layer_{number}", layer, forward_s, backward_s)
        for number, layer in enumerate(shapes)
    ]
    return ModelProfile("small", "flops", "For tests.", tuple(layers))


def divided(profile: ModelProfile, forward_s: float, backward_s: float) -> ModelProfile:
    """The profile with other seconds of forward and of backward."""
    times = forward_s / profile.forward_s, backward_s / profile.backward_s
    layers = [
        replace(one, forward_s=times[0] * one.forward_s, backward_s=times[1] * one.backward_s)
        for one in profile.layers
    ]
    return replace(profile, layers=tuple(layers))


class FakeTime:
    """A clock, a sleep that is late, and a host that works or stands still.

    Args:
        late_s: What every sleep takes too long.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        self.late_s = late_s
        self.now_s = self.work_s = self.device_s = self.charged_s = 0.0
        self.num_sleeps = 0

    def drive(self, waiter: Waiter) -> None:
        """Let a waiter use these clocks and this sleep instead of the host's."""
        for name in ("clock", "sleep", "work_clock", "device_clock", "charged_clock"):
            setattr(waiter, name, getattr(self, name))

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.work_s += seconds

    def work_as_device(self, seconds: float) -> None:
        self.work(seconds)
        self.device_s += seconds

    def charge(self, seconds: float) -> None:
        self.now_s += seconds
        self.device_s += seconds
        self.charged_s += seconds

    def stand_still(self, seconds: float) -> None:
        self.now_s += seconds

    def work_clock(self) -> float:
        return self.work_s

    def charged_clock(self) -> float:
        return self.charged_s

    def device_clock(self) -> float:
        return self.device_s

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < math.inf
        self.now_s += seconds + self.late_s
        self.num_sleeps += 1
