"""What a codec is: rows of numbers to rows of bytes, and back.

An exchange cuts a bucket into one row for each rank and sends each row's bytes to its rank; a codec
knows nothing of that, nor of what was lost before. To write one, see docs/write-a-codec.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

Kind = Literal["contractive", "unbiased", "vote"]
"""What is true of decode(encode(x)) = C(x).

contractive: |C(x) - x|^2 <= (1 - d) |x|^2 for a d > 0. What is lost is kept and added to the next
gradient (error feedback), so that nothing is lost for good.
unbiased: E[C(x)] = x. Nothing is kept: with feedback it would diverge.
vote: only the sign of each number travels, and the majority's sign comes back.
"""

Randomness = Literal["none", "private", "shared"]
"""Which generator a codec is given: none, one of each rank's own, or one in the same state on all
ranks, in `encode` and in the `decode` that belongs to it."""

Lag = Literal["small", "large", "unbounded"]
"""How far replicas stay behind the owner's parameters if differences are encoded, which is what
gather="parameters" does: about 1 % of the weights' norm or less, more, or ever more."""

HALVES = ("both", "reduce", "gather")
"""Names of what may be encoded: both halves of an exchange, or one of them."""

WIRE_ALIGNMENT = 4
"""Rows of bytes are multiples of this many, so that fp32 fields can be views of them."""


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Encodes rows of fp32 numbers into rows of bytes, and decodes them.

    A frozen dataclass, whose fields are its options. Every row is encoded for itself: its bytes
    depend on its numbers, and on the generator, alone. Their count depends on the number of
    elements alone, so that nobody has to be told. Nothing here waits for a device.

    Args:
        halves: What is encoded; the other half travels as it is.
        error_feedback: Whether what encoding loses is added to the next gradient; None: as `kind`
            asks for, which is True for contractive codecs only.
        allow_biased: Lets a contractive codec go without feedback, so that what is lost is lost.
        allow_lag: Lets gather="parameters" encode differences with a codec whose `lag` is large.

    Attributes:
        name: In the table of compressors.
        randomness: See `Randomness`.
        brings_momentum: Whether momentum is kept for it, so that the optimizer must have none.
        lag: See `Lag`.
        block_size: Elements that share statistics. A row that is cut at multiples of it decodes to
            the same numbers. None: the whole row.

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    name: ClassVar[str]
    randomness: ClassVar[Randomness] = "none"
    brings_momentum: ClassVar[bool] = False

    halves: str = "both"
    error_feedback: bool | None = None
    allow_biased: bool = False
    allow_lag: bool = False

    def __post_init__(self) -> None:
        """Check what all codecs have in common; subclasses call it first."""
        if self.halves not in HALVES:
            raise ValueError(f"Unknown halves {self.halves!r}; valid names: {', '.join(HALVES)}.")
        if self.error_feedback and self.kind != "contractive":
            raise ValueError(
                f"{self.name} is {self.kind}: error feedback diverges with such a codec. Leave"
                " error_feedback out."
            )
        if self.error_feedback is False and self.kind == "contractive" and not self.allow_biased:
            raise ValueError(
                f"{self.name} without error feedback loses a part of every gradient for good."
                " Leave error_feedback out, or set allow_biased=True if that is meant."
            )

        if self.brings_momentum and self.halves == "gather":
            raise ValueError(
                f"{self.name} keeps momentum of each rank's own gradients, which halves='gather'"
                " does not encode. Leave halves out."
            )

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What is true of what comes back: see `Kind`."""

    @property
    def lag(self) -> Lag:
        """See `Lag`; what is true of a codec of which nothing else is known."""
        return "unbounded"

    @property
    def block_size(self) -> int | None:
        """See the class; 1 where each number is encoded for itself."""
        return None

    @property
    def has_feedback(self) -> bool:
        """Whether what encoding loses is kept."""
        return self.kind == "contractive" if self.error_feedback is None else self.error_feedback

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements, a multiple of `WIRE_ALIGNMENT`; 0 for none."""

    @abstractmethod
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        """Write the bytes of `rows`.

        Args:
            rows: [R, numel] fp32, contiguous, finite; not mutated.
            wire: [R, wire_bytes(numel)] uint8, contiguous; overwritten, every byte of it.
            generator: Where `randomness` asks for one; advanced.
        """

    @abstractmethod
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """Write the numbers that `wire` stands for.

        Args:
            wire: As `encode` has filled it; not mutated.
            rows: [R, numel] fp32, contiguous; overwritten, every element of it.
            generator: For `randomness = "shared"`: in the state in which `encode` got it; advanced.
        """


def padded_bytes(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of `WIRE_ALIGNMENT`."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def field(wire: Tensor, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """The numbers that lie side by side in rows of bytes; a view, but of nothing a new tensor.

    Args:
        wire: [R, nbytes] uint8, as codecs get it.
        dtype: Of the numbers.
        begin: Their first byte; a multiple of their size.
        count: How many there are in a row.

    Returns:
        [R, count] of `dtype`.
    """
    if not count:
        return wire.new_empty((len(wire), 0), dtype=dtype)
    return wire[:, begin : begin + count * dtype.itemsize].view(dtype)
