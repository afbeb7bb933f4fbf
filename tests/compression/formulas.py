"""What each codec's formula says of the numbers that come back, for any finite rows, in fp64.

Laws take a codec and [R, numel] fp32 rows and raise AssertionError; `properties.py` says which law
belongs to which codec. What is random holds here for every draw; means over draws are tested in
`test_stochastic.py` and `test_sparse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from lightning_dear.compression import (
    DGC,
    QSGD,
    Codec,
    EFSignSGD,
    Int4,
    Int8,
    LoCo,
    Natural,
    OneBit,
    RandomK,
    SignSGD,
    Signum,
    TernGrad,
    TopK,
)
from lightning_dear.compression.error_feedback import Encoded
from tests.compression.battery import (
    Again,
    check_again,
    decoded,
    encoded,
    relative_error,
    round_trip,
)
from tests.compression.inputs import LARGEST

TINY = torch.finfo(torch.float32).tiny
UNIT, DENORMAL = 2.0**-24, 2.0**-150
"""Largest relative rounding error of fp32, and largest error where the result is denormal."""

FLOATS = {
    "bf16": (2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
    "fp16": (2.0**-11, 2.0**-25, 65504.0),
}
"""Relative error of normal numbers, absolute error of smaller ones, largest number."""

LEVELS = {"int8": 127, "int4": 7}


def blocks_of(rows: Tensor, size: int | None) -> list[Tensor]:
    """Cut into blocks along each row, none of an empty row."""
    return list(rows.split(size or max(1, rows.shape[-1]), -1)) if rows.shape[-1] else []


# --- numbers for themselves, and integers ---------------------------------------------------------


def loses_nothing(codec: Codec, rows: Tensor) -> None:
    assert codec.wire_bytes(rows.shape[1]) == 4 * rows.shape[1]
    assert torch.equal(round_trip(codec, rows), rows)


def is_a_narrower_float(codec: Codec, rows: Tensor) -> None:
    relative, absolute, largest = FLOATS[codec.name]
    within = rows.double().clamp(-largest, largest)
    lost = (round_trip(codec, rows).double() - within).abs()
    assert (lost <= torch.clamp(relative * within.abs(), min=absolute)).all()


def is_within_half_a_scale(codec: Int8 | Int4, rows: Tensor) -> None:
    """Of its own block; 2^-16 of a scale is for rounding in fp32."""
    size, came_back = codec.block_size, round_trip(codec, rows)
    for block, back in zip(blocks_of(rows, size), blocks_of(came_back, size), strict=True):
        exact = block.double()
        scale = exact.abs().amax(1, keepdim=True) / LEVELS[codec.name]
        lost = (back.double() - exact).abs()
        assert (lost <= (0.5 + 2.0**-16) * scale.clamp_min(TINY)).all()
        assert (lost <= exact.abs()).all()


def is_int4_whose_loss_is_averaged(codec: LoCo, rows: Tensor) -> None:
    """e' = (1 - b) e + b (x - C(x)), from e = -g / 2, so that x = g / 2 is encoded."""
    assert torch.equal(encoded(codec, rows), encoded(Int4(block_size=codec.block_size), rows))
    memory = codec.worker_memory(rows.numel(), rows.device)
    memory.kept["residual"].copy_(rows.flatten() / -2)
    before = memory.kept["residual"].view_as(rows).double()
    sent = rows.clone()
    memory.compensate(sent, None)
    wire = encoded(codec, sent)
    memory.note_sent(sent, wire, Encoded(codec), None)
    memory.commit()
    lost = sent.double() - decoded(codec, wire, rows.shape[1]).double()
    after = (1 - codec.rate) * before + codec.rate * lost
    _same(memory.kept["residual"].view_as(rows), after, rows.double().abs())


def _same(ours: Tensor, exact: Tensor, size: Tensor) -> None:
    """Equal but for what fp32 rounds off a few times in numbers of this size."""
    assert ((ours.double() - exact).abs() <= 8 * UNIT * size + 8 * DENORMAL).all()


# --- signs ----------------------------------------------------------------------------------------


def rounding_of_means(codec: EFSignSGD | OneBit) -> Again:
    """What rounding may do to a mean of n numbers of one sign, summed in any order.

    x / n is rounded twice, n - 1 sums and a factor n / c once each. Denormal x / n are off by
    `DENORMAL`, n of them.
    """
    return Again((codec.block_size + 4) * UNIT, (codec.block_size + 1) * DENORMAL)


def has_one_mean(codec: EFSignSGD, rows: Tensor) -> None:
    _compare_means(codec, rows, _one_mean)


def has_two_means(codec: OneBit, rows: Tensor) -> None:
    _compare_means(codec, rows, _two_means)


def _one_mean(block: Tensor) -> Tensor:
    mean = block.abs().mean()
    return torch.where(block < 0, -mean, mean)


def _two_means(block: Tensor) -> Tensor:
    is_negative = block < 0
    below, others = (
        block[part].sum() / part.sum().clamp_min(1) for part in (is_negative, ~is_negative)
    )
    return torch.where(is_negative, below, others)


def _compare_means(
    codec: EFSignSGD | OneBit, rows: Tensor, mean: Callable[[Tensor], Tensor]
) -> None:
    came_back, bound = round_trip(codec, rows), rounding_of_means(codec)
    assert (came_back[rows < 0] <= 0).all()
    assert (came_back[rows >= 0] >= 0).all()
    for row, back in zip(rows.double(), came_back.double(), strict=True):
        for block, ours in zip(
            blocks_of(row, codec.block_size), blocks_of(back, codec.block_size), strict=True
        ):
            exact = mean(block)
            assert ((ours - exact).abs() <= bound.relative * exact.abs() + bound.absolute).all()


def votes(codec: SignSGD, rows: Tensor) -> None:
    assert torch.equal(round_trip(codec, rows), torch.where(rows < 0, -1.0, 1.0))


def votes_by_a_running_mean(codec: Signum, rows: Tensor) -> None:
    """m' = momentum m + (1 - momentum) g, from m = -g / 2, which has another sign than g."""
    votes(codec, rows)
    memory = codec.worker_memory(rows.numel(), rows.device)
    memory.kept["running_mean"].copy_(rows.flatten() / -2)
    before = memory.kept["running_mean"].view_as(rows).double()
    mean = rows.clone()
    memory.compensate(mean, None)
    after = codec.momentum * before + (1 - codec.momentum) * rows.double()
    _same(mean, after, rows.double().abs())


# --- random levels --------------------------------------------------------------------------------


def step_and_variance(codec: Codec, row: Tensor, slack: float = 0) -> tuple[Tensor, Tensor]:
    """How far the two levels of each element lie apart, and E (C(x) - x)^2; fp64, by formula.

    `slack`, in squared steps, is for what fp32 rounds off next to a level of QSGD.
    """
    size, row = row.abs(), row.double().abs()
    if isinstance(codec, Natural):
        low = 2.0 ** (codec.max_exponent - 126)
        step = torch.exp2(torch.frexp(size).exponent.double() - 1).clamp_min(low)
        below = torch.where(row < low, 0.0, step)
        return step, (row - below) * (below + step - row)
    blocks = blocks_of(row, codec.block_size)
    if isinstance(codec, TernGrad):
        steps = [block.max().clamp_min(TINY).expand(len(block)) for block in blocks]
        step = torch.cat([*steps, row[:0]])
        return step, step * row - row.square()
    assert isinstance(codec, QSGD)
    steps = [
        (block.norm().clamp_max(LARGEST) / codec.num_levels).clamp_min(TINY).expand(len(block))
        for block in blocks
    ]
    step = torch.cat([*steps, row[:0]])
    up = (row / step).frac()
    return step, step.square() * (up * (1 - up) + slack)


def is_a_level_beside(codec: QSGD | TernGrad, rows: Tensor) -> None:
    came_back = _is_within_a_step(codec, rows, rows)
    for row, level in zip(rows, came_back, strict=True):
        in_steps = level.double() / step_and_variance(codec, row)[0]
        assert torch.allclose(in_steps, in_steps.round(), atol=1e-4)


def is_a_power_beside(codec: Natural, rows: Tensor) -> None:
    """Beyond the largest power, it is sent; a power comes back as it is, whatever is drawn."""
    top = 2.0**codec.max_exponent
    came_back = _is_within_a_step(codec, rows, rows.clamp(-top, top))
    mantissa, _ = torch.frexp(came_back.abs())
    assert ((mantissa == 0.5) | (came_back == 0)).all()
    check_again(codec, came_back, Again(), seed=8)


def is_ternary(codec: TernGrad, rows: Tensor) -> None:
    """The largest of a block is sent for certain, so that nothing is drawn the second time."""
    is_a_level_beside(codec, rows)
    check_again(codec, round_trip(codec, rows), Again(), seed=8)


def _is_within_a_step(codec: Codec, rows: Tensor, within: Tensor) -> Tensor:
    came_back = round_trip(codec, rows)
    assert (came_back[rows == 0] == 0).all()
    for row, level in zip(within, came_back, strict=True):
        step, _ = step_and_variance(codec, row)
        assert ((level.double() - row.double()).abs() <= step * (1 + 1e-5)).all()
    return came_back


# --- a few numbers of each row --------------------------------------------------------------------


def num_entries(density: float, numel: int) -> int:
    return max(1, math.ceil(Fraction(str(density)) * numel)) if numel else 0


def sends_the_largest(codec: TopK, rows: Tensor) -> None:
    """What is sent is no smaller than what is lost, however few a threshold finds."""
    came_back, numel = round_trip(codec, rows), rows.shape[1]
    k = num_entries(codec.density, numel)
    assert torch.equal(came_back, torch.where(came_back != 0, rows, 0.0)), "a number was changed"
    sent = (came_back != 0).sum(1)
    assert (sent <= k).all()
    assert torch.equal(came_back.any(1), rows.any(1)), "nothing of a row was sent"
    error = relative_error(codec, rows)
    assert (error <= 1 - sent.double() / max(1, numel) + 1e-12).all()
    if codec.selector == "exact":
        assert (error <= 1 - k / max(1, numel) + 1e-12).all()
        assert torch.equal(sent, (rows != 0).sum(1).clamp_max(k))


def sends_what_velocity_has_gathered(codec: DGC, rows: Tensor) -> None:
    """u' = momentum u + g and v' = v + u', from u = -g / 2 and v = 0; both 0 where v' was sent."""
    topk = TopK(density=codec.density, selector=codec.selector)
    assert torch.equal(encoded(codec, rows), encoded(topk, rows))
    sends_the_largest(codec, rows)
    memory = codec.worker_memory(rows.numel(), rows.device)
    memory.kept["momentum"].copy_(rows.flatten() / -2)
    u = codec.momentum * memory.kept["momentum"].view_as(rows).double() + rows.double()
    waiting = rows.clone()
    memory.compensate(waiting, None)
    _same(waiting, u, rows.double().abs())
    wire = encoded(codec, waiting)
    memory.note_sent(waiting, wire, Encoded(codec), None)
    memory.commit()
    was_sent = decoded(codec, wire, rows.shape[1]) != 0
    for kept in memory.kept.values():
        _same(kept.view_as(rows), u.masked_fill(was_sent, 0.0), rows.double().abs())


def sends_places_that_all_draw(codec: RandomK, rows: Tensor) -> None:
    """k places, the same in all rows; the factor of each is what a row of ones comes back as."""
    factors = round_trip(codec, torch.ones_like(rows))
    assert torch.equal(factors, factors[:1].expand_as(factors)), "rows got different places"
    assert ((factors != 0).sum(1) == num_entries(codec.density, rows.shape[1])).all()
    assert (factors <= 1).all()
    expected = (rows.double() * factors.double()).clamp(-LARGEST, LARGEST).float()
    assert torch.equal(round_trip(codec, rows), expected)
