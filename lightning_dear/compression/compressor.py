"""What all compressors have in common, whatever they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from typing_extensions import Self

Kind = Literal["contractive", "unbiased", "vote"]
"""What is true of what comes back, C(x), of an x that is sent.

contractive: |C(x) - x|^2 <= (1 - d) |x|^2 for a d > 0. What is lost is kept and added to the next
gradient (error feedback), so that nothing is lost for good.
unbiased: E[C(x)] = x. Nothing is kept: with feedback it would diverge.
vote: only the sign of each number travels, and the majority's sign comes back; with halves="reduce"
the mean of the signs, with halves="gather" the sign of the mean.
"""

Lag = Literal["small", "large", "unbounded"]
"""How far replicas stay behind the owner's parameters if differences are encoded, which is what
gather="parameters" does: about 1 % of the weights' norm or less, more, or ever more."""


@dataclass(frozen=True)
class Setting:
    """What a compressor is to be used beside: the options of an exchange that matter to it.

    Attributes:
        is_of_gradients: Whether mean gradients are gathered, rather than parameters.
        depth: Most all-gathers in flight; None: all.
        decouple: False: everything is all-reduced in backward.
    """

    is_of_gradients: bool
    depth: int | None
    decouple: bool


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """What is sent instead of gradients. A frozen dataclass, whose fields are its options.

    Args:
        error_feedback: Whether what is lost is added to the next gradient; None: as `kind` asks
            for, which is True for contractive compressors only.
        allow_biased: Lets a contractive one go without feedback, so that what is lost is lost.

    Attributes:
        name: In the table of compressors.
        brings_momentum: Whether momentum is kept for it, so that the optimizer must have none.
        all_reduces: Whether every rank gets the whole mean in backward, and nothing is gathered.
        halves: What is compressed: "both" halves of an exchange, or one of them.
        lag: See `Lag`; what is true where nothing else is known.
        allow_lag: Whether a large lag is meant.
        is_identity: Whether everything travels as it is: only `Fp32`, and what is like it.
        is_scattered: Whether each rank sums a part of a bucket, and whole means are of all of them.
        looks_up_counts: Whether how many numbers travel depends on them, so that the host has to
            read it.
        has_density: Whether it sends a few of many numbers, as `at_density` says.
        warm_up_steps: Steps before it is what it says it is; see `warmed_up`.

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    name: ClassVar[str]
    all_reduces: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    has_density: ClassVar[bool] = False

    error_feedback: bool | None = None
    allow_biased: bool = False

    def __post_init__(self) -> None:
        """Check what all have in common; subclasses call it first."""
        self._check_numbers_and_names()
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
        if self.allow_biased and self.kind != "contractive":
            raise ValueError(
                f"allow_biased=True of {self.name} has no effect: it is {self.kind}, and goes"
                " without feedback in any case. Leave allow_biased out."
            )
        if self.allow_biased and self.has_feedback:
            raise ValueError(
                f"allow_biased=True of {self.name} has no effect with error feedback. Leave"
                " allow_biased out, or set error_feedback=False with it if that is meant."
            )

    def _check_numbers_and_names(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            # Not isinstance, by which a bool is a number. A string, as from a command line,
            # would else fail in a comparison that names no option.
            if type(one.default) in (int, float) and not isinstance(value, (int, float)):
                raise ValueError(f"{one.name} of {self.name} must be a number, got {value!r}.")
        for what, value, names in ("kind", self.kind, Kind), ("lag", self.lag, Lag):
            if value not in get_args(names):
                raise ValueError(
                    f"Unknown {what} {value!r} of {self.name}; valid names:"
                    f" {', '.join(get_args(names))}."
                )

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What is true of what comes back: see `Kind`."""

    @property
    def votes(self) -> bool:
        """Whether the majority's signs come back, which add up to nothing."""
        return self.kind == "vote"

    @property
    def brings_momentum(self) -> bool:
        """See the class."""
        return False

    @property
    def is_scattered(self) -> bool:
        """See the class."""
        return False

    @property
    def looks_up_counts(self) -> bool:
        """See the class."""
        return False

    @property
    def encodes_once(self) -> bool:
        """Whether means that have come back cannot be encoded again, with what is added to them."""
        # Votes, momentum and regions are of each rank's own gradients.
        return self.votes or self.brings_momentum or self.is_scattered

    @property
    def has_feedback(self) -> bool:
        """Whether what is lost is kept."""
        return self.kind == "contractive" if self.error_feedback is None else self.error_feedback

    @property
    def halves(self) -> str:
        """See the class."""
        return "both"

    @property
    def lag(self) -> Lag:
        """See the class."""
        return "unbounded"

    @property
    def allow_lag(self) -> bool:
        """See the class."""
        return False

    @property
    def warm_up_steps(self) -> int:
        """See the class."""
        return 0

    def warmed_up(self, step: int) -> Self:
        """What encodes step 0, 1, ..., counted from when encoding begins."""
        return self

    def at_density(self, density: float) -> Self:
        """The same with another density in (0, 1]; itself where it has none."""
        return self

    @abstractmethod
    def check_with(self, setting: Setting) -> None:
        """Refuses what cannot be done beside it, or would have no effect.

        Raises:
            ValueError: Saying what to set or to leave out.
        """

    def _check_gathers_gradients(self, setting: Setting, sends: str) -> None:
        """For those of which every rank, or an owner, has means alone."""
        if not setting.is_of_gradients:
            raise ValueError(f"{self.name} {sends}: set gather='gradients', or leave gather out.")
        if setting.depth is not None and self.all_reduces:
            raise ValueError(
                f"gather_depth={setting.depth} has no effect with {self.name}, which gathers"
                " nothing; leave it out."
            )
