"""Predictions of ``dear-plan`` as a table, advice, and scaling curves."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.apps.plan.config import (
    backend_of,
    cases_of,
    network_for,
    workload_of,
    world_sizes_of,
)
from lightning_dear.apps.program import Program
from lightning_dear.planning.step import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from lightning_dear.simulator import Network, Workload, ranking, strategies
from lightning_dear.studies.files import Line, write_lines
from lightning_dear.studies.plot import picture
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.table import MISSING, format_table

_WIDTH = 100

KNOWN_ERROR = 0.06
"""Average error of predictions, as a share of a step; see docs/simulator.md."""

LOSSLESS, AS_GOOD, SAMPLES, LOSSY = "lossless", "as good as dense", "costs samples", "lossy"

_ARE_AS_GOOD = ("bf16", "fp16", "int8")
"""Compressors with which all runs of recipes/compression (digits, GPT) ended as well as dense."""

_QUALITY = (
    "lossless: the gradients of DDP. as good as dense: in our studies (recipes/compression). lossy:"
    " it may take more steps, or end worse; train a while with both before you use it. costs"
    " samples: about 1.5 to 2 times the steps for a small model; see docs/local_steps.md."
)


def quality_of(row: ranking.Ranked) -> str:
    """Return what training loses with the row's strategy and compressor."""
    if row.compressor not in ("none", *_ARE_AS_GOOD):
        return LOSSY
    if row.strategy.costs_samples:
        return SAMPLES
    return LOSSLESS if row.compressor == "none" else AS_GOOD


def _is_as_good(row: ranking.Ranked) -> bool:
    return quality_of(row) in (LOSSLESS, AS_GOOD)


_RIVALS = "lightning_dear.studies.competitors"

_SCRIPTS = {
    "ddp": ("DDPStrategy", ""),
    "ddp_bf16": (f"{_RIVALS}.Bf16DDPStrategy", ""),
    "wfbp": ("DDPStrategy", "bucket_cap_mb=1e-6"),
    "fsdp2": (f"{_RIVALS}.Fsdp2Strategy", ""),
    "dear_paper": ("DearStrategy", 'gather="gradients"'),
}
"""Name of a row -> class and options of its strategy. Others are `DearStrategy`."""


def script_of(row: ranking.Ranked, backend: str | None = None) -> str:
    """Return the Python expression that builds a Trainer with the row's strategy.

    Args:
        row: The row.
        backend: `process_group_backend` of the strategy. None means the usual one of the devices.
    """
    kind, given = _SCRIPTS.get(row.name, ("DearStrategy", ""))
    words = re.findall(r"(fusion|compressor)=(\w+)", row.overrides or "")
    words += [("process_group_backend", backend)] if backend else []
    options = ", ".join(filter(None, [given, *(f'{name}="{value}"' for name, value in words)]))
    if not options and row.name in ("ddp", "dear"):
        return f'Trainer(strategy="{row.name}")'
    return f"Trainer(strategy={kind}({options}))"


@dataclass(frozen=True)
class Report:
    """Predictions for one model on one cluster.

    Attributes:
        rows: Predicted strategies, the fastest first.
        workload: The model.
        network: Network of the cluster.
        enough: Share of a step by which a simpler strategy may be slower and still be advised.
        backend: Backend of the cluster, one of `network.BACKENDS`. With "gloo" it has no GPU,
            although encoding is counted for one.
        dear_s: Backend -> step of `strategy="dear"` over it, for backends that are compared.
    """

    rows: Sequence[ranking.Ranked]
    workload: Workload
    network: Network
    enough: float
    backend: str = "gloo"
    dear_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def best(self) -> ranking.Ranked:
        """The row to advise. It is lossy only if no other row can be advised.

        Rows that cost samples are never advised: their steps are no measure of a training.
        """
        dense = [row for row in self.rows if not row.strategy.costs_samples]
        return ranking.recommended(self._choices or dense, self.enough)

    @cached_property
    def _choices(self) -> list[ranking.Ranked]:
        """Rows that may be advised: dear-train can run them, as good, encoding time known."""
        can_run = [row for row in self.rows if row.overrides is not None]
        return [row for row in can_run if _is_as_good(row) and not self._is_guessed(row)]

    def _is_guessed(self, row: ranking.Ranked) -> bool:
        """Whether the row's encoding time was counted for a GPU that this cluster does not have."""
        return self.backend == "gloo" and row.compressor not in ("none", self.workload.compressor)

    def describe(self, source: str) -> str:
        """Return a few lines on the model and the cluster; `source` names its origin."""
        workload, times, network = self.workload, self.workload.times, self.network
        link = network.outer_link
        rate = f"{8 / link.beta_s / 1e9:.3g} Gb/s" if link.beta_s else "of any rate"
        place = "within the node" if network.num_nodes == 1 else "between nodes"
        codec = "" if workload.codecs.are_none else f"; ours with compressor={workload.compressor}"
        return _wrapped(
            f"{workload.name}: {workload.nbytes / 1e6:.1f} MB, forward {_ms(times.forward_s)} ms,"
            f" backward {_ms(times.backward_s)} ms{codec}",
            f"{network.world_size} ranks on {network.num_nodes} node(s); links {place}: {rate},"
            f" {link.alpha_s * 1e6:.3g} us a message",
            f"Network: {source}",
            "SIMULATED: nothing here was measured on that cluster.",
        )

    # --- the table --------------------------------------------------------------------------------

    def table(self) -> str:
        """Return the table of strategies that can be run, and notes.

        Rows that are not as good as dense are below a rule. Strategies that dear-train cannot run
        are listed in a note.
        """
        can_run = [row for row in self.rows if row.overrides is not None]
        safe = [row for row in can_run if _is_as_good(row)]
        lossy = [row for row in can_run if not _is_as_good(row)]
        titles = "strategy", "step ms", "waits ms", "x ddp", "scaling", "MB/step", ""
        lines = format_table(titles, [self._cells(row) for row in (*safe, *lossy)]).splitlines()
        if safe and lossy:
            # 3 lines come before the rows: a rule, the titles and another rule.
            lines.insert(3 + len(safe), lines[0])
        notes = [_QUALITY]
        if others := [row for row in self.rows if row.overrides is None]:
            listed = ", ".join(f"{row.name} {_ms(row.step.step_s)} ms" for row in others)
            notes.append(f"Cannot be run with dear-train, for comparing: {listed}.")
        return "\n".join([*lines, _wrapped(*notes)])

    def _cells(self, row: ranking.Ranked) -> list[str]:
        step, ddp_s = row.step, self._step_of(ranking.BASELINE)
        return [
            row.name,
            _ms(step.step_s),
            _ms(sum(step.exposed_s.values())),
            MISSING if ddp_s is None else f"{ddp_s / step.step_s:.3f}",
            f"{row.efficiency(ranking.alone_s(self.workload)):.1%}",
            f"{step.program.sent_bytes / 1e6:.1f}",
            quality_of(row),
        ]

    def _step_of(self, name: str) -> float | None:
        return next((row.step.step_s for row in self.rows if row.name == name), None)

    # --- the advice -------------------------------------------------------------------------------

    def advice(self) -> str:
        """Return the strategy to use, how sure that is, and the command to paste."""
        best, ddp_s = self.best, self._step_of(ranking.BASELINE)
        if best.name == ranking.BASELINE:
            gain = best.step.step_s / min(row.step.step_s for row in self._choices) - 1
            said = [f"DDP will do: nothing that can be advised is more than {gain:.1%} faster."]
        else:
            said = [f"Use {best.name} ({quality_of(best)})."]
            if ddp_s is not None:
                said.append(f"A step under DDP takes {ddp_s / best.step.step_s:.2f} times as long.")
        said.append(self._sureness())
        if any(map(self._is_guessed, self.rows)):
            said.append(
                "Encoding is counted for a GPU (device=...), and takes longer on this cluster's"
                " CPUs: so no compressor is advised; dear-plan calibrate compressor=int8 measures"
                " it."
            )
        if self.dear_s:
            said.append(_backends_said(self.dear_s))
        asked = "gloo" if self.backend == "staged" else None
        commands = [self._command(best), f"In a script: {script_of(best, asked)}"]
        return "\n".join([_wrapped(*said), *commands, *self._lossless_command()])

    def _sureness(self) -> str:
        best_s = self.best.step.step_s
        others = [row for row in self._choices if row is not self.best]
        near = [row.name for row in others if abs(row.step.step_s / best_s - 1) <= KNOWN_ERROR]
        name = self.best.name
        found = f"every other row differs from {name} by more than that"
        if near:
            found = f"{', '.join(near)}: no real difference from {name}; the other rows do differ"
        where = "" if self.backend == "gloo" else " with gloo on CPUs, and not known with GPUs"
        return f"Predictions are 4 to {100 * KNOWN_ERROR:.0f} % off on the average{where}: {found}."

    def _lossless_command(self) -> list[str]:
        lossless = [row for row in self._choices if row.compressor == "none"]
        if self.best.compressor == "none" or not lossless:
            return []
        row = ranking.recommended(lossless, self.enough)
        takes = f"{_ms(row.step.step_s)} ms ({row.name})"
        return [f"Without a compressor, {takes}: {self._command(row)}"]

    def _command(self, row: ranking.Ranked) -> str:
        path = " strategy.process_group_backend=gloo" if self.backend == "staged" else ""
        return f"dear-train {row.overrides}{path}"

    # --- files ------------------------------------------------------------------------------------

    def write_rows(self, path: Path) -> None:
        """Write all figures as CSV, in seconds and bytes."""
        kinds = (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER)
        figures = [
            {
                "strategy": row.name,
                "step_s": row.step.step_s,
                "efficiency": row.efficiency(ranking.alone_s(self.workload)),
                **{f"exposed_{kind}_s": row.step.exposed_s.get(kind, 0.0) for kind in kinds},
                "sent_bytes": row.step.program.sent_bytes,
                "quality": quality_of(row),
            }
            for row in self.rows
        ]
        write_lines(path, figures)

    def write_scaling(self, folder: Path, scaled: Sequence[tuple[int, ranking.Ranked]]) -> None:
        """Write ``scaling.csv``, and ``scaling.png``: efficiency over the number of ranks.

        Args:
            folder: Folder for both files.
            scaled: Numbers of ranks, each with a prediction for it.
        """
        from matplotlib import colormaps

        figures: list[Line] = []
        curves: dict[str, dict[int, float]] = {}
        for size, row in scaled:
            figures.append({"strategy": row.name, "world_size": size, "step_s": row.step.step_s})
            share = 100 * row.efficiency(ranking.alone_s(self.workload))
            curves.setdefault(row.name, {})[size] = share
        write_lines(folder / "scaling.csv", figures)
        with picture(folder / "scaling.png", [14]) as (axis,):
            axis.set_prop_cycle(color=colormaps["tab20"](range(20)))
            for name, shares in curves.items():
                width = 2.5 if name.startswith("dear") else 1.0
                axis.plot(shares.keys(), shares.values(), label=name, marker=".", linewidth=width)
            axis.set_xscale("log", base=2)
            sizes = list(dict.fromkeys(size for size, _ in scaled))
            axis.set_xticks(sizes, map(str, sizes))
            axis.set_xlabel("ranks")
            axis.set_ylabel("scaling efficiency, % (one rank's step over this step)")
            axis.set_ylim(bottom=0)
            # `picture` inverts the y axis for bars listed from top to bottom; this undoes it.
            axis.invert_yaxis()
            axis.set_title(f"{self.workload.name}: weak scaling, simulated")


def _backends_said(dear_s: Mapping[str, float]) -> str:
    nccl_s, staged_s = dear_s["nccl"], dear_s["staged"]
    found = "the first is" if nccl_s < staged_s else "the second is"
    if abs(nccl_s / staged_s - 1) <= KNOWN_ERROR:
        found = "neither is"
    return (
        f"dear takes {_ms(nccl_s)} ms over NCCL, and {_ms(staged_s)} ms through the hosts' memory"
        f" (backend=staged): {found} predicted to be faster. Neither was measured on GPUs."
    )


def _wrapped(*lines: str) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def run_job(cfg: DictConfig, program: Program) -> None:
    """Run one job of ``dear-plan``."""
    plan(cfg, program.folder)
    job.folder_with(cfg)


def plan(cfg: DictConfig, folder: Path) -> ranking.Ranked:
    """Predict a step under each strategy; print and write the results. Starts no process.

    Args:
        cfg: Config composed from ``conf/plan.yaml``.
        folder: Folder for the table, the figures and the picture.

    Returns:
        The row to advise.

    Raises:
        ValueError: If the config names something unknown, or lacks a figure of the cluster.
    """
    workload, network = workload_of(cfg), network_for(cfg)
    sizes = world_sizes_of(cfg)
    num_cases = len(cases_of(cfg, workload, network.world_size))
    with closing(Progress(num_cases * (1 + len(sizes)))) as progress:
        every = _each(cfg, workload, network.world_size, progress)
        rows = sorted(every, key=lambda row: row.step.step_s)
        found = Report(rows, workload, network, cfg.enough, backend_of(cfg), _dear_s(cfg, workload))
        source = str(cfg.cluster.get("source") or "its file names no source")
        text = f"{found.describe(source)}\n{found.table()}\n{found.advice()}"
        progress.close()
        print(text, flush=True)
        (folder / "table.txt").write_text(f"{text}\n")
        found.write_rows(folder / "plan.csv")
        scaled = [(size, row) for size in sizes for row in _each(cfg, workload, size, progress)]
    found.write_scaling(folder, scaled)
    print(f"All figures, and how each scales: {folder}", flush=True)
    return found.best


def _dear_s(cfg: DictConfig, workload: Workload) -> dict[str, float]:
    """Return backend -> step of `strategy="dear"`, for both of GPUs; {} on other clusters."""
    if backend_of(cfg) == "gloo" or cfg.cluster.get("measured") is not None:
        return {}
    dear, plain = strategies.STRATEGIES["dear"], workload.uncompressed
    networks = {one: network_for(cfg, backend=one) for one in ("nccl", "staged")}
    steps = {one: ranking.predicted(dear, plain, net).step for one, net in networks.items()}
    return {one: step.step_s for one, step in steps.items()}


def _each(
    cfg: DictConfig, workload: Workload, world_size: int, progress: Progress
) -> Iterator[ranking.Ranked]:
    network = network_for(cfg, world_size)
    for strategy, one in cases_of(cfg, workload, world_size):
        progress.begin(f"{strategy.name}, {world_size} ranks")
        yield ranking.predicted(strategy, one, network)
        progress.step()
