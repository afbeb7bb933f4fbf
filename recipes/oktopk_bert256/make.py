"""Ok-Topk's headline: 3.29x to 12.95x for BERT on 256 GPUs (Li and Hoefler, arXiv 2201.07598)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import compressed
from lightning_dear.apps.recipe.oktopk_cases import (
    AT_ONCE,
    DENSE,
    DENSE_AT_ONCE,
    OURS,
    PUBLISHED,
    Case,
    Steps,
    cases_of,
    titled,
)
from lightning_dear.apps.recipe.oktopk_recorded import from_elsewhere
from lightning_dear.apps.recipe.oktopk_volumes import published, volumes
from lightning_dear.apps.recipe.pictures import grouped_bars
from lightning_dear.apps.recipe.report import Report, Table
from lightning_dear.apps.recipe.sibling import command_of, measured, measured_on
from lightning_dear.apps.recipe.simulated import listed, networks_of
from lightning_dear.apps.recipe.steps import measured_steps
from lightning_dear.planning import ThresholdFusion
from lightning_dear.simulator.ranking import ranked_with
from lightning_dear.simulator.strategies import Strategy, planned, resolve_strategy
from lightning_dear.studies.device_costs import Device


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Simulate all cases on all clusters, and measure the sibling if asked to."""
    cases, ways = cases_of(cfg), _ways(float(cfg.ours_cap_mb))
    others = [name for name in listed(cfg, "sparse") if name != OURS]
    if not others:
        raise ValueError("sparse names no other scheme than Ok-Topk; add one, such as topka.")
    runs = [one for case in cases for one in _simulated(cfg, case, ways, [OURS, *others])]
    siblings = measured(cfg, recorded, folder)
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    said, elsewhere = from_elsewhere(recorded.parent / "compression")
    schemes = [DENSE, OURS, *others]
    tables = [
        *published(schemes),
        volumes(runs, schemes),
        _step_table(runs, ways, schemes),
        _gains(runs, ways),
        *(
            measured_steps(rows, "ddp", f"`{command_of(cfg.siblings[name])}` on {where}.")
            for name, rows in siblings.items()
        ),
        *elsewhere,
    ]
    summary = [*(_said(run) for run in runs), *_verdicts(runs, cfg), *said]
    rows = [row for run in runs for row in _as_rows(run)]
    return Report(summary, tables, _picture(runs, ways), {"simulated": rows})


def _ways(cap_mb: float) -> list[Strategy]:
    capped = Strategy(
        f"dear_{cap_mb:g}mb",
        f"ours, in buckets of {cap_mb:g} MiB",
        planned(ThresholdFusion(bucket_cap_mb=cap_mb).plan),
        compresses="halves",
    )
    return [AT_ONCE, resolve_strategy("dear"), capped, resolve_strategy("ddp")]


def _simulated(
    cfg: DictConfig, case: Case, ways: Sequence[Strategy], sparse: Sequence[str]
) -> Iterator[Steps]:
    device = Device(float(cfg.device.kernel_s), float(cfg.device.bytes_per_s))
    made = [
        compressed(case.workload, case.compressor(name), device, case.world_size) for name in sparse
    ]
    for cluster, network in networks_of(cfg, case.world_size).items():
        rows = ranked_with(ways, [case.workload], network)
        # DDP has no hook for any of them.
        rows += ranked_with([way for way in ways if way.name != "ddp"], made, network)
        of = {(row.strategy.name, row.compressor): row for row in rows}
        yield Steps(case, cluster, cfg.get("cluster") is None, of)


def _as_rows(run: Steps) -> Iterator[dict[str, Any]]:
    for (way, scheme), row in run.of.items():
        yield {
            "case": run.case.label,
            "cluster": run.cluster,
            "strategy": way,
            "scheme": scheme,
            "step_s": row.step.step_s,
            "alone_s": run.alone_s,
            "sent_bytes": row.step.sent_bytes,
        }


# --- what came out --------------------------------------------------------------------------------


def _said(run: Steps) -> str:
    beside = f" (published: {PUBLISHED[0]}x to {PUBLISHED[1]}x)" if run.is_claimed else ""
    best, worst = (run.others("at_once")[place] for place in (0, -1))
    ours = min(
        (way for way, scheme in run.of if scheme == OURS and way != "at_once"),
        key=lambda way: run.step_s(way, OURS),
    )
    return (
        f"`{run.case.label}` on `{run.cluster}`{beside}. Simulated with the authors' schedule,"
        f" Ok-Topk is {run.times('at_once', DENSE_AT_ONCE):.2f} times as fast as dense after"
        f" backward, {run.times('at_once', ('ddp', DENSE)):.2f} times as `ddp`, and"
        f" {run.times('at_once', best):.2f} (`{best[1]}`) to {run.times('at_once', worst):.2f}"
        f" (`{worst[1]}`) times as the other sparse schemes; `{ours}` with it is"
        f" {run.times(ours, ('ddp', DENSE)):.2f} times as fast as `ddp` and"
        f" {run.times(ours, ('at_once', OURS)):.2f} times as Ok-Topk with theirs."
    )


def _verdicts(runs: Sequence[Steps], cfg: DictConfig) -> Iterator[str]:
    claimed = [run for run in runs if run.is_claimed]
    for run in claimed:
        gains = [run.times("at_once", key) for key in run.compared]
        yield (
            f"`{run.case.label}` on `{run.cluster}`: {PUBLISHED[0]}x to {PUBLISHED[1]}x"
            f" {verdict(gains)} ({min(gains):.2f}x to {max(gains):.2f}x), with"
            f" {1e3 * run.alone_s:.0f} ms of computing, {cfg.device.bytes_per_s / 1e9:g} GB/s of"
            f" memory, {1e6 * cfg.device.kernel_s:g} us a kernel, and links at their nominal rate."
        )
    for run in {run.cluster: run for run in claimed}.values():
        beyond = [run.beyond(key) for key in run.compared]
        yield (
            f"Simulated with the authors' schedule on `{run.cluster}` with {run.case.world_size}"
            f" ranks, Ok-Topk takes {1e3 * (run.step_s('at_once', OURS) - run.alone_s):.1f} ms"
            f" beyond computing, and the others {min(beyond):.2f} to {max(beyond):.2f}"
            f" times that; {_needed(run)}."
        )


def verdict(gains: Sequence[float]) -> str:
    """Return in words how gains over several others compare with the published range."""
    least, most = PUBLISHED
    if min(gains) >= least and max(gains) >= most:
        return "is reproduced in simulation"
    if max(gains) >= least:
        return "is reproduced in part in simulation"
    return "is not reproduced in simulation"


def _needed(run: Steps) -> str:
    """How short computing would have to be, behind which neither step hides anything."""
    least = PUBLISHED[0]
    dense_s, own_s = (run.step_s("at_once", name) - run.alone_s for name in (DENSE, OURS))
    alone_s = (dense_s - least * own_s) / (least - 1)
    if alone_s < 0:
        return f"{least}x over dense is out of reach, however short computing is"
    return f"{least}x over dense takes computing of at most {1e3 * alone_s:.0f} ms"


def _step_table(runs: Sequence[Steps], ways: Sequence[Strategy], schemes: Sequence[str]) -> Table:
    rows = []
    for run in runs:
        for way in (one.name for one in ways):
            has = [(way, name) in run.of for name in schemes]
            steps = [
                f"{1e3 * run.step_s(way, name):.1f}" if there else "-"
                for name, there in zip(schemes, has, strict=True)
            ]
            rows.append([run.case.label, run.cluster, f"{1e3 * run.alone_s:.1f}", way, *steps])
    note = " ".join(f"`{way.name}` is {way.what}." for way in ways)
    titles = ["case", "cluster", "one rank", "schedule", *map(titled, schemes)]
    return Table("simulated", "step, ms", titles, rows, note)


def _gains(runs: Sequence[Steps], ways: Sequence[Strategy]) -> Table:
    dense = [DENSE_AT_ONCE, ("ddp", DENSE), ("dear", DENSE)]
    rows = []
    for run in runs:
        for way in [one.name for one in ways if (one.name, OURS) in run.of]:
            best, worst = (run.others(way)[place] for place in (0, -1))
            gains = [f"{run.times(way, other):.2f}" for other in dense]
            gains += [f"{run.times(way, other):.2f} ({other[1]})" for other in (best, worst)]
            claim = "{}-{}".format(*PUBLISHED) if run.is_claimed and way == "at_once" else "-"
            rows.append([run.case.label, run.cluster, way, *gains, claim])
    titles = ["case", "cluster", "schedule", *(f"over {way}" for way, _ in dense)]
    titles += ["over the best other sparse", "over the worst", "published, over all"]
    note = "Dense in the first three columns; other sparse schemes are scheduled alike."
    return Table("simulated", "how many times as fast Ok-Topk is", titles, rows, note)


def _picture(runs: Sequence[Steps], ways: Sequence[Strategy]) -> object:
    order = [way.name for way in ways]
    keys = [key for key in runs[0].of if key[0] == "at_once" or key[1] in (DENSE, OURS)]
    keys.sort(key=lambda key: (key[1] == OURS, order.index(key[0]), key[1]))
    panels = {}
    for cluster in dict.fromkeys(run.cluster for run in runs):
        own = [run for run in runs if run.cluster == cluster]
        best_s = [min(row.step.step_s for row in run.of.values()) for run in own]
        panels[cluster] = {
            f"{way} + {titled(scheme)}": [
                run.step_s(way, scheme) / best for run, best in zip(own, best_s, strict=True)
            ]
            for way, scheme in keys
        }
    labels = list(dict.fromkeys(run.case.label for run in runs))
    title = "Ok-Topk beside dense and other sparse all-reduces, simulated"
    return grouped_bars(panels, labels, "step over the best", title, 1)
