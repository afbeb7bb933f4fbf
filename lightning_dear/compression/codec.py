"""Base classes of compressors: `Compressor`, and `Codec`, which encodes rows of fp32 values.

An exchange cuts a bucket into one row for each rank (or host), lets the codec encode every row into
bytes, and sends each row to its rank. A codec knows nothing of ranks or of earlier steps: exchanges
and `error_feedback` do the rest. docs/write-a-codec.md tells how to write one.
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

# `error_feedback` alone would be hidden by the option of this name in the classes below.
from lightning_dear.compression import error_feedback as feedback

Kind = Literal["contractive", "unbiased", "vote"]
"""What holds for C(x), the values that arrive when x is sent.

contractive: |C(x) - x|^2 <= (1 - d) |x|^2 for a d > 0. The error x - C(x) is kept and added to the
next gradient (error feedback), so that it arrives later.
unbiased: E[C(x)] = x. The error is not kept: error feedback would diverge.
vote: each rank sends only the sign of each element, and the sign of the majority comes back. With
halves="reduce" the mean of the signs comes back.
"""

Lag = Literal["small", "unbounded"]
"""How far replicas stay behind the owner's parameters with gather="parameters", where encoded
differences of parameters are sent. "small" means about 1 % of the weights' norm or less.
"unbounded" means more than that, so that the combination is refused."""

Randomness = Literal["none", "private", "shared", "turns"]
"""Which random generator `Codec.encode` and `Codec.decode` are given.

none: The generator is None.
private: `encode` is given a generator that differs from rank to rank.
shared: `encode`, and the `decode` of what it encoded, are given generators in the same state on all
ranks.
turns: The same as shared, and both halves of a step have the same state. The initial seed grows by
one from step to step, so that a codec that draws places can visit all of them in turn.
"""

HALVES = ("both", "reduce")
"""Values of the option `halves`: encode both halves of an exchange, or the reduce half alone."""

WIRE_ALIGNMENT = 4
"""The bytes of an encoded row are a multiple of this, so that fp32 fields can be views of them."""


@dataclass(frozen=True)
class Setting:
    """Options of the strategy that a compressor has to fit; see `Compressor.check_with`.

    Attributes:
        gather: "parameters" means that each rank steps its shard, and that the new parameters are
            gathered. "gradients" means that the mean gradient is gathered, and that each rank
            steps whole tensors.
        decouple: False means that all buckets are all-reduced during backward and none is gathered.
    """

    gather: str = "parameters"
    decouple: bool = True

    @cached_property
    def is_of_gradients(self) -> bool:
        """Tells whether each rank steps whole tensors, and so has the whole optimizer state."""
        return self.gather == "gradients"


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Base of all compressors: describes what is sent in place of gradients.

    A frozen dataclass whose fields are the user's options. It holds no tensors: what is kept from
    step to step is in the `Memory` objects that it makes. `Codec` is the base of compressors that
    encode row by row; others have an exchange of their own.

    Args:
        error_feedback: Whether the error of encoding is kept and added to the next gradient. None
            means True for contractive compressors and False for others. False means that a
            contractive compressor loses its errors for good. True is refused for others.

    Attributes:
        name: Name in the table of compressors and in messages.
        brings_momentum: Whether momentum is kept on the compressor's side, so that the optimizer
            must have none.
        takes_weight_decay: Whether weight decay that the optimizer adds to the gradients that
            arrive weighs as much against them as under SGD with momentum.
        overflows: Sentence for the overflow error, with a leading space: which finite values count
            as overflow, too, and what to do. Empty if only inf and nan do.
        all_reduces: Whether every rank gets the whole mean gradient in backward, so that nothing is
            gathered.
        halves: What is compressed: "both" halves of an exchange, or the "reduce" half alone.
        lag: See `Lag`. "unbounded" is safe for any compressor.
        is_identity: Whether values travel unchanged, as with `Fp32`.
        is_scattered: Whether each rank sums one region of a bucket, so that a whole mean gradient
            consists of the regions of all ranks.
        has_density: Whether only a share of the elements travels, which `at_density` can change.
        randomness: See `Randomness`. Used for codecs only.

    Raises:
        ValueError: If an option is out of its range, or excludes another one.
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
        """Checks the options that all compressors have; subclasses call this first."""
        if not isinstance(getattr(self, "name", None), str):
            raise ValueError(f"{type(self).__name__} has no name. Add name: ClassVar[str] = '...'.")
        for option in fields(self):
            value = getattr(self, option.name)
            # Not isinstance, which is true of bools, too. Without this check, a string from a
            # command line would fail later, in a comparison that does not name the option.
            if type(option.default) in (int, float) and not isinstance(value, (int, float)):
                raise ValueError(f"{option.name} of {self.name} must be a number, got {value!r}.")
        for what, names in ("kind", Kind), ("lag", Lag), ("randomness", Randomness):
            self._check_name(what, get_args(names))
        self._check_name("halves", HALVES)
        if self.error_feedback and self.kind != "contractive":
            raise ValueError(
                f"error_feedback=True does not fit {self.name}, as {self.name} is of kind"
                f" {self.kind!r}. Leave error_feedback out: it diverges with such a compressor."
            )

    def _check_name(self, what: str, names: Sequence[str]) -> None:
        if (value := getattr(self, what)) not in names:
            raise ValueError(
                f"Unknown {what} {value!r} of {self.name}; valid names: {', '.join(names)}."
            )

    def _check_count(self, what: str) -> None:
        count = getattr(self, what)
        # isinstance(True, int) is true.
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{what} of {self.name} must be an integer >= 1, got {count!r}.")

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Returns what holds for the values that arrive: see `Kind`."""

    @property
    def votes(self) -> bool:
        """Tells whether the signs of the majority come back; votes must not be added up."""
        return self.kind == "vote"

    @property
    def brings_momentum(self) -> bool:
        """Tells whether the compressor's side keeps momentum, so that the optimizer must not."""
        return False

    @property
    def takes_weight_decay(self) -> bool:
        """Tells whether the optimizer's weight decay weighs as much as under SGD with momentum."""
        # Momentum multiplies a steady gradient by 1 / (1 - momentum). Decay that the optimizer
        # adds after it is not multiplied.
        return not self.brings_momentum

    @property
    def encodes_once(self) -> bool:
        """Tells whether a mean gradient that came back must not be encoded a second time.

        If True, another backward of the same step cannot add to that mean gradient.
        """
        # Votes, momentum and regions are computed from each rank's own gradients, not from means.
        return self.votes or self.brings_momentum or self.is_scattered

    @property
    def has_feedback(self) -> bool:
        """Tells whether the error of encoding is kept and sent later."""
        return self.kind == "contractive" if self.error_feedback is None else self.error_feedback

    @property
    def halves(self) -> str:
        """Returns what is compressed: "both" halves, or the "reduce" half alone."""
        return "both"

    def at_density(self, density: float) -> Self:
        """Returns a copy with another density in (0, 1]; itself if it has no density."""
        return self

    @abstractmethod
    def check_with(self, setting: Setting) -> None:
        """Refuses options of the strategy that this compressor cannot work with.

        Raises:
            ValueError: If `setting` does not fit; the message says what to change or leave out.
        """

    def worker_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns the memory for what a rank encodes: its gradients, or a part of its host's sum.

        Args:
            numel: Elements that the rank encodes.
            device: Device of the gradients.
        """
        return self.owner_memory(numel, device)

    def owner_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns the memory for the mean of one shard, which its owner encodes for all ranks.

        Args:
            numel: Elements of the shard.
            device: Device of the shard.
        """
        is_kept = self.has_feedback and not self.is_identity
        kind = feedback.Residual if is_kept else feedback.Memory
        return kind(numel, device)

    def _check_gathers_gradients(self, setting: Setting, reason: str) -> None:
        """Refuses gather="parameters"; for compressors that bring mean gradients to the ranks."""
        if not setting.is_of_gradients:
            how = "set gather='gradients', or leave gather out"
            raise ValueError(f"gather='parameters' does not fit {self.name}: {how}. {reason}")


@dataclass(frozen=True, kw_only=True)
class FewOfMany(Compressor):
    """Base of compressors that send only k = max(1, ceil(density numel)) of numel elements.

    0 of 0 elements are sent.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01; some
            subclasses have another.

    Raises:
        ValueError: If `density` is out of its range.
    """

    has_density: ClassVar[bool] = True

    density: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise ValueError(f"density of {self.name} must be in (0, 1], got {self.density}.")

    def entries(self, numel: int) -> int:
        """Returns how many of `numel` elements are sent: k."""
        # Rounded before ceil, as 0.07 * 100 is a little more than 7 in floating point.
        return max(1, math.ceil(round(self.density * numel, 6))) if numel else 0

    @override
    def at_density(self, density: float) -> Self:
        """Returns the same compressor with another density in (0, 1]."""
        return replace(self, density=density)


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """Base of compressors that encode rows of fp32 values into rows of bytes and decode them.

    What arrives is C(x) = decode(encode(x)). Each row is encoded by itself: its bytes depend only
    on its values and on the generator. The number of bytes depends only on the number of elements,
    so that receivers know it in advance. Neither `encode` nor `decode` may make the host wait for a
    device.

    Args:
        halves: "both" means that gradients are encoded, and what is gathered, too. "reduce" means
            that only gradients are, and that the gather half travels uncompressed.
        error_feedback: See `Compressor`.

    Attributes:
        is_summable: Whether rows of bytes are rows of fp32 values for which decode(a + b) is
            decode(a) + decode(b) with the same generator. If so, a reduce-scatter may sum encoded
            rows, and only the sum is decoded. False is right for any codec: the rows of all ranks
            are decoded, then summed.
        largest: Largest magnitude that can be sent; larger values are clipped. Under a loss scale a
            larger value counts as overflow, so that the scale backs off. Without one, and with
            error feedback, a value beyond 2 x largest counts as overflow, since the rest of it
            would take several steps to send.
        block_size: Number of elements that share statistics, such as a scale. A row that is cut at
            multiples of it decodes to the same values. None means that all elements of the row
            share them. 1 means that each element is encoded by itself.
        wire_dtype: dtype of the values with which a row of bytes begins, if decoding returns these
            values as they are, nan included. None means that decoding computes its values.

    Raises:
        ValueError: If an option is out of its range, or excludes another one.
    """

    brings_momentum: ClassVar[bool] = False
    is_summable: ClassVar[bool] = False
    largest: ClassVar[float] = math.inf
    wire_dtype: ClassVar[torch.dtype | None] = None

    halves: str = "both"

    @property
    def block_size(self) -> int | None:
        """Returns how many elements share statistics: see the class. None means the whole row."""
        return None

    @override
    def check_with(self, setting: Setting) -> None:
        for numel in range(1, 65):
            nbytes = self.wire_bytes(numel)
            if not isinstance(nbytes, int) or nbytes % WIRE_ALIGNMENT:
                raise ValueError(
                    f"wire_bytes({numel}) of {self.name} is {nbytes!r}, not an integer multiple of"
                    f" {WIRE_ALIGNMENT}. Return padded_bytes(...) of {__name__} from it."
                )
        # An all-reduce would add up encoded bytes, which most codecs do not allow.
        if not setting.decouple:
            raise ValueError(
                f"decouple=False does not fit {self.name}: leave out decouple=False, or the"
                f" compressor. {self.name} encodes for owners of shards, and all-reduces have none."
            )
        # Ranks compute gradients at the replicas' values, which are wrong by as much as they lag.
        if not setting.is_of_gradients and self.halves == "both" and self.lag != "small":
            raise ValueError(
                f"gather='parameters' does not fit {self.name}: set gather='gradients', or"
                " halves='reduce' in the compressor, which leaves parameters uncompressed. Encoded"
                f" differences would be sent, and with {self.name} ranks would fall far behind."
            )

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the bytes of a row of `numel` elements, a multiple of 4; 0 for 0 elements."""

    @abstractmethod
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        """Writes the encoded `rows` into `wire`.

        Args:
            rows: [R, numel] fp32, contiguous; not mutated. With nan or inf in them the bytes do not
                matter, since the step is left out or refused, but neither this nor `decode` of
                these bytes may raise.
            wire: [R, wire_bytes(numel)] uint8, contiguous; every byte is overwritten.
            generator: Source of all random numbers, if `randomness` asks for one; advanced. None
                if `randomness` is "none".
        """

    @abstractmethod
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """Writes the values that `wire` stands for into `rows`.

        Args:
            wire: [R, wire_bytes(numel)] uint8, filled by `encode`; not mutated.
            rows: [R, numel] fp32, contiguous; every element is overwritten.
            generator: Generator in the state in which `encode` got it; advanced. Only codecs with
                `randomness` "shared" or "turns" may use it.
        """


def padded_bytes(nbytes: int) -> int:
    """Returns `nbytes`, rounded up to a multiple of `WIRE_ALIGNMENT`."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def field(wire: Tensor, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """Returns values that lie side by side in each row of bytes.

    Args:
        wire: [R, nbytes] uint8, as codecs get it.
        dtype: dtype of the values.
        begin: Index of the first byte in a row; a multiple of the size of a value.
        count: Number of values in a row.

    Returns:
        [R, count] of `dtype`, a view of `wire`; an empty tensor of its own if `count` is 0.
    """
    # torch refuses to view an empty row as wider values, since its stride is 1.
    if not count:
        return wire.new_empty((len(wire), 0), dtype=dtype)
    return wire[:, begin : begin + count * dtype.itemsize].view(dtype)
