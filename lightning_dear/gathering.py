"""What travels back to every rank, how much of it at once, or whether nothing travels apart."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dear.message_delay import MESSAGE_DELAY_VARIABLE, message_delay_s
from lightning_dear.work import Collectives

GATHERS = ("parameters", "gradients")
"""Names of what an all-gather may carry."""


@dataclass(frozen=True)
class Gathering:
    """Three options of the strategies, for the engine.

    Attributes:
        gather: "parameters": each rank steps its shard, and the new values are gathered.
            "gradients": the mean gradient is gathered, and each rank steps whole tensors.
        depth: Most all-gathers in flight at once; None: all of a step.
        decouple: False: no bucket is gathered, all are all-reduced during backward instead.

    Raises:
        ValueError: For unknown names, a depth below 1, and options that exclude each other.
    """

    gather: str = "parameters"
    depth: int | None = None
    decouple: bool = True

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise ValueError(f"Unknown gather {self.gather!r}; valid names: {', '.join(GATHERS)}.")
        if self.depth is not None and (not isinstance(self.depth, int) or self.depth < 1):
            raise ValueError(
                f"gather_depth must be an integer >= 1, or None for no limit; got {self.depth!r}."
            )
        if self.decouple:
            return
        if not self.is_of_gradients:
            raise ValueError(
                "decouple=False all-reduces whole gradients, which gather='parameters' has no use"
                " for; set gather='gradients' with it."
            )
        if self.depth is not None:
            raise ValueError(
                f"gather_depth={self.depth} has no effect with decouple=False, where nothing is"
                " gathered; leave it out."
            )

    @property
    def is_of_gradients(self) -> bool:
        """Whether each rank steps whole tensors, with a state of its own for all of them."""
        return self.gather == "gradients"

    def check(self, collectives: Collectives, num_optimizers: int) -> None:
        """Refuses what cannot be done with these collectives and optimizers.

        Raises:
            ValueError: Saying what to leave out.
        """
        if self.depth is not None and not collectives.reads_flags_freely:
            raise ValueError(
                f"gather_depth={self.depth} works with gloo only: NCCL orders all-gathers on the"
                " device by itself, and nobody on the host knows when one has ended. Leave it out."
            )
        if not self.decouple and num_optimizers > 1:
            raise ValueError(
                f"decouple=False works with one optimizer, and there are {num_optimizers}: two"
                " optimizers' all-reduces could start in another order on other ranks. Leave it"
                " out."
            )

    def shards(self, collectives: Collectives) -> tuple[int, int]:
        """(number of this rank's shard, number of shards); one shard where each rank has all."""
        return (collectives.rank, collectives.world_size) if self.decouple else (0, 1)


def why_not_all_reduce(gathering: Gathering, *, is_one_optimizer: bool) -> str | None:
    """Why buckets that a plan all-reduces must not be; None if they may.

    Args:
        gathering: What travels back.
        is_one_optimizer: Whether nobody else all-reduces in the same process groups.
    """
    if gathering.is_of_gradients:
        return (
            "gather='gradients' steps every bucket on every rank, and all-reduces all of them with"
            " decouple=False, or none"
        )
    if not is_one_optimizer:
        return "two optimizers' all-reduces could start in another order on other ranks"
    if message_delay_s():
        return f"{MESSAGE_DELAY_VARIABLE} would not hold back their messages"
    return None
