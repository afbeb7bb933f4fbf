"""Base classes of compressors: `Compressor`, and `Codec`, which encodes rows of fp32 values.

An exchange (the code that moves buckets between ranks) cuts the gradients of a bucket into one row
for each rank, lets the codec encode every row into bytes, and sends row r to rank r. A codec knows
nothing of ranks or of earlier steps. Exchanges and `error_feedback` know these.
docs/write-a-codec.md tells how to write a codec.
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

# Without the alias, the option `error_feedback` of the classes below would hide the module.
from lightning_dear.compression import error_feedback as feedback

Kind = Literal["contractive", "unbiased", "vote"]
"""What holds for C(x), the values that arrive when x is sent.

contractive: |C(x) - x|^2 <= (1 - d) |x|^2 for a d > 0. Unless error_feedback=False, the error
x - C(x) is kept and added to the next gradient (error feedback), so that it arrives later. With
`RandomK` it fades while it waits.
unbiased: E[C(x)] = x. The error is not kept: error feedback would diverge.
vote: Each rank sends only the sign of each element, and the sign of the majority comes back. With
halves="reduce" the mean of the signs comes back.
"""

Lag = Literal["small", "unbounded"]
"""How much a replica (a rank's copy of the parameters that another rank steps) differs from the
owner's parameters if gather="parameters" sends encoded differences of parameters.

small: About 1 % of the weights' norm or less.
unbounded: Perhaps more. gather="parameters" is then refused, unless halves="reduce" leaves the
gathered parameters uncompressed.
"""

Randomness = Literal["none", "private", "shared", "turns"]
"""Which random generator `Codec.encode` and `Codec.decode` are given.

none: The generator is None.
private: `encode` is given a generator whose seed differs from rank to rank. `decode` must not use
its generator.
shared: In each call, `encode` on all ranks, and the `decode` of these bytes, are given generators
of the same seed. Every half of every step has another seed.
turns: The same as shared, but both halves of a step have the same seed, which grows by one from
step to step. So a codec that sends some places in each step can send all places in turn.
"""

HALVES = ("both", "reduce")
"""Values of the option `halves`. The reduce half of an exchange sends gradients to the owners of
shards (the ranks that sum them), and the gather half sends the owners' results to all ranks.
"both": both halves are encoded. "reduce": only the reduce half is encoded."""

WIRE_ALIGNMENT = 4
"""The number of bytes of an encoded row is a multiple of this. So a codec can view a part of each
row as fp32 values; see `field`."""


@dataclass(frozen=True)
class Setting:
    """Options of the strategy that a compressor may refuse; see `Compressor.check_with`.

    Attributes:
        gather: "parameters" means that each rank steps its shard of the parameters, and that the
            new parameters are then gathered. "gradients" means that the mean gradient is gathered,
            and that each rank steps whole tensors.
        decouple: True means that gradients are reduced during backward and that the results are
            gathered later. False means that all buckets are all-reduced during backward, and that
            nothing is gathered.
    """

    gather: str = "parameters"
    decouple: bool = True

    @cached_property
    def is_of_gradients(self) -> bool:
        """Tells whether each rank steps whole tensors: gather="gradients".

        If so, each rank has the whole optimizer state.
        """
        return self.gather == "gradients"


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Base of all compressors: describes what is sent in place of gradients.

    A frozen dataclass whose fields are the user's options. It holds no tensors: what is kept from
    step to step is in the `Memory` objects that it makes. `Codec` is the base of compressors that
    encode row by row. Each other compressor has a class of exchanges in `exchange/`.

    Args:
        error_feedback: Whether the error of encoding is kept and added to the next gradient. None
            means True for contractive compressors and False for others. False means that a
            contractive compressor loses its errors for good. True is refused for compressors that
            are not contractive.

    Attributes:
        name: Name of the compressor, as the option `compressor` takes it.
        brings_momentum: Whether the compressor's `Memory` keeps momentum. If so, an optimizer with
            momentum is refused.
        takes_weight_decay: Whether weight decay that the optimizer adds to the arrived gradients
            has the same strength, relative to the gradients, as under SGD with momentum. If not,
            and if `brings_momentum`, such weight decay is refused.
        overflows: Sentence for the overflow error, with a leading space: which finite values count
            as overflow, too, and what to do. Empty means that only inf and nan count.
        all_reduces: Whether every rank gets the whole mean gradient without the gather half. If so,
            nothing is gathered.
        halves: Which halves are compressed: see `HALVES`.
        lag: See `Lag`. "unbounded" is right for any compressor.
        is_identity: Whether values travel unchanged, as with `Fp32`.
        is_scattered: Whether each rank sums one region of every bucket. If so, no rank has a whole
            mean gradient before the sums of all ranks have been gathered.
        has_density: Whether only a share of the elements travels, which `at_density` can change.
        randomness: See `Randomness`. Used for codecs only.

    Raises:
        ValueError: If an option is out of its range, or excludes another option.
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
        """Checks the options and class attributes that all compressors have.

        A subclass that overrides it must call it. It needs no call if nothing else is checked.

        Raises:
            ValueError: If one of them is missing or has an invalid value.
        """
        if not isinstance(getattr(self, "name", None), str):
            raise ValueError(f"{type(self).__name__} has no name. Add name: ClassVar[str] = '...'.")
        for option in fields(self):
            value = getattr(self, option.name)
            # Without this check, a string from a command line would fail later, in a comparison
            # whose error does not name the option. Options that are True or False by default are
            # not numbers: hence `type`, since isinstance(True, int) is true.
            is_number = isinstance(value, (int, float)) or type(option.default) not in (int, float)
            self._check_value(option.name, "a number", is_valid=is_number)
        for what, names in ("kind", Kind), ("lag", Lag), ("randomness", Randomness):
            self._check_name(what, get_args(names))
        self._check_name("halves", HALVES)
        if self.error_feedback and self.kind != "contractive":
            raise ValueError(
                f"error_feedback=True does not fit {self.name}, as {self.name} is of kind"
                f" {self.kind!r}. Leave error_feedback out: it diverges with such a compressor."
            )

    def _check_name(self, what: str, names: Sequence[str]) -> None:
        """Raises a ValueError if the value of the attribute `what` is not among `names`."""
        if (value := getattr(self, what)) not in names:
            valid = ", ".join(names)
            raise ValueError(f"Unknown {what} {value!r} of {self.name}; valid names: {valid}.")

    def _check_value(self, what: str, wanted: str, *, is_valid: bool) -> None:
        """Raises a ValueError unless `is_valid`: the option `what` must be what `wanted` says."""
        if not is_valid:
            value = getattr(self, what)
            raise ValueError(f"{what} of {self.name} must be {wanted}, got {value!r}.")

    def _check_count(self, what: str) -> None:
        """Raises a ValueError if the attribute `what` is not an integer of at least 1."""
        count = getattr(self, what)
        # Bools need a check of their own, since isinstance(True, int) is true.
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        self._check_value(what, "an integer >= 1", is_valid=is_count)

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Returns which property the values have that arrive: see `Kind`."""

    @property
    def votes(self) -> bool:
        """Tells whether ranks send signs, for a vote: see `Kind`.

        If so, the results of two votes, such as those of two backwards, must not be added up.
        """
        return self.kind == "vote"

    @property
    def brings_momentum(self) -> bool:
        """Tells whether the compressor's `Memory` keeps momentum. False in this base class.

        If so, an optimizer with momentum is refused.
        """
        return False

    @property
    def takes_weight_decay(self) -> bool:
        """Tells whether the optimizer's weight decay weighs as much as under SGD with momentum.

        That is so in this base class if the compressor brings no momentum. If this returns False,
        weight decay that the optimizer adds to gradients is refused.
        """
        # Momentum multiplies a steady gradient by 1 / (1 - momentum). Weight decay that the
        # optimizer adds behind the compressor's momentum is not multiplied.
        return not self.brings_momentum

    @property
    def encodes_once(self) -> bool:
        """Tells whether a mean gradient that came back must not be encoded a second time.

        If True, a further backward of the same step is refused once a hook or the user has seen or
        clipped the mean gradient: the backward would add to it, and the sum would be encoded.
        """
        # Votes, momentum and regions are computed from each rank's own gradients, not from means.
        return self.votes or self.brings_momentum or self.is_scattered

    @property
    def has_feedback(self) -> bool:
        """Tells whether the error of encoding is kept and sent later: see `error_feedback`."""
        return self.kind == "contractive" if self.error_feedback is None else self.error_feedback

    @property
    def halves(self) -> str:
        """Returns which halves are compressed: see `HALVES`. "both" in this base class."""
        return "both"

    def at_density(self, density: float) -> Self:
        """Returns a copy of this compressor with another density, in (0, 1].

        Returns this compressor itself if it has no density, as in this base class.
        """
        return self

    @abstractmethod
    def check_with(self, setting: Setting) -> None:
        """Refuses options of the strategy that this compressor cannot work with.

        Raises:
            ValueError: If `setting` does not fit; the message says what to change or leave out.
        """

    def worker_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns a new memory for what a rank encodes in the reduce half.

        A rank encodes its gradients or, in two hops (first within each host, then between hosts), a
        part of the sum of its host's gradients. Here it is what `owner_memory`
        returns; subclasses may differ.

        Args:
            numel: Number of elements that the rank encodes.
            device: Device of the gradients.
        """
        return self.owner_memory(numel, device)

    def owner_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        """Returns a new memory for what a rank encodes in the gather half: the mean of its shard.

        This base class makes a `Residual` if the error is kept, and otherwise a `Memory`, which
        keeps nothing.

        Args:
            numel: Number of elements of the shard.
            device: Device of the shard.
        """
        kind = feedback.Residual if self.has_feedback and not self.is_identity else feedback.Memory
        return kind(numel, device)

    def _check_gathers_gradients(self, setting: Setting, reason: str) -> None:
        """Refuses gather="parameters". For compressors that bring mean gradients to all ranks.

        Args:
            setting: Options of the strategy.
            reason: Sentence with which the message ends.

        Raises:
            ValueError: If `setting.gather` is "parameters".
        """
        if not setting.is_of_gradients:
            how = "set gather='gradients', or leave gather out"
            raise ValueError(f"gather='parameters' does not fit {self.name}: {how}. {reason}")


@dataclass(frozen=True, kw_only=True)
class FewOfMany(Compressor):
    """Base of compressors that send about k = max(1, ceil(density numel)) of numel elements.

    If numel is 0, k is 0.

    Args:
        density: Share of the elements that are sent, in (0, 1]. The default is 0.01; some
            subclasses have another default.

    Raises:
        ValueError: If `density` is out of its range.
    """

    kind: ClassVar[Kind] = "contractive"
    has_density: ClassVar[bool] = True

    density: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_value("density", "in (0, 1]", is_valid=0 < self.density <= 1)

    def entries(self, numel: int) -> int:
        """Returns k, the number of elements that are sent, for `numel` elements."""
        # Rounded first, since 0.07 * 100 is a little more than 7 in floating point, and `ceil`
        # would return 8.
        return max(1, math.ceil(round(self.density * numel, 6))) if numel else 0

    @property
    def gradients_at_once(self) -> float:
        """Returns how many gradients add up in a number, on average, until it is sent.

        That is the number of steps for which it waits, 1 / density, in this base class. It is 1
        without error feedback, where numbers that are not sent are lost.
        """
        return 1 / self.density if self.has_feedback else 1.0

    @override
    def at_density(self, density: float) -> Self:
        """Returns a copy of this compressor with another density, in (0, 1].

        Raises:
            ValueError: If `density` is out of its range.
        """
        return replace(self, density=density)


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """Base of compressors that encode rows of fp32 values into rows of bytes and decode them.

    C(x) = decode(encode(x)) arrives. Each row is encoded by itself: its bytes depend only on the
    values of the row and on the generator. The number of bytes of a row depends only on the number
    of its elements, so that receivers know it in advance. Neither `encode` nor `decode` may make
    the host wait for an accelerator.

    Args:
        halves: "both" means that gradients are encoded, and that what is gathered is encoded, too.
            "reduce" means that only gradients are encoded, and that the gather half travels
            uncompressed.
        error_feedback: See `Compressor`.

    Attributes:
        is_summable: Whether rows of bytes are rows of fp32 values for which decode(a + b) is
            decode(a) + decode(b) with the same generator. If so, a reduce-scatter may sum encoded
            rows, and only the sum is decoded. False is right for any codec: the rows of all ranks
            are decoded and then summed.
        largest: Largest magnitude that can be sent; larger values are clipped. With a loss scale, a
            larger value counts as overflow, so that the scale backs off. Without a loss scale, but
            with error feedback, a value beyond 2 x largest counts as overflow, since the clipped
            rest would take several steps to send. Without both, clipping is not reported.
        block_size: Number of elements that share statistics, such as a scale. If a row is cut at
            multiples of `block_size` into shorter rows, these decode to the same values. None means
            that all elements of the row share statistics. 1 means that each element is encoded by
            itself.
        wire_dtype: dtype of the values with which a row of bytes begins, if decoding returns these
            values as they are, nan included. None means that decoding computes its values from
            the bytes.

    Raises:
        ValueError: If an option is out of its range, or excludes another option.
    """

    is_summable: ClassVar[bool] = False
    largest: ClassVar[float] = math.inf
    wire_dtype: ClassVar[torch.dtype | None] = None

    halves: str = "both"

    @property
    def block_size(self) -> int | None:
        """Returns how many elements share statistics. None means the whole row, as in this class.

        See the attribute in the class docstring.
        """
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
        # An all-reduce would add up encoded bytes, and the sum of two encoded rows cannot be
        # decoded with most codecs.
        if not setting.decouple:
            raise ValueError(
                f"decouple=False does not fit {self.name}: leave out decouple=False, or the"
                f" compressor. {self.name} encodes for owners of shards, and all-reduces have none."
            )
        # Each rank computes gradients with its replicas. If these differ much from the owners'
        # parameters, the gradients are wrong.
        if not setting.is_of_gradients and self.halves == "both" and self.lag != "small":
            raise ValueError(
                f"gather='parameters' does not fit {self.name}: set gather='gradients', or"
                " halves='reduce' in the compressor, which leaves parameters uncompressed. Encoded"
                f" differences would be sent, and with {self.name} ranks would fall far behind."
            )

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the number of bytes of an encoded row of `numel` elements.

        It is a multiple of `WIRE_ALIGNMENT`, and 0 for 0 elements.
        """

    @abstractmethod
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        """Writes the encoded `rows` into `wire`. Does not block.

        Args:
            rows: [R, numel] fp32, contiguous; not mutated. If they contain nan or inf, the bytes do
                not matter, since the step is left out or refused. But neither `encode` nor `decode`
                of these bytes may raise.
            wire: [R, wire_bytes(numel)] uint8, contiguous; every byte is overwritten.
            generator: Source of all random numbers; advanced. None if `randomness` is "none".
        """

    @abstractmethod
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        """Decodes the bytes in `wire` and writes the values into `rows`. Does not block.

        Args:
            wire: [R, wire_bytes(numel)] uint8, filled by `encode`, perhaps on other ranks; not
                mutated.
            rows: [R, numel] fp32, contiguous; every element is overwritten.
            generator: Generator in the state in which `encode` got it; advanced. Only codecs with
                `randomness` "shared" or "turns" may use it. None if `randomness` is "none".
        """


def padded_bytes(nbytes: int) -> int:
    """Returns `nbytes`, rounded up to a multiple of `WIRE_ALIGNMENT`."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def field(wire: Tensor, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """Returns a view of a range of bytes in each row, as values of `dtype`.

    Args:
        wire: [R, nbytes] uint8, as `Codec.encode` and `Codec.decode` get it.
        dtype: dtype of the values.
        begin: Index in a row of the first byte of the range; a multiple of the size of a value.
        count: Number of values in the range.

    Returns:
        [R, count] of `dtype`, a view of `wire`. If `count` is 0, a new empty tensor [R, 0].
    """
    # torch refuses to view an empty row as wider values, since its stride is 1.
    if not count:
        return wire.new_empty((len(wire), 0), dtype=dtype)
    return wire[:, begin : begin + count * dtype.itemsize].view(dtype)
