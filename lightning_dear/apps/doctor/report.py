"""What the doctor prints: rows of the table, and the sentence about DDP."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_dear.apps.doctor.measuring import Compute, Pair
from lightning_dear.planning import LinkCost

NEGLIGIBLE_SHARE = 0.1
"""Share of a step below which hiding communication better is not worth a change."""

SLOW_PAIR_RATIO = 2.0
"""How many times slower than the median a pair must be to be called slow."""

_MB = 1e6


def link_rows(cost: LinkCost, pairs: Sequence[Pair], world_size: int) -> list[tuple[str, str]]:
    """Return rows for what all ranks' exchanges cost at once, and for the slowest pair."""
    all_reduce = cost.all_reduce or cost
    slowest = min(pairs, key=lambda pair: pair.rate)
    ratio = median(pair.rate for pair in pairs) / slowest.rate
    remark = f", {ratio:.1f} times slower than the median" if ratio >= SLOW_PAIR_RATIO else ""
    has_all = len(pairs) == world_size * (world_size - 1) // 2
    which = "" if has_all else f", of {len(pairs)} neighbouring pairs"
    pair = f"ranks {slowest.low} and {slowest.high}: {_rate(slowest.rate)}{remark}"
    return [
        ("start of an exchange, all at once", f"{cost.alpha_s * 1e6:.0f} us"),
        ("rate of each rank, all at once", _rate_of(cost)),
        ("the same in the backend's all-reduces", _rate_of(all_reduce)),
        (f"slowest pair{which}", pair),
    ]


def compute_rows(compute: Compute) -> list[tuple[str, str]]:
    """Return rows for the gradients and the slowest rank's forward and backward."""
    return [
        ("gradients", f"{compute.gradient_bytes / _MB:.2f} MB"),
        (f"forward (median of {compute.num_steps})", _milli(compute.forward_s)),
        (f"backward (median of {compute.num_steps})", _milli(compute.backward_s)),
    ]


def verdict(
    world_size: int, compute: Compute, cost: LinkCost | None, num_accumulated: int = 1
) -> str:
    """Say whether plain DDP would do, with the figures.

    Args:
        world_size: Number of ranks.
        compute: The slowest rank's.
        cost: Of exchanges; None at one rank. What ours cost is said of DDP's all-reduces, too.
        num_accumulated: Batches for each optimizer step, of which only the last communicates.
    """
    if cost is None:
        return "One rank sends nothing: strategy=single would do as well."
    sent_s = 2 * cost.reduce_scatter_s(compute.gradient_bytes, world_size)
    computed_s = compute.total_s * num_accumulated
    share = sent_s / (sent_s + computed_s)
    figures = (
        f"Communication is {share:.0%} of a step ({_milli(sent_s)} beside {_milli(computed_s)} of"
        " forward and backward)"
    )
    if share < NEGLIGIBLE_SHARE:
        return f"{figures}: strategy=ddp would do as well."
    ddp, dear = (
        _milli(max(0.0, sent_s - hidden_s)) for hidden_s in (compute.backward_s, compute.total_s)
    )
    said = (
        f"{figures}. At best strategy=ddp, which hides it behind backward, leaves {ddp} of it, and"
        f" strategy=dear, behind backward and the next forward, {dear}: time both."
    )
    if sent_s > compute.total_s:
        said += " Larger batches or accumulate_grad_batches save more than either."
    return said


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate_of(cost: LinkCost) -> str:
    return _rate(1 / cost.beta_s) if cost.beta_s else "too fast to tell"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _MB:.2f} MB/s"
