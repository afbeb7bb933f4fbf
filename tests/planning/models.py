"""Made-up models and times for the planners' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from lightning_dear.planning import (
    BucketPlan,
    CodecCost,
    CodecCosts,
    Linear,
    LinkCost,
    ModelTimes,
    TensorSpec,
)
from lightning_dear.planning.measured import NO_CODEC, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT
from lightning_dear.planning.step import Compute, Program

WORLD_SIZE = 2
UNIT = ALIGNMENT * WORLD_SIZE
ITEMSIZE = 4


def compute_s(program: Program) -> float:
    """Seconds of a step without any waiting."""
    return sum(op.seconds for op in program.ops if isinstance(op, Compute))


def chain(
    units: Sequence[int], forward_s: Sequence[float], backward_s: Sequence[float]
) -> tuple[list[TensorSpec], ModelTimes]:
    """A chain of layers with one tensor each, whose sizes need no padding.

    Args:
        units: Sizes, in multiples of `UNIT` elements.
        forward_s: Of each layer.
        backward_s: Of each layer.
    """
    count = len(units)
    tensors = [
        TensorSpec(i, f"layer {i}", size * UNIT, ITEMSIZE, "f", i, count - 1 - i)
        for i, size in enumerate(units)
    ]
    times = ModelTimes(
        sum(forward_s),
        sum(backward_s),
        {i: sum(forward_s[:i]) for i in range(count)},
        {i: sum(backward_s[i:]) for i in range(count)},
    )
    return tensors, times


def bounds_s(
    plan: BucketPlan, times: ModelTimes, link: LinkCost, codecs: CodecCosts = NO_CODEC
) -> tuple[float, float]:
    """Of what travels, without padding: the least step, and the least whose halves stay apart.

    max(forward + backward, bytes / rate), bytes being what a rank sends in both halves; and
    max(forward, all-gather) + max(backward, reduce-scatter) (DeAR, arXiv 2302.12445).
    """
    least = [
        codecs.of(plan, number).of(bucket.numel, bucket.itemsize, plan.world_size)
        for number, bucket in enumerate(plan.buckets)
    ]
    halves = sum(cost.reduce_bytes for cost in least), sum(cost.gather_bytes for cost in least)
    reduce_s, gather_s = (link.beta_s * sent_bytes(half, plan.world_size) for half in halves)
    apart_s = max(times.forward_s, gather_s) + max(times.backward_s, reduce_s)
    return max(times.forward_s + times.backward_s, reduce_s + gather_s), apart_s


seconds = st.integers(0, 20).map(float)


@st.composite
def chains(draw: st.DrawFn, max_size: int = 10) -> tuple[list[TensorSpec], ModelTimes]:
    count = draw(st.integers(1, max_size))

    def each(one: st.SearchStrategy) -> list:
        return draw(st.lists(one, min_size=count, max_size=count))

    return chain(each(st.integers(1, 20)), each(seconds), each(seconds))


@st.composite
def unaligned_chains(draw: st.DrawFn, max_size: int = 10) -> tuple[list[TensorSpec], ModelTimes]:
    """Chains whose tensors need padding; many of them are smaller than any bucket."""
    tensors, times = draw(chains(max_size))
    sizes = st.one_of(st.integers(1, 2 * ALIGNMENT), st.integers(1, 20 * UNIT))
    return [replace(one, numel=draw(sizes)) for one in tensors], times


world_sizes = st.sampled_from([1, 2, 3, 4, 8])

links = st.builds(
    LinkCost,
    alpha_s=st.integers(0, 10).map(float),
    beta_s=st.integers(0, 4).map(lambda one: one / (UNIT * ITEMSIZE)),
)
"""A unit takes 0, 0.5, 1, 1.5 or 2 seconds at two ranks."""


def _linear(most: float, most_each: float) -> st.SearchStrategy[Linear]:
    alphas = st.one_of(st.just(0.0), st.floats(0, most))
    return st.builds(Linear, alphas, st.one_of(st.just(0.0), st.floats(0, most_each)))


_seconds = _linear(2.0, 1 / UNIT)
_wires = st.one_of(st.none(), _linear(UNIT, 1.5 * ITEMSIZE))
codec_costs = st.builds(CodecCost, _seconds, _seconds, _seconds, _seconds, _wires, _wires)
codecs = st.builds(CodecCosts, codec_costs, codec_costs, st.booleans()).filter(
    lambda one: not one.are_none
)
"""Encoding a unit takes up to 3 seconds, and it travels as 1.75 of it at most."""
