"""Measures the links of a cluster: exchanges among all ranks, and each pair of ranks alone."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_dear.collectives.work import Collectives
from lightning_dear.planning.measured import LinkCost, sent_bytes
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.host_path import network_s
from lightning_dear.tuning.link_cost import measure_collectives

MAX_RANKS_FOR_ALL_PAIRS = 8
"""With more ranks only neighbours are measured: the number of pairs grows with the square."""

_LEAST_BYTES, _PAIR_BYTES = 1 << 23, (1 << 14, 1 << 23)
"""Least bytes of gradients for which exchanges are measured; least and most bytes of a message
between two ranks."""

_PAIR_S = 0.1
"""Seconds that a message between two ranks should take; its size is chosen accordingly."""

_NUM_ROUND_TRIPS = 3

_QUICK_BYTES, _TIMES_SENT = 1 << 22, 6
"""Most bytes of the message that finds the rate; how often `measure_collectives` exchanges the
bytes of a model, all its trains together."""


Rows = list[tuple[str, str]]
"""Titles and values, in the order to print."""


class Pair(NamedTuple):
    """The rate and latency between two ranks while no other rank sends.

    Attributes:
        low: The lower rank.
        high: The higher rank.
        rate: Median bytes per second of a message between them.
        round_trip_s: Median seconds in which a message of one byte goes there and back.
    """

    low: int
    high: int
    rate: float
    round_trip_s: float = 0.0


def measure_links(
    collectives: Collectives,
    device: torch.device,
    gradient_bytes: int,
    *,
    group: Any = None,
    budget_s: float = math.inf,
) -> tuple[LinkCost, list[Pair]]:
    """Measure exchanges among all ranks, and then each pair of ranks alone. Collective. Blocks.

    Args:
        collectives: Collectives like those of a training.
        device: Device of the parameters.
        gradient_bytes: Bytes of all gradients; the same on all ranks.
        group: Process group for messages between two ranks. None means the default group.
        budget_s: Seconds that all of it should take; smaller messages are then sent.

    Returns:
        The cost that planners use, the same on all ranks; and the pairs of which this rank is the
        lower one.
    """
    # Gloo sends between two ranks what lies on the host.
    place = torch.device("cpu") if collectives.wait_blocks_host else device
    pairs = pairs_to_measure(collectives.world.size)
    model_bytes, pair_s = max(gradient_bytes, _LEAST_BYTES), _PAIR_S
    if budget_s < math.inf:
        byte_s = network_s(collectives, torch.zeros(_QUICK_BYTES // 4, device=place))
        for_all_s, for_pairs_s = 0.8 * budget_s, 0.2 * budget_s
        sent_s = byte_s * sent_bytes(_TIMES_SENT, collectives.world.size)
        model_bytes = min(model_bytes, int(for_all_s / sent_s))
        pair_s = min(pair_s, for_pairs_s / (2 * (1 + _NUM_ROUND_TRIPS) * len(pairs)))
    cost = measure_collectives(collectives, device, model_bytes)
    least, most = _PAIR_BYTES
    nbytes = min(max(int(pair_s / cost.beta_s), least), most) if cost.beta_s else most
    messages = [torch.zeros(one, dtype=torch.uint8, device=place) for one in (1, nbytes)]
    send, receive = (partial(one, group=group) for one in (dist.send, dist.recv))
    found = []
    for low, high in pairs:
        dist.barrier(group)
        if collectives.world.rank == low:
            small_s, large_s = (_round_trips(one, high, send, receive) for one in messages)
            found.append(Pair(low, high, 2 * nbytes / median(large_s), median(small_s)))
        elif collectives.world.rank == high:
            for one in messages:
                _round_trips(one, low, receive, send)
    return cost, found


def pairs_to_measure(world_size: int) -> list[tuple[int, int]]:
    """Return all pairs of ranks; with more than `MAX_RANKS_FOR_ALL_PAIRS` only ring neighbours."""
    ranks = range(world_size)
    if world_size <= MAX_RANKS_FOR_ALL_PAIRS:
        return list(combinations(ranks, 2))
    return [*pairwise(ranks), (0, world_size - 1)]


def _round_trips(message: torch.Tensor, peer: int, *there_and_back: Any) -> list[float]:
    """Return the seconds of each round trip, without the first one, which is a warm-up."""
    clock = clock_of(message.device)
    marks = []
    for _ in range(1 + _NUM_ROUND_TRIPS):
        for pass_on in there_and_back:
            pass_on(message, peer)
        marks.append(clock.mark())
    return [end - begin for begin, end in pairwise(map(clock.seconds, marks))]


# --- output ------------------------------------------------------------------------------------


def link_rows(cost: LinkCost, pairs: Sequence[Pair], hosts: Sequence[int]) -> Rows:
    """Return rows for the cost of exchanges among all ranks, and for the slowest pairs of ranks.

    Args:
        cost: Cost of exchanges in which all ranks take part at once.
        pairs: Measured pairs: all, or only neighbours in the ring of ranks.
        hosts: Host number of each rank, as in `World`.
    """
    within = [pair for pair in pairs if hosts[pair.low] == hosts[pair.high]]
    kinds = {"within hosts": within, "between hosts": [one for one in pairs if one not in within]}
    what = "pairs" if 2 * len(pairs) == len(hosts) * (len(hosts) - 1) else "neighbouring pairs"
    return [
        ("latency of an exchange among all ranks", f"{cost.alpha_s * 1e6:.0f} us"),
        ("longest round trip between two ranks", milli(max(pair.round_trip_s for pair in pairs))),
        ("rate of each rank while all send", _rate_of(cost)),
        ("rate of each rank in the backend's all-reduces", _rate_of(cost.all_reduce or cost)),
        *((f"slowest pair {kind}", _slowest(some, what)) for kind, some in kinds.items() if some),
    ]


def _slowest(pairs: Sequence[Pair], what: str) -> str:
    low, high, rate, _ = min(pairs, key=lambda pair: pair.rate)
    median_rate = median(pair.rate for pair in pairs)
    others = f"; median of {len(pairs)} {what}: {_rate(median_rate)}" if len(pairs) > 1 else ""
    return f"ranks {low} and {high}: {_rate(rate)}{others}"


def _rate_of(cost: LinkCost) -> str:
    return _rate(1 / cost.beta_s) if cost.beta_s else "too fast to tell"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.2f} MB/s"


def milli(seconds: float) -> str:
    """Returns a duration in milliseconds, for people."""
    return f"{seconds * 1e3:.1f} ms"
