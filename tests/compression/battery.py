"""What is true of every codec; each family's tests add what is true of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_dear.compression.codec import WIRE_ALIGNMENT, Codec, field
from lightning_dear.compression.error_feedback import Encoded, Residual


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


SMALLEST, LARGEST = 1e-20, 1e18
"""Rows whose largest number is not between them may be lost: formats have limits."""

GIVEN = "the rows given"


def check_contracts(codec: Codec, rows: Tensor, smallest: float = SMALLEST) -> None:
    """What the codec's `kind` says, of these rows and of others that are easily lost.

    Args:
        codec: Whatever it is.
        rows: [R, numel] fp32, finite.
        smallest: Rows without a larger number may be lost.
    """
    numel = rows.shape[1]
    if codec.kind == "contractive":
        check_losses(codec, rows, smallest)
    for what, some in {GIVEN: rows, **(easily_lost(numel) if numel else {})}.items():
        if codec.kind == "contractive" and what != GIVEN:
            # Of a row's energy its largest number has 1 / numel at least.
            check_losses(codec, some, smallest, 0.1 / numel, what)
        elif codec.kind == "unbiased":
            _check_means(codec, some[_are_in_range(codec, some, smallest)], what)
        elif codec.kind == "vote":
            _check_votes(codec, some, what)
    if codec.kind == "contractive" and not codec.is_identity:
        _check_feedback(codec)


def easily_lost(numel: int) -> dict[str, Tensor]:
    """What it is -> [R, numel]."""
    ordinary = torch.randn(2, numel, generator=torch.Generator().manual_seed(1))
    signs, lonely = ordinary.sign(), torch.zeros(4, numel)
    lonely[0, 0], lonely[1, numel // 2], lonely[2, -1], lonely[3, -1] = 1.0, -2.0, 3.0, -1e-3
    small_among_large, large_among_small = signs.clone(), 0.05 * signs
    small_among_large[:, numel // 3] *= 0.05
    large_among_small[:, -1] = 1.0
    return {
        "random numbers": ordinary,
        "a number among zeros": lonely,
        "a small number among large ones": small_among_large,
        "a large number among small ones": large_among_small,
        "a row of small numbers beside one of large ones": ordinary * torch.tensor([[1e3], [1e-3]]),
    }


def _are_in_range(codec: Codec, rows: Tensor, smallest: float) -> Tensor:
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.bool)
    largest = rows.abs().amax(1)
    return (largest > smallest) & (largest <= min(codec.largest, LARGEST))


def check_losses(
    codec: Codec,
    rows: Tensor,
    smallest: float = SMALLEST,
    least: float = 0.0,
    what: str = GIVEN,
) -> None:
    """|C(x) - x|^2 of contractive codecs is never more than |x|^2, and less in every row.

    With random numbers on average, and there a row may be lost in all draws.

    Args:
        codec: Contractive.
        rows: As for `check_contracts`.
        smallest: See there.
        least: Which share of |x|^2 has to arrive; 0: any.
        what: The rows are, for messages.
    """
    is_random = codec.randomness != "none"
    draws = torch.stack([relative_error(codec, rows, n) for n in range(64 if is_random else 1)])
    error = draws.mean(0) - (4 * draws.std(0) / 8 if is_random else 0.0)
    assert (error <= 1.0 + 1e-6).all(), (
        f"{codec.name}, {what}: |C(x) - x|^2 is {float(error.max()):.4g} |x|^2, and"
        " kind='contractive' says less than 1. Zeros beside large numbers must stay small: have a"
        " level for 0, or scale by the mean of a block."
    )
    lost = _are_in_range(codec, rows, smallest) & (error >= 1.0 - least)
    assert is_random or not lost.any(), (
        f"{codec.name}, {what}: nothing of it comes back of {int(lost.sum())} of {len(rows)} rows,"
        " where kind='contractive' says that at least the largest number does, roughly. Scale each"
        " row, or block, by its own largest number, not by that of all rows or a constant, and look"
        " at the last number of a row."
    )


def _check_feedback(codec: Codec, numel: int = 16, num_steps: int = 256) -> None:
    """With feedback everything arrives some time: what is left stays bounded."""
    gradients = torch.cat([*easily_lost(numel).values()])
    keeps = codec.owner_memory if codec.has_feedback else Residual
    memory = keeps(gradients.numel(), gradients.device)
    assert "residual" in memory.kept, (
        f"{codec.name} has feedback, and its owner_memory keeps no residual. Leave the method out."
    )
    arrived = torch.zeros_like(gradients, dtype=torch.float64)
    faded = torch.zeros_like(arrived)
    for step in range(num_steps):
        faded += (1 - memory.decay) * memory.kept["residual"].view_as(gradients).double()
        rows = gradients.clone()
        memory.compensate(rows, None)
        wire = encoded(codec, rows, step)
        arrived += decoded(codec, wire, numel, step)
        seed = None if codec.randomness == "none" else step
        memory.note_sent(rows, wire, Encoded(codec, seed), None)
        memory.commit()
    left = memory.kept["residual"].view_as(gradients).double() / memory.rate
    largest = gradients.abs().amax(1, keepdim=True)
    missing = num_steps * gradients.double() - arrived - faded - left
    off = missing.abs() > 1e-4 * num_steps * largest
    assert not off.any(), (
        f"{codec.name}: what has arrived and the residual do not add up to the gradients. decode"
        " must make the same numbers of the same bytes, with the same generator, whenever it is"
        " called."
    )
    # Where a share d of what is sent arrives it is at most (2 / d) |x|, and d is at least about
    # 1 / numel; four times that, for random numbers.
    most = 8 * numel * gradients.double().norm(dim=1)
    assert (left.norm(dim=1) <= most).all(), (
        f"{codec.name}: after {num_steps} steps of the same gradients a row's residual is as large"
        f" as {float((left.norm(dim=1) / gradients.norm(dim=1)).max()):.0f} of them. Some of its"
        " numbers are never sent: scale each row, or block, by its own numbers, and give every"
        " place its turn."
    )


def _check_means(codec: Codec, rows: Tensor, what: str, num_draws: int = 400) -> None:
    """The mean of many draws is x: of each row, and of its numbers of each size."""
    if not len(rows):
        return
    draws = torch.stack([round_trip(codec, rows, seed) for seed in range(num_draws)]).double()
    exact, sizes = rows.double(), rows.double().abs()
    octaves = (sizes / sizes.amax(1, keepdim=True)).log2().clamp(min=-30).div(2).floor()
    for octave in octaves.unique().tolist():
        for row, is_meant in enumerate(octaves == octave):
            total = float(sizes[row, is_meant].sum())
            # A number of which too few draws are other than 0 says nothing.
            if total * num_draws < 50 * float(sizes[row].norm()):
                continue
            sums = (draws[:, row, is_meant] * exact[row, is_meant].sign()).sum(1)
            mean, slack = float(sums.mean()), 6 * float(sums.std()) / num_draws**0.5
            assert abs(mean - total) <= slack + 1e-5 * total, (
                f"{codec.name}, {what}: numbers whose mean size is"
                f" {total / int(is_meant.sum()):.3g} come back as {mean / int(is_meant.sum()):.3g}"
                f" on average of {num_draws} draws, and kind='unbiased' says that they come back as"
                " they are. Round up with the probability of what rounding down takes away, or set"
                " kind='contractive', so that what is lost is kept and sent later."
            )


def _check_votes(codec: Codec, rows: Tensor, what: str) -> None:
    wrong = (round_trip(codec, rows) != rows.sign()) & (rows != 0)
    assert not wrong.any(), (
        f"{codec.name}, {what}: {int(wrong.sum())} numbers do not come back as their sign, -1 or"
        " +1, which kind='vote' says. Send signs alone."
    )


def check_is_unbiased(codec: Codec, rows: Tensor, num_draws: int = 400) -> None:
    """The mean of many draws lies within five standard errors of every number."""
    draws = torch.stack([round_trip(codec, rows, seed) for seed in range(num_draws)]).double()
    error = draws.std(0) / num_draws**0.5
    slack = 5 * error + 1e-6 * rows.abs()
    off = (draws.mean(0) - rows.double()).abs() > slack
    assert not off.any(), f"{int(off.sum())} of {off.numel()} numbers are off"
