"""Rows of numbers that codecs meet, and those that they should never meet but must survive."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 1024, 4097)
"""Around whole bytes, blocks and alignments."""

LARGEST = torch.finfo(torch.float32).max


def normal(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator)


def heavy_tailed(generator: torch.Generator, *size: int) -> Tensor:
    """A few numbers are a million times the others'."""
    return normal(generator, *size) * 10 ** (2 * normal(generator, *size))


def one_hot(generator: torch.Generator, *size: int) -> Tensor:
    rows = torch.zeros(size)
    if rows.numel():
        rows.view(-1)[torch.randint(rows.numel(), (1,), generator=generator)] = -3.0
    return rows


KINDS = {
    "normal": normal,
    "small": lambda g, *size: normal(g, *size) * 1e-6,
    "heavy-tailed": heavy_tailed,
    "one-hot": one_hot,
    "zero": lambda g, *size: torch.zeros(size),
    "minus zero": lambda g, *size: torch.full(size, -0.0),
    "constant": lambda g, *size: torch.full(size, 0.3),
    "negative": lambda g, *size: -normal(g, *size).abs(),
    "denormal": lambda g, *size: normal(g, *size) * 1e-39,
    "huge": lambda g, *size: (normal(g, *size) * 1e38).clamp(-LARGEST, LARGEST),
    "largest": lambda g, *size: torch.full(size, LARGEST),
}


@st.composite
def rows(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Tensor:
    """[R, numel] fp32: 1 to 3 rows of one kind."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = KINDS[draw(st.sampled_from(kinds))]
    return kind(generator, draw(st.integers(1, 3)), draw(st.sampled_from(SIZES)))
