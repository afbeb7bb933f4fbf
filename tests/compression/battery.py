"""What is true of every codec; each family's tests add what is true of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_dear.compression.codec import WIRE_ALIGNMENT, Codec, field


@dataclass(frozen=True)
class Again:
    """How near y = C(x) comes to itself: |C(y) - y| <= relative |y| + absolute, each number."""

    relative: float = 0.0
    absolute: float = 0.0


NEARLY = Again(relative=1e-5)
"""Where a scale is measured once more, and rounded."""


def generator_for(codec: Codec, seed: int = 7) -> torch.Generator | None:
    if codec.randomness == "none":
        return None
    return torch.Generator().manual_seed(seed)


def encoded(codec: Codec, rows: Tensor, seed: int = 7, dirt: int = 0xFF) -> Tensor:
    """The bytes of `rows`, in memory that held something else before."""
    nbytes = codec.wire_bytes(rows.shape[1])
    assert nbytes % WIRE_ALIGNMENT == 0, f"{nbytes} bytes are no multiple of {WIRE_ALIGNMENT}"
    wire = torch.full((len(rows), nbytes), dirt, dtype=torch.uint8)
    codec.encode(rows, wire, generator_for(codec, seed))
    return wire


def decoded(codec: Codec, wire: Tensor, numel: int, seed: int = 7) -> Tensor:
    """The numbers of `wire`, in memory that held NaN before."""
    rows = torch.full((len(wire), numel), torch.nan)
    codec.decode(wire, rows, generator_for(codec, seed))
    return rows


def round_trip(codec: Codec, rows: Tensor, seed: int = 7) -> Tensor:
    return decoded(codec, encoded(codec, rows, seed), rows.shape[1], seed)


def check_all(codec: Codec, rows: Tensor, again: Again | None = NEARLY) -> None:
    """Bytes, numbers and generators; nothing of how near they come.

    Args:
        codec: Whatever it is.
        rows: [R, numel] fp32, finite.
        again: How near to itself what came back comes back; without random numbers only. None:
            what comes back is not meant to travel unchanged.
    """
    before, state = rows.clone(), torch.get_rng_state()
    wire = encoded(codec, rows)
    assert torch.equal(wire, encoded(codec, rows, dirt=0)), "some bytes are not written"
    came_back = decoded(codec, wire, rows.shape[1])
    assert torch.isfinite(came_back).all()
    assert torch.isfinite(round_trip(codec, _extremes(rows.shape[1]))).all(), "of extreme rows"
    _check_takes_what_is_not_finite(codec, rows)
    assert torch.equal(rows, before), "the rows were changed"
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers were used"
    if codec.is_summable:
        _check_sums(codec, rows / len(rows))
    if codec.randomness == "none":
        _check_rows_are_independent(codec, rows, came_back)
        _check_cuts(codec, rows, came_back)
        if again is not None:
            check_again(codec, came_back, again)


def _extremes(numel: int) -> Tensor:
    """Rows of zeros, of denormals, of the largest numbers, of one such among small ones."""
    signs = torch.ones(numel)
    signs[::2] = -1.0
    rows = torch.stack([0.0 * signs, 1e-44 * signs, 3e38 * signs, 1e-30 * signs])
    rows[-1, :1] = 3e38
    return rows


def _check_takes_what_is_not_finite(codec: Codec, rows: Tensor) -> None:
    """Nothing raises; what comes back does not matter, as the step is left out or refused."""
    for wrong in (math.nan, math.inf, -math.inf):
        among_others = rows.clone()
        among_others[:, -1:] = wrong
        for some in (among_others, torch.full_like(rows, wrong)):
            try:
                round_trip(codec, some)
            except Exception as error:
                raise AssertionError("rows of nan or inf raise") from error


def check_again(codec: Codec, came_back: Tensor, again: Again, seed: int = 7) -> None:
    """What has been decoded comes back once more, unchanged but for rounding."""
    exact = came_back.double()
    lost = (round_trip(codec, came_back, seed).double() - exact).abs()
    off = lost > again.relative * exact.abs() + again.absolute
    assert not off.any(), f"{int(off.sum())} numbers of {off.numel()} change when sent again"


def _check_rows_are_independent(codec: Codec, rows: Tensor, came_back: Tensor) -> None:
    alone = [round_trip(codec, row[None]) for row in rows]
    assert torch.equal(came_back, torch.cat(alone)), "a row depends on others"


def _check_cuts(codec: Codec, rows: Tensor, came_back: Tensor) -> None:
    size = codec.block_size
    if size is None or rows.shape[1] <= size:
        return
    middle = rows.shape[1] // size // 2 * size
    parts = [round_trip(codec, part.contiguous()) for part in rows.tensor_split([middle], 1)]
    assert torch.equal(came_back, torch.cat(parts, 1)), "a cut between blocks changed numbers"


def _check_sums(codec: Codec, rows: Tensor) -> None:
    """The sum of all rows' bytes, as fp32 numbers, decodes to that of what comes back."""
    wire = encoded(codec, rows)
    numbers = field(wire, torch.float32, 0, wire.shape[1] // 4)
    total = reduce(torch.add, numbers.split(1))
    came_back = decoded(codec, total.view(torch.uint8), rows.shape[1])
    expected = reduce(torch.add, decoded(codec, wire, rows.shape[1]).split(1))
    slack = 1e-6 * float(rows.abs().max()) if rows.numel() else 0.0
    torch.testing.assert_close(came_back, expected, rtol=1e-5, atol=slack, msg="do not add up")


def relative_error(codec: Codec, rows: Tensor, seed: int = 7) -> Tensor:
    """|C(x) - x|^2 / |x|^2 of each row, in fp64; 0 where x is 0."""
    exact = rows.double()
    lost = (round_trip(codec, rows, seed).double() - exact).square().sum(1)
    return lost / exact.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)


def check_contracts(codec: Codec, rows: Tensor) -> None:
    """What is lost is never more than what there was, and of random numbers less."""
    assert (relative_error(codec, rows) <= 1.0 + 1e-6).all()
    if rows.numel():
        ordinary = torch.randn(2, rows.shape[1], generator=torch.Generator().manual_seed(1))
        assert (relative_error(codec, ordinary) < 1.0).all(), "nothing of it comes back"


def check_is_unbiased(codec: Codec, rows: Tensor, num_draws: int = 400) -> None:
    """The mean of many draws lies within five standard errors of every number."""
    draws = torch.stack([round_trip(codec, rows, seed) for seed in range(num_draws)]).double()
    error = draws.std(0) / num_draws**0.5
    slack = 5 * error + 1e-6 * rows.abs()
    off = (draws.mean(0) - rows.double()).abs() > slack
    assert not off.any(), f"{int(off.sum())} of {off.numel()} numbers are off"
