"""How short a step could be: arithmetic on seconds of compute, bytes and a link's rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Of one model on one cluster, whatever the strategy.

    Attributes:
        forward_s: Forward without communication, seconds; None if unknown.
        backward_s: Backward without communication, seconds; None if unknown.
        model_bytes: All parameters, as they travel uncompressed.
        world_size: Ranks.
        rate: Bytes per second of each link and direction; None if unknown.
        ranks_per_link: Ranks that share a link; what they send each other does not use it.
    """

    forward_s: float | None
    backward_s: float | None
    model_bytes: int
    world_size: int
    rate: float | None
    ranks_per_link: int = 1

    @property
    def one_way_bytes(self) -> float:
        """What each link must carry to reduce-scatter, or to all-gather, the model."""
        return one_way_bytes(self.model_bytes, self.world_size // self.ranks_per_link)

    @property
    def compute_s(self) -> float | None:
        """Forward and backward, seconds."""
        if self.forward_s is None or self.backward_s is None:
            return None
        return self.forward_s + self.backward_s

    @property
    def one_way_s(self) -> float | None:
        """Seconds that `one_way_bytes` take at the link's rate."""
        return None if self.rate is None else self.one_way_bytes / self.rate

    @property
    def communication_ratio(self) -> float | None:
        """Communication over compute: 2(P-1)/P x bytes / rate / (forward + backward), P links."""
        if self.one_way_s is None or not self.compute_s:
            return None
        return 2 * self.one_way_s / self.compute_s

    @property
    def step_s(self) -> float | None:
        """`max(forward + backward, bytes / rate)`: nothing that moves these bytes is faster."""
        if self.one_way_s is None or self.compute_s is None:
            return None
        return max(self.compute_s, 2 * self.one_way_s)

    @property
    def dear_s(self) -> float | None:
        """DeAR's own: `max(forward, all-gather) + max(backward, reduce-scatter)`."""
        if self.one_way_s is None or self.forward_s is None or self.backward_s is None:
            return None
        return max(self.forward_s, self.one_way_s) + max(self.backward_s, self.one_way_s)


def one_way_bytes(model_bytes: float, num_links: int) -> float:
    """What each of `num_links` links must carry to reduce-scatter, or to all-gather, the model.

    Whoever shares a link may add up first, and share what comes: no schedule needs less.
    """
    return (num_links - 1) / num_links * model_bytes


def compute_for_ratio(ratio: float, model_bytes: int, num_links: int, rate: float | None) -> float:
    """Seconds of forward and backward for which communication takes `ratio` times as long.

    Args:
        ratio: 2(P-1)/P x bytes / rate / (forward + backward); greater than 0.
        model_bytes: All parameters, as they travel.
        num_links: P; at least 2.
        rate: Bytes per second of each link.

    Raises:
        ValueError: If there is no communication or its rate is not known.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be greater than 0, got {ratio}.")
    if num_links < 2 or rate is None:
        raise ValueError(
            f"ratio={ratio:g} needs at least two ranks, on links of known rate; set"
            " model.compute_s instead, or choose another cluster."
        )
    return 2 * one_way_bytes(model_bytes, num_links) / rate / ratio
