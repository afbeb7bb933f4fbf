"""What the doctor prints: rows of the table, and the sentence about DDP."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dear.apps.doctor.compute_probe import Compute
from lightning_dear.apps.doctor.link_rates import PairProbe

NEGLIGIBLE_SHARE = 0.1
"""Share of a step below which hiding communication better is not worth a change."""

SLOW_PAIR_RATIO = 2.0
"""How many times slower than the median a pair must be to be called slow."""

_MB = 1e6


@dataclass(frozen=True)
class Links:
    """What the network measured.

    Attributes:
        pairs: Every measured pair of ranks.
        together_rate: Bytes per second that a rank sends while all do; the slowest rank's.
        backend: Of the process group: "gloo" or "nccl".
    """

    pairs: list[PairProbe]
    together_rate: float
    backend: str


def link_rows(links: Links, world_size: int) -> list[tuple[str, str]]:
    """Return rows for latency, rates by size, the slowest pair, and all ranks at once."""
    pairs = links.pairs
    slowest = min(pairs, key=lambda pair: pair.rate)
    farthest = max(pairs, key=lambda pair: pair.round_trip_s)
    all_pairs = len(pairs) == world_size * (world_size - 1) // 2
    which = "all pairs" if all_pairs else f"{len(pairs)} neighbouring pairs"
    rows = [
        ("backend", links.backend),
        (
            f"round trip, median of {which}",
            f"{_micro(median(pair.round_trip_s for pair in pairs))};"
            f" slowest {_micro(farthest.round_trip_s)} (ranks {_and(farthest)})",
        ),
    ]
    for size in sorted({size for pair in pairs for size in pair.rates}):
        rates = [pair.rates[size] for pair in pairs if size in pair.rates]
        rows.append((f"rate, messages of {_kib(size)}, median", _rate(median(rates))))
    rows.append(("slowest pair", f"ranks {_and(slowest)}: {_rate(slowest.rate)}{_remark(pairs)}"))
    rows.append(("rate of each rank, all at once", _rate(links.together_rate)))
    return rows


def _remark(pairs: Sequence[PairProbe]) -> str:
    typical = median(pair.rate for pair in pairs)
    ratio = typical / min(pair.rate for pair in pairs)
    return f", {ratio:.1f} times slower than the median" if ratio >= SLOW_PAIR_RATIO else ""


def compute_rows(compute: Compute) -> list[tuple[str, str]]:
    """Return rows for the gradients and the slowest rank's forward and backward."""
    return [
        ("gradients", f"{compute.gradient_bytes / _MB:.2f} MB"),
        (f"forward (median of {compute.num_steps})", _milli(compute.forward_s)),
        (f"backward (median of {compute.num_steps})", _milli(compute.backward_s)),
    ]


def communication_s(world_size: int, gradient_bytes: int, rate: float) -> float:
    """Seconds to reduce-scatter and all-gather the gradients, which is what an all-reduce costs."""
    return 2 * (world_size - 1) / world_size * gradient_bytes / rate


def verdict(
    world_size: int, compute: Compute, links: Links | None, num_accumulated: int = 1
) -> str:
    """Say whether plain DDP would do, with the figures.

    Args:
        world_size: Number of ranks.
        compute: The slowest rank's.
        links: What the network measured; None at one rank.
        num_accumulated: Batches for each optimizer step, of which only the last communicates.
    """
    if links is None:
        return "One rank sends nothing: strategy=single would do as well."
    sent_s = communication_s(world_size, compute.gradient_bytes, links.together_rate)
    computed_s = compute.total_s * num_accumulated
    share = sent_s / (sent_s + computed_s)
    figures = (
        f"Communication is {share:.0%} of a step ({_milli(sent_s)} beside {_milli(computed_s)} of"
        " forward and backward)"
    )
    if share < NEGLIGIBLE_SHARE:
        return f"{figures}: strategy=ddp would do as well."
    if sent_s <= compute.backward_s:
        return (
            f"{figures}: worth hiding, and short enough for either: strategy=ddp has"
            f" {_milli(compute.backward_s)} of backward to hide it, strategy=dear"
            f" {_milli(compute.total_s)} of backward and the next forward. Time both."
        )
    left_s = {"ddp": sent_s - compute.backward_s, "dear": max(0.0, sent_s - compute.total_s)}
    bounds = (
        f"At best strategy=ddp, which hides it behind backward, leaves {_milli(left_s['ddp'])} of"
        " it, and strategy=dear, behind backward and the next forward,"
        f" {_milli(left_s['dear'])}"
    )
    if left_s["dear"] > 0:
        more = "larger batches or accumulate_grad_batches save more than either"
        return f"{figures}: neither strategy can hide all of it. {bounds}; {more}."
    return f"{figures}: more than strategy=ddp can hide. {bounds}."


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _rate(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / _MB:.0f} MB/s"
        if bytes_per_s >= 10 * _MB
        else f"{bytes_per_s / _MB:.2f} MB/s"
    )


def _kib(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"


def _and(pair: PairProbe) -> str:
    return f"{pair.ranks[0]} and {pair.ranks[1]}"
