"""The exact dynamic programme that MergeComp's heuristic approximates, for both halves of a step.

Tensors in the order of their gradients are cut into groups of neighbours. Let X_i be the bytes of
the first i tensors, ready_i when the i-th gradient is there, use_i when forward first reads one of
the group. A group (j, i], the y-th, costs t = alpha + beta (X_i - X_j) in each half. Then

    f_i = max(f_j, ready_i + y B + gamma X_i) + t      the link is free after its reduce-scatter
    d_i = max(d_j, -use_i) + t                         how much its gather ends after its first read

where B + gamma x is what encoding x bytes costs on the computing side (0 without a compressor). The
second line is the first one mirrored: gathers run in the opposite order. The step takes
max(backward, f_N) + forward + max(0, d_N). It rises with both figures and each line with its own,
so that of all ways to reach i only those need to be kept that no other one beats in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.mgwfbp import backward_order
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.predict import predict
from lightning_dear.planning.search import NoContest, PlanSearch, described, starting_plan
from lightning_dear.planning.times import ModelTimes

_SHARES = (1, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Of all bytes: what a bucket may hold."""

_MIN_GAIN = 2e-3
"""Share of the step that more buckets must gain: each costs the host work, which no link shows."""


@dataclass(frozen=True)
class Piece:
    """Tensors that stay together, at one place in the order of gradients.

    Attributes:
        indices: Of the tensors.
        nbytes: Size of all.
        ready_s: When the last gradient is there.
        first_use_s: When forward first reads one of them.
    """

    indices: tuple[int, ...]
    nbytes: int
    ready_s: float
    first_use_s: float

    def joined(self, other: Piece) -> Piece:
        """Both as one."""
        return Piece(
            self.indices + other.indices,
            self.nbytes + other.nbytes,
            max(self.ready_s, other.ready_s),
            min(self.first_use_s, other.first_use_s),
        )


@dataclass(frozen=True)
class Grouping:
    """One way to cut the pieces so far, and what it costs; `f` and `d` as in the module's words."""

    free_s: float
    late_s: float
    num_groups: int
    cut: int
    before: Grouping | None

    def cuts(self) -> list[int]:
        """Where groups end, as numbers of pieces."""
        return [*(self.before.cuts() if self.before is not None else []), self.cut]


@dataclass(frozen=True)
class Codec:
    """Cost of encoding a bucket: seconds a bucket, seconds a byte."""

    alpha_s: float = 0.0
    beta_s: float = 0.0


def best_groupings(
    pieces: Sequence[Piece],
    alpha_s: float,
    beta_s: float,
    codec: Codec | None = None,
    max_bytes: float = float("inf"),
) -> list[Grouping]:
    """All groupings of `pieces` that no other beats in both halves, the fastest backward first.

    O(N^2) times the number of groupings kept; that number grows with the number of buckets only if
    encoding costs something. Exact if forward reads in the opposite order of `pieces`; else the
    second half is an approximation.

    Args:
        pieces: In the order of their gradients.
        alpha_s: Start of one exchange, seconds.
        beta_s: Seconds for a byte of a bucket, one half.
        codec: What encoding costs; None: nothing.
        max_bytes: Of a group with more than one piece.
    """
    codec = codec or Codec()
    total = [0, *accumulate(piece.nbytes for piece in pieces)]
    ready_s = list(accumulate((piece.ready_s for piece in pieces), max))
    kept: list[list[Grouping]] = [[Grouping(0.0, float("-inf"), 0, 0, None)]]
    for stop in range(1, len(pieces) + 1):
        found: list[Grouping] = []
        first_use_s = float("inf")
        for start in range(stop - 1, -1, -1):
            if total[stop] - total[start] > max_bytes and start < stop - 1:
                break
            first_use_s = min(first_use_s, pieces[start].first_use_s)
            sent_s = alpha_s + beta_s * (total[stop] - total[start])
            for one in kept[start]:
                count = one.num_groups + 1
                encoded_s = count * codec.alpha_s + codec.beta_s * total[stop]
                free_s = max(one.free_s, ready_s[stop - 1] + encoded_s) + sent_s
                late_s = max(one.late_s, -first_use_s) + sent_s
                if stop < len(pieces):
                    # The next group waits for this piece at least: being earlier is no advantage.
                    free_s = max(free_s, ready_s[stop])
                    late_s = max(late_s, -pieces[stop].first_use_s)
                found.append(Grouping(free_s, late_s, count, stop, one if start else None))
        kept.append(_unbeaten(found, counts_groups=codec.alpha_s > 0))
    return kept[-1]


def _unbeaten(found: list[Grouping], *, counts_groups: bool) -> list[Grouping]:
    found.sort(key=lambda one: (one.free_s, one.late_s, one.num_groups))
    kept: list[Grouping] = []
    for one in found:
        if not any(
            other.late_s <= one.late_s and (not counts_groups or other.num_groups <= one.num_groups)
            for other in (kept if counts_groups else kept[-1:])
        ):
            kept.append(one)
    return kept


def pre_merged(pieces: Sequence[Piece], max_pieces: int) -> list[Piece]:
    """At most `max_pieces`: neighbours are joined while they are smaller than a size.

    The size is 1 KiB, doubled until few enough are left; so the pieces joined are the smallest.
    """
    joined, size = list(pieces), 1 << 10
    while len(joined) > max_pieces:
        joined = [pieces[0]]
        for piece in pieces[1:]:
            if min(joined[-1].nbytes, piece.nbytes) < size:
                joined[-1] = joined[-1].joined(piece)
            else:
                joined.append(piece)
        size *= 2
    return joined


class MergeCompFusion:
    """The buckets with the shortest predicted step, by an exact dynamic programme.

    What MergeComp (arXiv 2103.15195) searches for with measured steps. Needs measured times: until
    then it trains with `ThresholdFusion`'s buckets. Its plan is used without being measured against
    others. No tensor is cut. Tensors of different families are planned one after the other, each
    beside the plans of the others.

    Args:
        max_pieces: Smallest neighbours are joined beforehand until there are at most so many
            tensors; the time to plan grows with the square of it.
        encode_alpha_s: What encoding a bucket costs, seconds, however small it is.
        encode_beta_s: Seconds for each byte to encode.

    Raises:
        ValueError: If `max_pieces` is below 1 or a cost is negative.
    """

    name = "mergecomp"

    def __init__(
        self,
        *,
        max_pieces: int = 128,
        encode_alpha_s: float = 0.0,
        encode_beta_s: float = 0.0,
    ) -> None:
        if max_pieces < 1:
            raise ValueError(f"max_pieces must be >= 1, got {max_pieces}.")
        for option, value in (
            ("encode_alpha_s", encode_alpha_s),
            ("encode_beta_s", encode_beta_s),
        ):
            if not value >= 0:
                raise ValueError(f"{option} must be >= 0 seconds, got {value}.")
        self.max_pieces = max_pieces
        self.encode_alpha_s = encode_alpha_s
        self.encode_beta_s = encode_beta_s

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        """See `FusionPlanner`: what to start with."""
        return starting_plan(tensors, world_size)

    def search(
        self, tensors: Sequence[TensorSpec], world_size: int, times: ModelTimes, link: LinkCost
    ) -> PlanSearch:
        """See `SearchingPlanner`."""
        plan = self.best_plan(tensors, world_size, times, link)
        step_s = predict(plan, tensors, times, link).step_s
        what = described(plan, tensors)
        return NoContest(plan, f"mergecomp: {what}, predicted {1e3 * step_s:.3g} ms/step")

    def best_plan(
        self, tensors: Sequence[TensorSpec], world_size: int, times: ModelTimes, link: LinkCost
    ) -> BucketPlan:
        """Of the unbeaten groupings the one that `predict` finds fastest, early gathers included.

        Of several (nearly) as fast the one with the fewest buckets.

        The programme knows nothing of early gathers, which small buckets suit better: so it is run
        again with groups of at most 1/8 to 1/64 of all bytes. `times` are those without encoding.
        """
        codec = Codec(self.encode_alpha_s, self.encode_beta_s)
        per_byte_s = link.beta_s * (world_size - 1) / world_size
        families = [
            pre_merged([_piece_of(tensor, times) for tensor in family], self.max_pieces)
            for family in backward_order(tensors, times)
        ]
        chosen = [[[index for piece in family for index in piece.indices]] for family in families]
        best = fuse_groups(self.name, tensors, world_size, _flat(chosen))
        for place, family in enumerate(families):
            plans: dict[tuple[float, int], tuple[BucketPlan, list[list[int]]]] = {}
            nbytes = sum(piece.nbytes for piece in family)
            for grouping in (
                grouping
                for share in _SHARES
                for grouping in best_groupings(
                    family, link.alpha_s, per_byte_s, codec, share * nbytes
                )
            ):
                groups = chosen[place] = _groups_of(family, grouping)
                plan = fuse_groups(self.name, tensors, world_size, _flat(chosen))
                encoded = _with_encoding(times, family, grouping, codec)
                plan = choose_early(plan, tensors, encoded, link)
                step_s = predict(plan, tensors, encoded, link).step_s
                plans[step_s, len(plans)] = plan, groups
            enough_s = (1 + _MIN_GAIN) * min(plans)[0]
            good = [(len(plan[0].buckets), *at) for at, plan in plans.items() if at[0] <= enough_s]
            best, chosen[place] = plans[min(good)[1:]]
        return best


def _flat(chosen: Sequence[list[list[int]]]) -> list[list[int]]:
    return [group for groups in chosen for group in groups]


def _piece_of(tensor: TensorSpec, times: ModelTimes) -> Piece:
    return Piece(
        (tensor.index,),
        tensor.numel * tensor.itemsize,
        times.ready_s.get(tensor.index, times.backward_s),
        times.first_use_s.get(tensor.index, times.forward_s),
    )


def _groups_of(pieces: Sequence[Piece], grouping: Grouping) -> list[list[int]]:
    cuts = [0, *grouping.cuts()]
    return [
        [index for piece in pieces[start:stop] for index in piece.indices]
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]


def _with_encoding(
    times: ModelTimes, pieces: Sequence[Piece], grouping: Grouping, codec: Codec
) -> ModelTimes:
    """`times` with each group's encoding before its launch, and all of it in backward."""
    ready_s, nbytes, encoded_s = dict(times.ready_s), 0, 0.0
    cuts = [0, *grouping.cuts()]
    for count, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False), start=1):
        nbytes += sum(piece.nbytes for piece in pieces[start:stop])
        encoded_s = count * codec.alpha_s + codec.beta_s * nbytes
        for piece in pieces[start:stop]:
            for index in piece.indices:
                ready_s[index] = times.ready_s.get(index, times.backward_s) + encoded_s
    return replace(times, ready_s=ready_s, backward_s=times.backward_s + encoded_s)
