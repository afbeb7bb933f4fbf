"""What ``dear-plan`` says: the table, the advice, and the curves."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_dear.simulator import Network, Workload
from lightning_dear.simulator.program import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from lightning_dear.simulator.ranking import Ranked, Scaled, alone_s
from lightning_dear.simulator.strategies import ALONE
from lightning_dear.studies.table import MISSING, format_table
from lightning_dear.workloads.replay.profile import PROFILES

_TITLES = (
    "strategy",
    "step ms",
    "band ms",
    "x ddp",
    "scaling",
    "waits for gradients ms",
    "for parameters ms",
    "MB/step",
    "GB/rank",
    "",
)
_BASELINE = "ddp"
_BAND = "Band: with the shortest and with the longest of all exchanges that calibrate timed."
_NO_BAND = "No band: these links were not measured (dear-plan calibrate measures yours)."
Bands = Mapping[str, tuple[float, float]]
"""A row's name -> seconds of its step at the best and at the worst."""

_OF_BAND = ("least_s", "most_s")
_EMULATED_MBIT, _MOST_MBIT = 1e3, 1e6
"""What this machine's links are shaped to at most; what counts as fast as can be."""

_WORTH_SAYING = 0.01
"""Share of a step by which something that cannot be run here must be faster."""


def describe(workload: Workload, network: Network, source: str) -> str:
    """Return in a few lines what is predicted for what."""
    times, link = workload.times, network.outer_link
    rate = f"{8 / link.beta_s / 1e9:.3g} Gb/s" if link.beta_s else "of any rate"
    place = "within the node" if network.num_nodes == 1 else "between nodes"
    has_codec = not workload.codecs.are_none
    codec = f"; ours with compressor={workload.compressor}" if has_codec else ""
    return "\n".join(
        [
            f"{workload.name}: {workload.nbytes / 1e6:.1f} MB, forward {_ms(times.forward_s)} ms,"
            f" backward {_ms(times.backward_s)} ms{codec}",
            f"{network.world_size} ranks on {network.num_nodes} node(s); links {place}: {rate},"
            f" {link.alpha_s * 1e6:.3g} us a message",
            f"Network: {source}",
            "SIMULATED: nothing here was measured on that cluster.",
        ]
    )


def cells(
    row: Ranked, workload: Workload, ddp_s: float | None, band: tuple[float, float] | None
) -> list[str]:
    """Return a row of the table."""
    step = row.step
    backward_s = step.exposed_s.get(REDUCE_SCATTER, 0.0)
    whole_s = step.exposed_s.get(ALL_REDUCE, 0.0)
    return [
        row.name,
        _ms(step.step_s),
        MISSING if band is None else f"{_ms(band[0])}-{_ms(band[1])}",
        "-" if ddp_s is None else f"{ddp_s / step.step_s:.3f}",
        f"{row.efficiency(alone_s(workload)):.1%}",
        _ms(backward_s + whole_s),
        _ms(step.exposed_s.get(ALL_GATHER, 0.0)),
        f"{step.sent_bytes / 1e6:.1f}",
        f"{row.memory_bytes / 1e9:.2f}",
        row.strategy.what,
    ]


def format_rows(rows: Sequence[Ranked], workload: Workload, bands: Bands) -> str:
    """Return the table, the fastest first, and what its band is."""
    ddp_s = _step_of(rows, _BASELINE)
    lines = [cells(row, workload, ddp_s, bands.get(row.name)) for row in rows]
    return f"{format_table(_TITLES, lines)}\n{_BAND if bands else _NO_BAND}"


def advice(
    best: Ranked,
    rows: Sequence[Ranked],
    network: Network,
    profile: str,
    compute_s: float | None = None,
) -> str:
    """Return what to use, why, and the overrides to paste."""
    ddp_s = _step_of(rows, _BASELINE)
    if best.name == _BASELINE:
        gain = best.step.step_s / min(row.step.step_s for row in rows if _can_run(row)) - 1
        lines = [f"DDP will do: nothing that can be run here is more than {gain:.1%} faster."]
    else:
        lines = [f"Use {best.name}: {best.strategy.what}."]
        if ddp_s is not None:
            lines.append(f"A step under DDP takes {ddp_s / best.step.step_s:.2f} times as long.")
    others = [row for row in rows if not _can_run(row) and row.strategy.name != ALONE]
    if others and (1 + _WORTH_SAYING) * others[0].step.step_s < best.step.step_s:
        lines.append(f"({others[0].name} would be faster, but cannot be run here.)")
    lines.append(f"dear-train {best.overrides}")
    if best.strategy.name.startswith("dear") and profile in PROFILES:
        scale, rate_mbit = _emulated(network)
        lines.append(
            "Try it here, without the cluster (Linux, iproute2): dear-bench cluster=emulated"
            f" cluster.rate_mbit={rate_mbit} model.profile={profile} model.scale={scale}"
            + (f" model.compute_s={compute_s}" if compute_s is not None else "")
        )
    return "\n".join(lines)


def _emulated(network: Network) -> tuple[int, int]:
    """By what to divide a model, and a link's rate (Mb/s), so that this machine can emulate it."""
    rate_mbit = 8e-6 / max(network.outer_link.beta_s, 8e-6 / _MOST_MBIT)
    scale = 1
    while rate_mbit / scale > _EMULATED_MBIT:
        scale *= 2
    return scale, max(round(rate_mbit / scale), 1)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _can_run(row: Ranked) -> bool:
    return row.overrides is not None


def _step_of(rows: Sequence[Ranked], name: str) -> float | None:
    return next((row.step.step_s for row in rows if row.name == name), None)


def write_rows(path: Path, rows: Sequence[Ranked], workload: Workload, bands: Bands) -> None:
    """Write all figures as CSV, in seconds and bytes."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        kinds = (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER)
        exposed = [f"exposed_{kind}_s" for kind in kinds]
        writer.writerow(
            ["strategy", "step_s", *_OF_BAND, "efficiency", *exposed, "sent_bytes", "memory_bytes"]
        )
        for row in rows:
            waits = [row.step.exposed_s.get(kind, 0.0) for kind in kinds]
            efficiency = row.efficiency(alone_s(workload))
            step_s, sent = row.step.step_s, row.step.sent_bytes
            band = bands.get(row.name, (None, None))
            writer.writerow([row.name, step_s, *band, efficiency, *waits, sent, row.memory_bytes])


def write_scaling(folder: Path, scaled: Sequence[Scaled], workload: Workload) -> None:
    """Write ``scaling.csv``, and ``scaling.png``: efficiency over the number of ranks."""
    with (folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "world_size", "step_s"])
        writer.writerows([one.name, one.world_size, one.step_s] for one in scaled)
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, name in enumerate(dict.fromkeys(one.name for one in scaled)):
        own = [one for one in scaled if one.name == name]
        is_ours = name.startswith("dear")
        axes.plot(
            [one.world_size for one in own],
            [100 * alone_s(workload) / one.step_s for one in own],
            label=name,
            marker="o" if is_ours else ".",
            color=colormaps["tab20"](number % 20),
            linewidth=2.0 if is_ours else 1.0,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("ranks")
    axes.set_ylabel("one rank's step over this step, %")
    axes.set_ylim(0, max(105, *(105 * alone_s(workload) / one.step_s for one in scaled)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"{workload.name}: weak scaling, simulated", fontsize=10)
    figure.savefig(folder / "scaling.png", dpi=130)
