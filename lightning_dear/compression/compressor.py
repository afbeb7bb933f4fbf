"""What all compressors have in common, whatever they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

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

    Raises:
        ValueError: For options outside their range, or that exclude each other.
    """

    name: ClassVar[str]
    all_reduces: ClassVar[bool] = False

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
    def brings_momentum(self) -> bool:
        """See the class."""
        return False

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
