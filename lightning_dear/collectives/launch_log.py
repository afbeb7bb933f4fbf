"""A log of the collectives that this rank has launched, to find a rank that launches others."""

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import combinations, product
from typing import NamedTuple

import torch

TAGS_OF_ONE_OPTIMIZER = 1 << 12
"""Number of tags for the buckets of one optimizer; optimizer n has those from n times this on."""

BUCKET_TAGS = 1 << 19
"""Tags of the first messages of all buckets are below this. This bit marks messages of no bucket.
Higher bits say which message of a bucket it is."""

NORM_TAG = BUCKET_TAGS
"""Tag of the message that adds up the gradient norm."""

UNHELD_TAG = BUCKET_TAGS + 1
"""Tag of the messages that average gradients of parameters that no optimizer holds."""

WEIGHTS_TAG = BUCKET_TAGS + 2
"""Tag of the messages by which ranks exchange the weights of their batches."""

_OF_NO_BUCKET = {
    NORM_TAG: "the gradient norm",
    UNHELD_TAG: "gradients that no optimizer holds",
    WEIGHTS_TAG: "the weights of batches",
}

BUFFERS_TAG = 1 << 30
"""Added to tags of module buffers, which belong to no bucket."""

_ALL = -1
_NUM_KEPT = 64
_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005


class Logged(NamedTuple):
    """What must be equal on all ranks about one launch.

    Attributes:
        call: Name of the collective.
        group: Number of the process group.
        dtype: Type of the elements.
        elements: Number of elements. None means that it may differ by rank.
        tag: Tag of the message, which names its bucket.
        has_tag: Whether the backend matches the message by its tag. If not, it matches it by order.
    """

    call: str
    group: int
    dtype: torch.dtype
    elements: int | None
    tag: int
    has_tag: bool

    def __str__(self) -> str:
        optimizer, bucket = divmod(self.tag, TAGS_OF_ONE_OPTIMIZER)
        of = f"bucket {bucket} of optimizer {optimizer}" if optimizer else f"bucket {bucket}"
        if self.tag >= BUCKET_TAGS:
            of = _OF_NO_BUCKET.get(self.tag, f"tag {self.tag}")
        parts = [f"{self.call.replace('_', '-')} of {of}", str(self.dtype).removeprefix("torch.")]
        parts += [] if self.elements is None else [f"{self.elements} elements"]
        return ", ".join([*parts, f"group {self.group}"])


def hash_of(text: str) -> int:
    """Returns a hash of `text` from 0 to 2^64 - 1, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


Report = Sequence[tuple[int, Logged]]
"""Pairs (number, launch); see `LaunchLog.report`."""


LastLaunches = Sequence[tuple[str, int, int]]
"""Triples, in order: launch, how often it was launched by then, number of the optimizer. Launches
of one optimizer have the same order on all ranks. See `LaunchLog.last`. The number `_ALL` means
that the launch keeps its order with all others."""


class _Kind:
    """All equal launches of this rank.

    Args:
        launch: One of them.

    Attributes:
        launch: Same as the argument.
        hash: Its hash, the same on all ranks.
        owner: Number of the optimizer whose bucket it is of. `_ALL` if it is of no bucket.
        times: How often it was launched.
    """

    def __init__(self, launch: Logged) -> None:
        self.launch, self.hash = launch, hash_of(repr(launch))
        is_of_bucket = not launch.tag & BUCKET_TAGS and launch.tag < BUFFERS_TAG
        self.owner = launch.tag % BUCKET_TAGS // TAGS_OF_ONE_OPTIMIZER if is_of_bucket else _ALL
        self.times = 0


class LaunchLog:
    """What this rank has launched so far, as a number to compare between ranks, and as lists.

    Where messages are matched by order, all ranks must launch in one order, and the number depends
    on the order. Where they are matched by tag, ranks may launch in other orders, and the number is
    a sum. There the launches of each optimizer are counted apart, because ranks may launch those of
    two optimizers in another order.

    Args:
        matches_by_tag: Whether the backend matches most messages by tag (gloo).
    """

    def __init__(self, *, matches_by_tag: bool) -> None:
        self._matches_by_tag = matches_by_tag
        # Optimizer -> number of the launches that are matched by order, and of those by tag.
        self._orders, self._sums = Counter[int](), Counter[int]()
        self._kinds: dict[Logged, _Kind] = {}
        # Number of the launch, its kind, and how often it was launched by then.
        self._last: deque[tuple[int, _Kind, int]] = deque(maxlen=_NUM_KEPT)
        self._num_launched = 0
        # Gathers may be launched by another thread than the training's.
        self._lock = threading.Lock()

    def add(self, launch: Logged) -> None:
        """Notes a launch of this rank."""
        with self._lock:
            if (kind := self._kinds.get(launch)) is None:
                kind = self._kinds[launch] = _Kind(launch)
            self._num_launched += 1
            kind.times += 1
            self._last.append((self._num_launched, kind, kind.times))
            owner = kind.owner if self._matches_by_tag else _ALL
            if launch.has_tag:
                self._sums[owner] += kind.hash
            else:
                self._orders[owner] = (self._orders[owner] * _FACTOR + kind.hash) & _MASK

    def total(self, optimizer: int) -> int:
        """Returns the number that is equal on ranks that have launched alike, from 0 to 2^64 - 1.

        Args:
            optimizer: Number of the optimizer whose launches count, and those of no bucket. Where
                messages are matched by order, all launches count.
        """
        parts = (part[owner] for part in (self._orders, self._sums) for owner in (optimizer, _ALL))
        return sum(parts) & _MASK

    def report(self, optimizer: int) -> Report:
        """Returns what `difference` compares between ranks; see `total` for the argument.

        Where messages are matched by order these are the last launches, numbered from 1. Where they
        are matched by tag, it is how often each was launched.
        """
        with self._lock:
            if not self._matches_by_tag:
                return [(number, kind.launch) for number, kind, _ in self._last]
            kinds = [one for one in self._kinds.values() if one.owner in (optimizer, _ALL)]
            return [(one.times, one.launch) for one in kinds]

    def last(self) -> LastLaunches:
        """Returns the last launches, for `divergence`. Any thread may call.

        Where messages are matched by tag, ranks may launch messages of two optimizers in another
        order.
        """
        with self._lock:
            last = [(kind.launch, count, kind.owner) for _, kind, count in self._last]
        return [(str(one), count, own if one.has_tag else _ALL) for one, count, own in last]


def difference(reports: Sequence[Report], *, matches_by_tag: bool) -> str | None:
    """Describes the first launch in which ranks differ, by their reports, in rank order.

    None means that the reports tell no difference, as it may be if they begin after it.

    Args:
        reports: What `LaunchLog.report` has returned on each rank.
        matches_by_tag: Same as in `LaunchLog`.
    """
    if not matches_by_tag:
        tables = [dict(report) for report in reports]
        first = max(min(table, default=1) for table in tables)
        last = max(max(table, default=0) for table in tables)
        for number in range(first, last + 1):
            launches = [table.get(number, "nothing") for table in tables]
            if len({*launches}) > 1:
                said = [f"{launch} on rank {rank}" for rank, launch in enumerate(launches)]
                return f"launch {number} is {'; '.join(said)}"
        return None
    counts = [{launch: count for count, launch in report} for report in reports]
    for launch in {launch: None for table in counts for launch in table}:
        numbers = [table.get(launch, 0) for table in counts]
        if len({*numbers}) > 1:
            said = [f"{number} times on rank {rank}" for rank, number in enumerate(numbers)]
            return f"{launch} was launched {', '.join(said)}"
    return None


def divergence(last: Mapping[int, LastLaunches]) -> str | None:
    """Describes how two ranks wait for each other: each has launched what the other has not.

    None means that there are no such ranks, as far as their last launches tell: ranks that launch
    alike may be at different launches.

    Args:
        last: Rank -> what `LaunchLog.last` has returned there.
    """
    for one, other in combinations(sorted(last), 2):
        lacking = _lacking(last[one], last[other]), _lacking(last[other], last[one])
        for (own, _, order), (their, _, other_order) in product(*lacking):
            if order == other_order or _ALL in (order, other_order):
                return (
                    f"Ranks may have launched different messages: rank {one} {own}, and rank"
                    f" {other} {their}. Call backward, step and what exchanges equally often and"
                    " in the same order on all ranks."
                )
    return None


def _lacking(launches: LastLaunches, others: LastLaunches) -> LastLaunches:
    """Returns those `launches` that are known to be missing in another rank's `others`."""
    counts = {launch: count for launch, count, *_ in others}
    # If the other rank's list has none of them, they may be older than the list, unless this was
    # the first one.
    return [one for one in launches if counts.get(one[0], one[1] if one[1] > 1 else 0) < one[1]]
