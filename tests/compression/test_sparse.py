"""Top-k, random-k and DGC."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression.codec import Codec, field
from lightning_dear.compression.sparse import DGC, RandomK, TopK
from tests.compression.battery import (
    decoded,
    encoded,
    relative_error,
    round_trip,
)
from tests.compression.formulas import num_entries
from tests.compression.inputs import SIZES, normal, rows
from tests.compression.properties import DENSITIES, SELECTORS

densities = st.sampled_from(DENSITIES)


@settings(max_examples=60)
@given(rows(), densities)
def test_exact_topk_keeps_its_share(some: Tensor, density: float) -> None:
    """|C(x) - x|^2 <= (1 - k / numel) |x|^2, and nothing that was lost exceeds what was sent."""
    numel = some.shape[1]
    if not numel:
        return
    k = num_entries(density, numel)
    codec = TopK(density=density)
    assert (relative_error(codec, some) <= 1 - k / numel + 1e-12).all()
    came_back = round_trip(codec, some).abs()
    expected = some.abs().sort(1, descending=True).values[:, :k]
    assert torch.equal(came_back.sort(1, descending=True).values[:, :k], expected)


def test_topk_by_hand() -> None:
    row = torch.tensor([[-1.0, -5.0, 3.0, 0.0, -4.0]])
    codec = TopK(density=0.3)
    assert round_trip(codec, row).tolist() == [[0, -5, 0, 0, -4]]
    wire = encoded(codec, row)
    assert sorted(field(wire, torch.float32, 0, 2)[0].tolist()) == [-5, -4]
    assert sorted(field(wire, torch.int32, 8, 2)[0].tolist()) == [1, 4]


def test_places_that_coincide_are_summed() -> None:
    wire = torch.zeros(1, 24, dtype=torch.uint8)
    field(wire, torch.float32, 0, 3).copy_(torch.tensor([1.0, 2.0, -4.0]))
    field(wire, torch.int32, 12, 3).copy_(torch.tensor([4, 4, 1]))
    assert decoded(TopK(), wire, 6).tolist() == [[0, -4, 0, 0, 3, 0]]


def test_empty_slots_hold_zeros() -> None:
    """Also where place 0, which they name, is sent."""
    row = torch.zeros(1, 100)
    row[0, 0] = 7.0
    wire = encoded(TopK(density=0.05, selector="sampled"), row)
    assert field(wire, torch.float32, 0, 5).tolist() == [[7, 0, 0, 0, 0]]
    assert field(wire, torch.int32, 20, 5).tolist() == [[0, 0, 0, 0, 0]]


@settings(max_examples=60)
@given(rows(), st.sampled_from(SELECTORS), st.sampled_from([torch.bool, torch.uint8]))
def test_sent_mask_is_what_arrives(some: Tensor, selector: str, dtype: torch.dtype) -> None:
    codec = DGC(density=0.1, selector=selector)
    wire = encoded(codec, some)
    mask = torch.ones_like(some, dtype=dtype)
    codec.sent_mask(wire, mask)
    assert torch.equal(mask, (decoded(codec, wire, some.shape[1]) != 0).to(dtype))


def test_sent_mask_by_hand() -> None:
    """Place 0 is sent, and named by empty slots; a zero that fills a slot is not sent."""
    row = torch.tensor([[3.0, 0.0, 0.0, -2.0, 0.0, 0.0]])
    for selector in SELECTORS:
        codec = DGC(density=0.6, selector=selector)
        mask = torch.ones(1, 6, dtype=torch.bool)
        codec.sent_mask(encoded(codec, row), mask)
        assert mask.tolist() == [[True, False, False, True, False, False]]


@settings(max_examples=40)
@given(st.sampled_from(SIZES), densities, st.integers(0, 1000))
def test_randomk_draws_one_number_of_each_stratum(numel: int, density: float, seed: int) -> None:
    codec = RandomK(density=density)
    chosen = round_trip(codec, torch.ones(3, numel), seed)
    k = num_entries(density, numel)
    assert torch.equal(chosen, chosen[:1].expand(3, numel)), "rows got different places"
    for i in range(k):
        assert chosen[0, i * numel // k : (i + 1) * numel // k].sum() == 1


def test_randomk_draws_alike_on_all_devices() -> None:
    row, drawn = torch.arange(1.0, 1001.0).view(1, -1), []
    codec = RandomK(density=0.1)
    for device in ("cpu", "cuda"):
        wire = torch.empty(1, codec.wire_bytes(1000), dtype=torch.uint8)
        generator: Any = SimpleNamespace(initial_seed=lambda: 7, device=torch.device(device))
        codec.encode(row, wire, generator)
        drawn.append(wire)
    assert torch.equal(*drawn)


def test_randomk_covers_all_places() -> None:
    codec = RandomK(density=0.1)
    drawn = torch.stack([round_trip(codec, torch.ones(1, 65), seed) for seed in range(300)])
    counts = drawn.sum(0)[0]
    # 7 strata of 9 or 10: 30 to 33 of 300 draws each, give or take 5.4.
    assert counts.min() >= 8
    assert counts.max() <= 60


def test_randomk_keeps_its_share_on_average() -> None:
    """E|C(x) - x|^2 = (1 - k / numel) |x|^2, where k divides numel."""
    some = normal(torch.Generator().manual_seed(4), 1, 100)
    errors = torch.cat([relative_error(RandomK(density=0.1), some, seed) for seed in range(400)])
    assert abs(errors.mean() - 0.9) <= 5 * errors.std() / 20


@pytest.mark.parametrize("numel", [1, 7, 65, 1000])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 0.5, 1.0])
def test_every_number_has_its_turn(density: float, numel: int) -> None:
    """In rounds of ceil(numel / k) steps all of them, and in another order in each round."""
    codec, first = RandomK(density=density), 2**55 + 12345
    longest = -(-numel // codec.entries(numel))
    begin = -first % longest
    sent = torch.cat(
        [
            round_trip(codec, torch.ones(1, numel), first + begin + step)
            for step in range(6 * longest)
        ]
    )
    rounds = sent.split(longest)
    # A stratum that is one number shorter than the longest gives one of them twice.
    assert all(bool((one.sum(0) >= 1).all()) and one.sum(0).max() <= 2 for one in rounds)
    if numel % codec.entries(numel) == 0:
        assert all(bool((one.sum(0) == 1).all()) for one in rounds)
    for place in range(numel):
        gaps = sent[:, place].nonzero()[:, 0].diff()
        assert gaps.numel() == 0 or int(gaps.max()) <= 2 * longest - 1
    if longest > 5 and numel > 500:
        assert not any(map(torch.equal, rounds[:-1], rounds[1:]))


def test_randomk_leaves_the_generator_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    before, codec = generator.get_state(), RandomK()
    codec.encode(torch.ones(1, 4), torch.empty(1, 4, dtype=torch.uint8), generator)
    assert torch.equal(generator.get_state(), before)


def test_randomk_asks_for_a_generator() -> None:
    with pytest.raises(ValueError, match="needs a generator"):
        RandomK().encode(torch.ones(1, 4), torch.empty(1, 4, dtype=torch.uint8))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
def test_wire_bytes(numel: int, density: float) -> None:
    k = num_entries(density, numel)
    assert TopK(density=density).wire_bytes(numel) == 8 * k
    assert DGC(density=density).wire_bytes(numel) == 8 * k
    assert RandomK(density=density).wire_bytes(numel) == 4 * k


def test_the_share_of_a_hundred_is_counted_in_decimals() -> None:
    assert TopK(density=0.07).entries(100) == 7
    assert TopK(density=0.0701).entries(100) == 8


def test_compression_ratios() -> None:
    numel = 10**6
    assert 4 * numel / TopK(density=0.01).wire_bytes(numel) == 50
    assert 4 * numel / DGC(density=0.01).wire_bytes(numel) == 50
    assert 4 * numel / RandomK(density=0.01).wire_bytes(numel) == 100


def test_at_density_keeps_the_other_options() -> None:
    codec = DGC(momentum=0.5, selector="exact", halves="reduce")
    other = codec.at_density(0.25)
    assert other == DGC(
        density=0.25,
        momentum=0.5,
        selector="exact",
        halves="reduce",
    )
    assert codec.density == 0.001
    with pytest.raises(ValueError, match="density"):
        codec.at_density(2.0)


def test_kinds() -> None:
    for codec in (TopK(), DGC(), RandomK()):
        assert codec.kind == "contractive"
        assert codec.has_feedback
        assert codec.block_size is None


@pytest.mark.parametrize("codec", [TopK, DGC, RandomK])
@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, math.nan])
def test_densities_are_checked(codec: type[Codec], density: float) -> None:
    with pytest.raises(ValueError, match=r"density of \w+ must be in \(0, 1\]"):
        codec(density=density)


@pytest.mark.parametrize(
    ("codec", "options", "match"),
    [
        (TopK, {"selector": "best"}, "exact, sampled"),
        (DGC, {"momentum": 1.0}, r"momentum of dgc must be in \[0, 1\)"),
        (DGC, {"momentum": -0.1}, r"momentum of dgc must be in \[0, 1\)"),
        (TopK, {"halves": "none"}, "Unknown halves"),
        (RandomK, {"decay": 1.1}, r"decay of randomk must be in \[0, 1\]"),
        (RandomK, {"decay": 0.5, "error_feedback": False}, "decay of randomk has no effect"),
    ],
)
def test_other_options_are_checked(codec: type[Codec], options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        codec(**options)
