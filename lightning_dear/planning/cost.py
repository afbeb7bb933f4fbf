"""What an exchange costs: a start, and so much a byte (the alpha-beta model)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkCost:
    """Cost of one exchange on a rank's link, the same in both directions.

    Attributes:
        alpha_s: Seconds that an exchange takes however small it is.
        beta_s: Seconds for each byte that the rank sends: 1 / rate.
        all_reduce: Cost of the backend's all-reduce, which sends twice the bytes of one half; None:
            that of a reduce-scatter and an all-gather.
    """

    alpha_s: float
    beta_s: float
    all_reduce: LinkCost | None = None

    def reduce_scatter_s(self, nbytes: float, world_size: int) -> float:
        """Seconds for a bucket of `nbytes`: alpha + beta x nbytes x (P-1)/P; 0 at one rank."""
        if world_size == 1:
            return 0.0
        return self.alpha_s + self.beta_s * sent_bytes(nbytes, world_size)

    def all_gather_s(self, nbytes: float, world_size: int) -> float:
        """Seconds for a bucket of `nbytes`: it sends what a reduce-scatter sends."""
        return self.reduce_scatter_s(nbytes, world_size)

    def all_reduce_s(self, nbytes: float, world_size: int) -> float:
        """Seconds for a bucket of `nbytes`, as measured, or as both halves; 0 at one rank."""
        if world_size == 1:
            return 0.0
        cost = self.all_reduce or LinkCost(2 * self.alpha_s, self.beta_s)
        return cost.alpha_s + cost.beta_s * 2 * sent_bytes(nbytes, world_size)

    def bound_s(self, nbytes: float, world_size: int, forward_s: float, backward_s: float) -> float:
        """No step is shorter than max(forward + backward, bytes / rate), seconds.

        The rate is that of the two halves; a backend's all-reduce may have another.

        `nbytes` is the size of all parameters, or of what travels of them on the average of both
        halves; bytes, what a rank sends of them in both.
        """
        half_s = self.beta_s * sent_bytes(nbytes, world_size)
        return max(forward_s + backward_s, 2 * half_s)

    def dear_bound_s(
        self,
        nbytes: float,
        world_size: int,
        forward_s: float,
        backward_s: float,
        *,
        gather_bytes: float | None = None,
    ) -> float:
        """No step is shorter whose halves stay apart, seconds (DeAR, arXiv 2302.12445).

        max(forward, all-gather) + max(backward, reduce-scatter). `gather_bytes`: the size of what
        is gathered, where it differs from what is reduced, `nbytes`.
        """
        gather_bytes = nbytes if gather_bytes is None else gather_bytes
        gather_s, reduce_s = (
            self.beta_s * sent_bytes(one, world_size) for one in (gather_bytes, nbytes)
        )
        return max(forward_s, gather_s) + max(backward_s, reduce_s)


def sent_bytes(nbytes: float, world_size: int) -> float:
    """What each rank sends to reduce-scatter, or to all-gather, a buffer of `nbytes`."""
    return nbytes * (world_size - 1) / world_size


@dataclass(frozen=True)
class Train:
    """A measurement of exchanges that were under way at once.

    Attributes:
        count: How many.
        sent_bytes: By a rank, in each.
        seconds: Until all had ended.
    """

    count: int
    sent_bytes: float
    seconds: float


def fitted(*, many: Train, few: Train, small: Train, long: Train) -> LinkCost:
    """What four trains say; never below zero.

    Every train also takes some time once: until its first message is under way, and until the last
    rank has its last one. A difference between two trains leaves that out, though only roughly; in
    a long train it weighs little.

    Args:
        many: Sends in all what `few` sends, so that it takes longer by its starts alone.
        few: Fewer and larger exchanges; for alpha only.
        small: Sends least in all.
        long: Sends most in all.
    """
    alpha_s = max((many.seconds - few.seconds) / (many.count - few.count), 0.0)
    starts_s = alpha_s * (long.count - small.count)
    more_bytes = long.count * long.sent_bytes - small.count * small.sent_bytes
    beta_s = (long.seconds - small.seconds - starts_s) / more_bytes
    return LinkCost(alpha_s=alpha_s, beta_s=max(beta_s, 0.0))
