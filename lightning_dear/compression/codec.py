"""What a compressor is, and a codec: rows of numbers to rows of bytes, and back.

An exchange cuts a bucket into one row for each rank, or host, and sends each row's bytes there; a
codec knows nothing of that, nor of what was lost before. To write one, see docs/write-a-codec.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor
from typing_extensions import Self, override

# `error_feedback` is an option of compressors.
from lightning_dear.compression import error_feedback as feedback

Kind = Literal["contractive", "unbiased", "vote"]
"""What is true of what comes back, C(x), of an x that is sent.

contractive: |C(x) - x|^2 <= (1 - d) |x|^2 for a d > 0. What is lost is kept and added to the next
gradient (error feedback), so that nothing is lost for good.
unbiased: E[C(x)] = x. Nothing is kept: with feedback it would diverge.
vote: only the sign of each number travels, and the majority's sign comes back; with halves="reduce"
the mean of the signs.
"""

Lag = Literal["small", "unbounded"]
"""How far replicas stay behind the owner's parameters if differences are encoded, which is what
gather="parameters" does: about 1 % of the weights' norm or less, or so far that it is refused."""

Randomness = Literal["none", "private", "shared", "turns"]
"""Which generator a codec is given.

none: None.
private: One of each rank's own.
shared: One in the same state on all ranks, in `encode` and in the `decode` that belongs to it.
turns: As shared, and the same in both halves of a step. Its initial seed is one more in each step,
so that whoever draws places can go through all of them in turn.
"""

HALVES = ("both", "reduce")
"""Names of what may be encoded: both halves of an exchange, or the first one."""

WIRE_ALIGNMENT = 4
"""Rows of bytes are multiples of this many, so that fp32 fields can be views of them."""


@dataclass(frozen=True)
class Setting:
    """Describes what a compressor is used beside: the options that matter to it.

    Attributes:
        gather: "parameters": each rank steps its shard, and the new values are gathered.
            "gradients": the mean gradient is gathered, and each rank steps whole tensors.
        decouple: False: no bucket is gathered, all are all-reduced during backward instead.
    """

    gather: str = "parameters"
    decouple: bool = True

    @cached_property
    def is_of_gradients(self) -> bool:
        """Tells whether each rank steps whole tensors, with a state of its own for all of them."""
        return self.gather == "gradients"


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Says what is sent instead of gradients. A frozen dataclass; its fields are options.

    Args:
        error_feedback: Whether what is lost is added to the next gradient; None: as `kind` asks
            for, which is True for contractive compressors only. False: what these lose is lost.

    Attributes:
        name: In the table of compressors.
        brings_momentum: Whether momentum is kept for it, so that the optimizer must have none.
        takes_weight_decay: Whether weight decay that the optimizer adds to what has arrived has as
            much effect, beside gradients, as under SGD with that momentum.
        overflows: What else than inf counts as inf, and what to do about it; a sentence, or empty.
        all_reduces: Whether every rank gets the whole mean in backward, and nothing is gathered.
        halves: What is compressed: "both" halves of an exchange, or the "reduce" half alone.
        lag: See `Lag`; what is true where nothing else is known.
        is_identity: Whether everything travels as it is: only `Fp32`, and what is like it.
        is_scattered: Whether each rank sums a part of a bucket, and whole means are of all of them.
        has_density: Whether it sends a few of many numbers, as `at_density` says.
        randomness: See `Randomness`; of codecs.

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    name: ClassVar[str]
    all_reduces: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    is_scattered: ClassVar[bool] = False
    has_density: ClassVar[bool] = False
    overflows: ClassVar[str] = ""
    randomness: ClassVar[Randomness] = "none"
    lag: ClassVar[Lag] = "unbounded"

    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        """Check what all have in common; subclasses call it first."""
        if not isinstance(getattr(self, "name", None), str):
            raise ValueError(f"{type(self).__name__} has no name: add name: ClassVar[str] = '...'.")
        for one in fields(self):
            value = getattr(self, one.name)
            # Not isinstance, by which a bool is a number. A string, as from a command line,
            # would else fail in a comparison that names no option.
            if type(one.default) in (int, float) and not isinstance(value, (int, float)):
                raise ValueError(f"{one.name} of {self.name} must be a number, got {value!r}.")
        for what, names in ("kind", Kind), ("lag", Lag), ("randomness", Randomness):
            self._check_name(what, get_args(names))
        self._check_name("halves", HALVES)
        if self.error_feedback and self.kind != "contractive":
            raise ValueError(
                f"{self.name} is {self.kind}: error feedback diverges with such a codec. Leave"
                " error_feedback out."
            )

    def _check_name(self, what: str, names: Sequence[str]) -> None:
        if (value := getattr(self, what)) not in names:
            raise ValueError(
                f"Unknown {what} {value!r} of {self.name}; valid names: {', '.join(names)}."
            )

    def _check_count(self, what: str) -> None:
        count = getattr(self, what)
        # True is an int.
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{what} of {self.name} must be an integer >= 1, got {count!r}.")

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Says what is true of what comes back: see `Kind`."""

    @property
    def votes(self) -> bool:
        """Tells whether the majority's signs come back, which add up to nothing."""
        return self.kind == "vote"

    @property
    def brings_momentum(self) -> bool:
        """See the class."""
        return False

    @property
    def takes_weight_decay(self) -> bool:
        """See the class."""
        # Velocity adds up to 1 / (1 - momentum) times a gradient; decay outside it does not.
        return not self.brings_momentum

    @property
    def encodes_once(self) -> bool:
        """Tells whether means that came back cannot be encoded again, with what is added."""
        # Votes, momentum and regions are of each rank's own gradients.
        return self.votes or self.brings_momentum or self.is_scattered

    @property
    def has_feedback(self) -> bool:
        """Tells whether what is lost is kept."""
        return self.kind == "contractive" if self.error_feedback is None else self.error_feedback

    @property
    def halves(self) -> str:
        """See the class."""
        return "both"

    def at_density(self, density: float) -> Self:
        """Returns the same with another density in (0, 1]; itself where it has none."""
        return self

    @abstractmethod
    def check_with(self, setting: Setting) -> None:
        """Refuses what cannot be done beside it, or would have no effect.

        Raises:
            ValueError: Saying what to set or to leave out.
        """

    def worker_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns what a rank keeps of what it encodes: its gradients, or a part of its host's."""
        return self.owner_memory(numel, device)

    def owner_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns what an owner keeps of the mean, which it encodes for everybody."""
        is_kept = self.has_feedback and not self.is_identity
        kind = feedback.Residual if is_kept else feedback.Memory
        return kind(numel, device)

    def _check_gathers_gradients(self, setting: Setting, sends: str) -> None:
        """For those of which every rank, or an owner, has means alone."""
        if not setting.is_of_gradients:
            raise ValueError(f"{self.name} {sends}: set gather='gradients', or leave gather out.")


@dataclass(frozen=True, kw_only=True)
class FewOfMany(Compressor):
    """Sends k = max(1, ceil(density numel)) of some numbers; none of none.

    Args:
        density: Share of the numbers that travel, in (0, 1].

    Raises:
        ValueError: For another one.
    """

    has_density: ClassVar[bool] = True

    density: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}.")

    def entries(self, numel: int) -> int:
        """Returns how many of `numel` numbers travel (k)."""
        # 0.07 * 100 is a little more than 7 in floating point.
        return max(1, math.ceil(round(self.density * numel, 6))) if numel else 0

    @override
    def at_density(self, density: float) -> Self:
        """Returns the same compressor with another density in (0, 1]."""
        return replace(self, density=density)


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """Encodes rows of fp32 numbers into rows of bytes, and decodes them: C(x) = decode(encode(x)).

    Every row is encoded for itself: its bytes depend on its numbers, and on the generator, alone.
    Their count depends on the number of elements alone, so that nobody has to be told. Nothing here
    waits for a device.

    Args:
        halves: What is encoded; the other half travels as it is.
        error_feedback: See `Compressor`.

    Attributes:
        is_summable: Whether rows of bytes are rows of fp32 numbers, and decode(a + b) is decode(a)
            + decode(b) with the same generator. Then a reduce-scatter sums what ranks send, and the
            sum is decoded. False is right for any codec: what each rank sends is decoded, and that
            is summed.
        largest: What larger numbers are clipped to. Under a loss scale they count as inf, so that
            it becomes smaller. Without one twice that does, with feedback: what is left of a number
            must fit into the next step, or one spike would be sent for many.
        block_size: Elements that share statistics. A row that is cut at multiples of it decodes to
            the same numbers. None: the whole row.
        wire_dtype: Of the numbers that a row of bytes begins with, if they are what it decodes to,
            nan included; else None.

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    brings_momentum: ClassVar[bool] = False
    is_summable: ClassVar[bool] = False
    largest: ClassVar[float] = math.inf
    wire_dtype: ClassVar[torch.dtype | None] = None

    halves: str = "both"

    @property
    def block_size(self) -> int | None:
        """See the class; 1 where each number is encoded for itself."""
        return None

    @override
    def check_with(self, setting: Setting) -> None:
        for numel in range(1, 65):
            nbytes = self.wire_bytes(numel)
            if not isinstance(nbytes, int) or nbytes % WIRE_ALIGNMENT:
                raise ValueError(
                    f"wire_bytes({numel}) of {self.name} is {nbytes!r}, no multiple of"
                    f" {WIRE_ALIGNMENT}: return padded_bytes(...), from {__name__}."
                )
        # Bytes of most codecs do not add up, so that no all-reduce can sum them.
        if not setting.decouple:
            raise ValueError(
                f"decouple=False all-reduces gradients, and {self.name} encodes each part for its"
                " owner alone. Leave out one of them."
            )
        # What replicas are behind by is what ranks compute a wrong gradient for.
        if not setting.is_of_gradients and self.halves == "both" and self.lag != "small":
            raise ValueError(
                f"gather='parameters' sends differences of parameters, and with {self.name} ranks"
                " would fall far behind their owners: set gather='gradients', or halves='reduce' in"
                " the compressor, which gathers parameters as they are."
            )

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the bytes of a row of `numel` elements, as `padded_bytes`; 0 for none."""

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
    """Returns `nbytes`, rounded up to a multiple of `WIRE_ALIGNMENT`."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def field(wire: Tensor, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """Returns the numbers that lie side by side in rows of bytes; a view, if there are any.

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
