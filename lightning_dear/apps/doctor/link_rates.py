"""Measures the links between ranks, and lets ranks meet without waiting for each other for ever.

For `dear-train doctor=true`. Ranks meet at a key-value store, the one that torch's process groups
start from: a rank that does not come is then known by its number, which a collective cannot tell.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_dear.collectives.work import Collectives, shard_of

SIZES_BYTES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
"""Sizes of the messages whose rate is measured."""

MAX_RANKS_FOR_ALL_PAIRS = 8
"""Above, only neighbours are measured one by one: the number of pairs grows with the square."""

_PREFIX = "lightning_dear_doctor"
_NUM_PINGS = 20
_MAX_REPEATS = 5
_BUDGET_S = 1.0


class UnreachableError(ConnectionError):
    """Ranks did not meet in time; the message names them."""


@dataclass(frozen=True)
class PairProbe:
    """What one pair of ranks measured, alone on the network.

    Attributes:
        ranks: Both ranks, the lower first.
        round_trip_s: Median time of one byte there and back.
        rates: Bytes of a message -> median bytes per second in one direction. A size that would
            have taken too long is missing.
    """

    ranks: tuple[int, int]
    round_trip_s: float
    rates: dict[int, float]

    @property
    def rate(self) -> float:
        """Bytes per second of the largest message that was measured."""
        return self.rates[max(self.rates)]


class MeetingPoint:
    """Exchange of small values through the store that rank 0 (or torchrun) keeps.

    Args:
        address: Host of rank 0.
        port: Where the store listens.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long to wait for rank 0's host, and by default for every other rank.

    Raises:
        UnreachableError: If rank 0's host does not answer in time.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._place = f"{address}:{port}"
        # torchrun's agent keeps the store already, and tells so in this variable.
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                is_master=rank == 0 and not is_kept,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise UnreachableError(
                f"Rank {rank} could not reach rank 0 at {self._place} within {timeout_s:g} s"
                f" ({_first_line(error)}). Check that rank 0 runs, that MASTER_ADDR and"
                " MASTER_PORT name its host, and that no firewall closes that port."
            ) from None
        self._store = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]

    def exchange(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Every rank's `value` (plain, as JSON can hold), in rank order. Blocks.

        Raises:
            UnreachableError: Naming the ranks that did not come.
        """
        self.leave(topic, value)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        missing = [
            rank for rank in range(self.world_size) if not self._came(topic, rank, deadline_s)
        ]
        if missing:
            raise UnreachableError(
                f"{named(missing)} did not report to rank 0 at {self._place} within"
                f" {timeout_s:g} s (waiting for: {topic}). Check that the process runs and that"
                " its host reaches that address."
            )
        return [json.loads(self._store.get(f"{topic}/{rank}")) for rank in range(self.world_size)]

    def leave(self, topic: str, value: Any = None) -> None:
        """Hands in this rank's `value` without waiting for the others."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def _came(self, topic: str, rank: int, deadline_s: float) -> bool:
        left_s = max(0.01, deadline_s - time.monotonic())
        try:
            self._store.wait([f"{topic}/{rank}"], timedelta(seconds=left_s))
        except RuntimeError:
            return False
        return True


def named(ranks: list[int]) -> str:
    """Return the ranks for a sentence: `Rank 1`, or `Ranks 1, 3`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def pairs_to_measure(world_size: int) -> list[tuple[int, int]]:
    """All pairs of ranks; from `MAX_RANKS_FOR_ALL_PAIRS` + 1 ranks on only neighbours in a ring."""
    ranks = range(world_size)
    if world_size <= MAX_RANKS_FOR_ALL_PAIRS:
        return [(low, high) for low in ranks for high in ranks if low < high]
    return [*((rank, rank + 1) for rank in ranks[:-1]), (0, world_size - 1)]


def probe_pairs(rank: int, world_size: int, device: torch.device) -> list[PairProbe]:
    """Sends to and fro over the default process group, one pair at a time. Collective, blocks.

    Returns:
        The pairs whose lower rank is `rank`.
    """
    found = []
    for low, high in pairs_to_measure(world_size):
        dist.barrier()
        if rank == low:
            found.append(_lead(low, high, device))
        elif rank == high:
            _follow(low, device)
    return found


def probe_together(collectives: Collectives, device: torch.device, max_bytes: int) -> float:
    """Bytes per second that this rank sends while all ranks do, as in training. Collective, blocks.

    Moves a buffer as training moves a bucket: a reduce-scatter, then an all-gather.

    Args:
        collectives: Those of training.
        device: Where parameters live.
        max_bytes: Largest buffer to try; a slow link gets a smaller one.
    """
    rate = 0.0
    size = 256 * 1024
    while True:
        times_s = [_move(collectives, device, size) for _ in range(3)]
        # Every rank must come to the same decision, so all take the slowest one's time.
        time_s = max(collectives.all_gather_object(median(times_s)))
        moved_bytes = 2 * size * (collectives.world_size - 1) / collectives.world_size
        rate = moved_bytes / time_s
        if size * 8 > max_bytes or time_s * 8 * 3 > 3 * _BUDGET_S:
            return rate
        size *= 8


def _move(collectives: Collectives, device: torch.device, size: int) -> float:
    step = collectives.world_size * 64
    numel = -(-size // 4 // step) * step
    buffer = torch.zeros(numel, device=device)
    received = torch.zeros(collectives.scratch_numel(numel), device=device)
    own = shard_of(buffer, collectives.rank, collectives.world_size)
    dist.barrier()
    with _Clock(device) as clock:
        collectives.launch_reduce_scatter(buffer, received, own, 0).wait()
        collectives.launch_all_gather(buffer, 0).wait()
    return clock.elapsed_s


def _lead(low: int, high: int, device: torch.device) -> PairProbe:
    _round_trips(high, 1, 2, device)
    round_trip_s = median(_round_trips(high, 1, _NUM_PINGS, device))
    rates: dict[int, float] = {}
    for size in SIZES_BYTES:
        num_repeats = _repeats(size, rates)
        # The other rank cannot know how long this took here: it is told how often, 0 ends it.
        _tell(high, num_repeats, device)
        if num_repeats == 0:
            break
        rates[size] = 2 * size / median(_round_trips(high, size, num_repeats, device))
    return PairProbe((low, high), round_trip_s, rates)


def _repeats(size: int, rates: dict[int, float]) -> int:
    if not rates:
        return _MAX_REPEATS
    expected_s = 2 * size / rates[max(rates)]
    return int(min(_MAX_REPEATS, _BUDGET_S / expected_s))


def _follow(low: int, device: torch.device) -> None:
    _round_trips(low, 1, 2 + _NUM_PINGS, device, answers=True)
    for size in SIZES_BYTES:
        told = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(told, low)
        num_repeats = int(told.item())
        if num_repeats == 0:
            return
        _round_trips(low, size, num_repeats, device, answers=True)


def _tell(peer: int, number: int, device: torch.device) -> None:
    dist.send(torch.tensor([number], dtype=torch.int64, device=device), peer)


def _round_trips(
    peer: int, size: int, repeats: int, device: torch.device, *, answers: bool = False
) -> list[float]:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times_s = []
    for _ in range(repeats):
        with _Clock(device) as clock:
            if answers:
                dist.recv(message, peer)
                dist.send(message, peer)
            else:
                dist.send(message, peer)
                dist.recv(message, peer)
        times_s.append(clock.elapsed_s)
    return times_s


class _Clock:
    """Seconds between entering and leaving; on an accelerator its queue is empty at both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.elapsed_s = 0.0

    def __enter__(self) -> _Clock:
        self._synchronize()
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        self.elapsed_s = time.perf_counter() - self._start_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
