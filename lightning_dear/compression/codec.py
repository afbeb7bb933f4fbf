"""What a codec is: rows of numbers to rows of bytes, and back.

An exchange cuts a bucket into one row for each rank and sends each row's bytes to its rank; a codec
knows nothing of that, nor of what was lost before. To write one, see docs/write-a-codec.md.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.compressor import Compressor, Setting

Randomness = Literal["none", "private", "shared"]
"""Which generator a codec is given: none, one of each rank's own, or one in the same state on all
ranks, in `encode` and in the `decode` that belongs to it."""

HALVES = ("both", "reduce", "gather")
"""Names of what may be encoded: both halves of an exchange, or one of them."""

WIRE_ALIGNMENT = 4
"""Rows of bytes are multiples of this many, so that fp32 fields can be views of them."""


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """Encodes rows of fp32 numbers into rows of bytes, and decodes them: C(x) = decode(encode(x)).

    Every row is encoded for itself: its bytes depend on its numbers, and on the generator, alone.
    Their count depends on the number of elements alone, so that nobody has to be told. Nothing here
    waits for a device.

    Args:
        halves: What is encoded; the other half travels as it is.
        error_feedback: See `Compressor`.
        allow_biased: See `Compressor`.
        allow_lag: Lets gather="parameters" encode differences with a codec whose `lag` is large.

    Attributes:
        randomness: See `Randomness`.
        is_summable: Whether rows of bytes are rows of fp32 numbers, and decode(a + b) is decode(a)
            + decode(b) with the same generator. Then a reduce-scatter sums what ranks send, and the
            sum is decoded. False is right for any codec: what each rank sends is decoded, and that
            is summed.
        largest: What larger numbers are clipped to. Under a loss scale they count as inf, so that
            it becomes smaller.
        block_size: Elements that share statistics. A row that is cut at multiples of it decodes to
            the same numbers. None: the whole row.
        clip_norm: Largest 2-norm of a rank's own gradient of a tensor; None: any.

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    randomness: ClassVar[Randomness] = "none"
    is_summable: ClassVar[bool] = False
    largest: ClassVar[float] = math.inf

    halves: str = "both"
    allow_lag: bool = False

    @override
    def __post_init__(self) -> None:
        if self.halves not in HALVES:
            raise ValueError(f"Unknown halves {self.halves!r}; valid names: {', '.join(HALVES)}.")
        super().__post_init__()
        if self.brings_momentum and self.halves == "gather":
            raise ValueError(
                f"{self.name} keeps momentum of each rank's own gradients, which halves='gather'"
                " does not encode. Leave halves out."
            )

    @property
    def block_size(self) -> int | None:
        """See the class; 1 where each number is encoded for itself."""
        return None

    @property
    def clip_norm(self) -> float | None:
        """See the class."""
        return None

    def encodes(self, half: str) -> bool:
        """Whether the "reduce" or the "gather" half is encoded."""
        return self.halves in ("both", half)

    @override
    def check_with(self, setting: Setting) -> None:
        # Bytes of most codecs do not add up, so that no all-reduce can sum them.
        if not setting.decouple:
            raise ValueError(
                f"decouple=False all-reduces gradients, and {self.name} encodes each part for its"
                " owner alone. Leave out one of them."
            )
        if not setting.is_of_gradients and self.clip_norm is not None:
            raise ValueError(
                f"clip_norm of {self.name} clips whole tensors, and gather='parameters' cuts them:"
                " set gather='gradients', or leave clip_norm out."
            )
        if not setting.is_of_gradients and self.encodes("gather"):
            self._check_differences()
        elif self.allow_lag:
            raise ValueError(
                f"allow_lag of {self.name} has no effect here, where no differences of parameters"
                f" are encoded. Leave it out{self._or_denser()}."
            )

    def _check_differences(self) -> None:
        """Refuses to send differences of parameters where replicas would stay too far behind."""
        if self.lag == "small" and self.allow_lag:
            raise ValueError(
                f"allow_lag of {self.name} has no effect: its replicas are close behind in any"
                " case. Leave it out."
            )
        if self.halves == "gather":
            self._check_differences_alone()
        instead = (
            "set gather='gradients', or halves='reduce' in the compressor, which gathers parameters"
            f" as they are{' (both without allow_lag)' if self.allow_lag else ''}"
        )
        # What replicas are behind by is what ranks compute a wrong gradient for.
        if self.lag == "unbounded":
            raise ValueError(
                f"gather='parameters' sends differences of parameters, and with {self.name} as it"
                f" is set ranks would fall ever further behind their owners: {instead}"
                f"{self._or_denser()}."
            )
        if self.lag == "large" and not self.allow_lag:
            raise ValueError(
                f"gather='parameters' sends differences of parameters, and with {self.name} the"
                " weights that ranks compute with stay visibly behind those that their owners"
                f" step: {instead}, or allow_lag=True in it."
            )

    def _check_differences_alone(self) -> None:
        """The same where nothing else is encoded."""
        # What a difference does not bring is in the next one, without any residual.
        if not self.has_feedback and self.kind == "contractive":
            raise ValueError(
                f"error_feedback=False of {self.name} has no effect on differences of parameters,"
                " of which the next one has what this one does not bring. Leave it out."
            )

    def _or_denser(self) -> str:
        """What else to do, if differences could be encoded with more numbers in them."""
        return ""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Bytes of a row of `numel` elements, a multiple of `WIRE_ALIGNMENT`; 0 for none."""

    @abstractmethod
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        """Write the bytes of `rows`.

        Args:
            rows: [R, numel] fp32, contiguous; not mutated. There may be nan or inf in them: their
                step will be left out or refused, so that what is written does not matter, but
                neither this nor `decode` of it may raise.
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
    # torch views no empty rows of bytes as wider numbers: their stride is 1.
    if not count:
        return wire.new_empty((len(wire), 0), dtype=dtype)
    return wire[:, begin : begin + count * dtype.itemsize].view(dtype)
