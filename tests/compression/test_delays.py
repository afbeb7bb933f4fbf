"""How long numbers of a gradient that stays wait for their turn: by |g| / mean|g|."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import (
    COMPRESSORS,
    DGC,
    Codec,
    Gaussiank,
    GTopk,
    Int4,
    Int8,
    OkTopk,
    SparseAllReduce,
    TopK,
    TopkA,
    TopkDSA,
    resolve_compressor,
)
from lightning_dear.compression.error_feedback import Encoded, Memory
from lightning_dear.compression.selectors import SELECTORS, LocalThreshold
from lightning_dear.exchange.sparse.entries import Entries, new_unsent

NUMEL = 2000
CPU = torch.device("cpu")

GRADIENTS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda generator: torch.randn(NUMEL, generator=generator),
    "heavy-tailed": lambda generator: torch.randn(NUMEL, generator=generator) ** 3,
    "all of one size": lambda generator: torch.randn(NUMEL, generator=generator).sign(),
}

CODECS: tuple[TopK, ...] = (
    *(TopK(selector=one) for one in SELECTORS),
    *(DGC(selector=one) for one in SELECTORS),
)
SPARSE: tuple[SparseAllReduce, ...] = (
    TopkA(),
    TopkDSA(),
    GTopk(),
    OkTopk(),
    OkTopk(mode="static"),
    Gaussiank(),
)


def _sent(codec: Codec, memory: Memory, gradient: Tensor) -> Tensor:
    """One step's numbers of what `memory` has gathered, 0 where none is sent."""
    row = gradient[None].clone()
    memory.compensate(row, None)
    wire = torch.empty((1, codec.wire_bytes(len(gradient))), dtype=torch.uint8)
    codec.encode(row, wire)
    memory.note_sent(row, wire, Encoded(codec), None)
    memory.commit()
    codec.decode(wire, row)
    return row[0]


def _sent_by(codec: Codec, gradient: Tensor, num_steps: int) -> list[Tensor]:
    memory = codec.worker_memory(len(gradient), CPU)
    return [_sent(codec, memory, gradient) for _ in range(num_steps)]


def _selected_by(codec: SparseAllReduce, gradient: Tensor, num_steps: int) -> list[Tensor]:
    """Where all that a rank selects arrives."""
    unsent, threshold = new_unsent(codec, len(gradient), CPU), LocalThreshold()
    k, steps = codec.entries(len(gradient)), []
    for step in range(num_steps):
        waiting = unsent.accumulate(gradient, None)
        found = Entries(*codec.find(waiting, k, threshold, step)).largest(codec.caps(k, 2)[0])
        steps.append(torch.zeros_like(gradient).index_copy_(0, found.places, found.numbers))
        waiting.index_fill_(0, found.places, 0.0)
        unsent.commit()
        threshold.commit()
    return steps


def _longest(steps: list[Tensor]) -> Tensor:
    """Most steps for which each number has waited, those at the end among them."""
    last, longest = torch.zeros(len(steps[0])), torch.zeros(len(steps[0]))
    for number, sent in enumerate([*steps, torch.ones_like(steps[0])], start=1):
        longest = torch.where(sent != 0, longest.maximum(number - last), longest)
        last[sent != 0] = number
    return longest


def _law(gradient: Tensor, density: float) -> Tensor:
    """mean|g| / (density |g|)."""
    return gradient.abs().mean() / (density * gradient.abs())


@pytest.mark.parametrize("kind", GRADIENTS)
def test_numbers_wait_for_mean_over_density_times_size(kind: str) -> None:
    gradient, density = GRADIENTS[kind](torch.Generator().manual_seed(1)), 0.05
    num_steps, law = int(8 / density), _law(gradient, density)
    # Of those that wait still longer, the run is too short to tell.
    is_told = law < num_steps / 3
    for codec in (*CODECS, *SPARSE):
        made = codec.at_density(density)
        if isinstance(made, Codec):
            steps = _sent_by(made, gradient, num_steps)
        else:
            assert isinstance(made, SparseAllReduce)
            steps = _selected_by(made, gradient, num_steps)
        waited = _longest(steps)
        # A threshold of a normal distribution may leave a few of k.
        factor = 6.0 if isinstance(made, Gaussiank) else 1.25
        # Of DGC 1 / (1 - momentum) more; selections by samples are now and then late.
        assert bool((waited <= factor * law + 12)[is_told].all()), (made, kind)
        if factor < 2:
            ratio = (waited / law)[is_told & (law > 15)]
            # What goes often has little momentum then, so that the others' threshold is lower.
            least = 0.4 if isinstance(made, DGC) else 0.6
            assert least <= float(ratio.median()) <= 1.3, (made, kind)


def test_of_the_exact_ones_none_waits_two_steps_longer() -> None:
    for make in GRADIENTS.values():
        gradient = make(torch.Generator().manual_seed(2))
        waited = _longest(_sent_by(TopK(density=0.05), gradient, 160))
        law = _law(gradient, 0.05)
        assert bool((waited <= law + 2)[law < 50].all())


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda one: one.name)
def test_what_rounds_to_zero_waits_for_less_than_a_scale(codec: Int8 | Int4) -> None:
    """s / |g| steps, s being the scale of a block."""
    gradient = torch.logspace(-4, -1, 32)
    gradient[0] = 1.0
    waited = _longest(_sent_by(codec, gradient, 600))
    # The largest is sent nearly in whole, so that the scale stays what it is.
    law = 1.01 / codec._levels / gradient
    assert bool((waited <= law + 1)[law < 200].all())
    assert float((waited / law)[(law > 20) & (law < 200)].median()) > 0.4


def test_all_that_select_are_looked_at() -> None:
    known = [one for one in map(resolve_compressor, COMPRESSORS) if one is not None]
    selecting = {one.name for one in known if one.has_density} - {"randomk"}
    assert selecting == {one.name for one in (*CODECS, *SPARSE)}
