"""Predictions of ``dear-plan`` as a table, advice, and scaling curves."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, log2
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.apps.plan import config
from lightning_dear.apps.program import Program
from lightning_dear.planning.predict import KNOWN_ERROR
from lightning_dear.planning.step import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from lightning_dear.simulator import Network, Workload, ranking, strategies
from lightning_dear.studies import files, plot, table
from lightning_dear.studies.progress import Progress

_WIDTH = 100

LOSSLESS, AS_GOOD, SAMPLES, LOSSY = "lossless", "as good as dense", "costs samples", "lossy"

_ARE_AS_GOOD = ("bf16", "fp16", "int8")
"""Compressors with which all runs of recipes/compression (digits, GPT) ended as well as dense."""

_QUALITY = (
    "lossless: the gradients of DDP. as good as dense: in our studies (recipes/compression). lossy:"
    " it may take more steps, or end worse; train a while with both before you use it. costs"
    " samples: about 1.5 to 2 times the steps for a small model; see docs/local_steps.md. k times"
    " the batch: a micro-batch of those that accumulate_grad_batches sums; fewer steps of the"
    " optimizer."
)


def quality_of(row: ranking.Ranked) -> str:
    """Return what training loses with the row's strategy and compressor."""
    if row.strategy.batches > 1:
        return f"{row.strategy.batches} times the batch"
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

_COMPUTED = " (computed for a GPU of 7 TFLOP/s and 500 GB/s; compute_s=... sets yours)"
_NEEDS = "needs Gb/s"
_CALIBRATE = "dear-plan calibrate compressor="


def script_of(row: ranking.Ranked, backend: str | None = None) -> str:
    """Return the Python expression that builds a Trainer with the row's strategy.

    Args:
        row: The row.
        backend: `process_group_backend` of the strategy. None means the usual one of the devices.
    """
    name, batches = row.name.partition(",")[0], row.strategy.batches
    kind, given = _SCRIPTS.get(name, ("DearStrategy", ""))
    own = [word for word in (row.overrides or "").split()[1:] if not word.startswith("trainer.")]
    own += [f"process_group_backend={backend}"] if backend else []
    words = [re.sub(r"=([a-z]\w*)$", r'="\1"', one.removeprefix("strategy.")) for one in own]
    options = ", ".join(filter(None, [given, *words]))
    made = f"{kind}({options})" if options or name not in ("ddp", "dear") else f'"{name}"'
    return f"Trainer(strategy={made}{f', accumulate_grad_batches={batches}' * (batches > 1)})"


Point = tuple[float, ranking.Ranked]
"""A number of ranks, or a rate, with a prediction for it."""


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
        need: Share of a step that is to be computing alone. None means that no rate is sought.
    """

    rows: Sequence[ranking.Ranked]
    workload: Workload
    network: Network
    enough: float
    backend: str = "gloo"
    dear_s: Mapping[str, float] = field(default_factory=dict)
    need: float | None = None

    @cached_property
    def best(self) -> ranking.Ranked:
        """The row to advise. It is lossy only if no other row can be advised.

        Rows that cost samples are never advised: their steps are no measure of a training.
        """
        dense = [row for row in self.rows if not row.strategy.costs_samples]
        return ranking.recommended(self._choices or dense, self.enough)

    @cached_property
    def _choices(self) -> list[ranking.Ranked]:
        """Rows that may be advised: dear-train can run them, and they are as good."""
        return [row for row in self.rows if row.overrides is not None and _is_as_good(row)]

    def describe(self, num_hosts: int, source: str, seconds: str = "") -> str:
        """Return a few lines on the model and the cluster.

        Args:
            num_hosts: Number of hosts. In a measured network each rank counts as a node.
            source: Origin of the cluster's figures.
            seconds: Origin of the model's seconds. Empty means that the user gave or measured them.
        """
        workload, times, network = self.workload, self.workload.times, self.network
        link = network.outer_link
        rate = f"{8 / link.beta_s / 1e9:.3g} Gb/s" if link.beta_s else "of any rate"
        place = "within the host" if num_hosts == 1 else "between hosts"
        codec = "" if workload.codecs.are_none else f"; ours with compressor={workload.compressor}"
        return _wrapped(
            f"{workload.name}: {workload.nbytes / 1e6:.1f} MB, forward {_ms(times.forward_s)} ms,"
            f" backward {_ms(times.backward_s)} ms{seconds}{codec}",
            f"{network.world_size} ranks on {num_hosts} host(s); links {place}: {rate},"
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
        safe, can_run = self._choices, [row for row in self.rows if row.overrides is not None]
        lossy = [row for row in can_run if not _is_as_good(row)]
        last = _NEEDS if self.need else "MB/step"
        titles = "strategy", "step ms", "waits ms", "x ddp", "scaling", last, ""
        lines = table.format_table(titles, [*map(self._cells, (*safe, *lossy))]).splitlines()
        if safe and lossy:
            # 3 lines come before the rows: a rule, the titles and another rule.
            lines.insert(3 + len(safe), lines[0])
        notes = [_QUALITY, *self._notes()]
        if others := [row for row in self.rows if row.overrides is None]:
            listed = ", ".join(f"{row.name} {_ms(row.step.step_s)} ms" for row in others)
            notes.append(f"Cannot be run with dear-train, for comparing: {listed}.")
        return "\n".join([*lines, _wrapped(*notes)])

    def _notes(self) -> Iterator[str]:
        if self.network.has_nccl_hosts and any(row.compressor != "none" for row in self.rows):
            yield (
                "Encoded rows of dear are not summed on their way: a host's link carries"
                f" {self.network.ranks_in_node} times the bytes of one rank. So encoding can cost"
                " more than it saves. With hops=2 they are summed within the host first."
            )
        if self.need:
            yield (
                f"{_NEEDS}: rate of links at which {100 * self.need:g} % of a step is computing"
                " alone. no rate: starts of messages, encoding, or copies through the host take"
                " longer. -: a search changes the plan with the rate."
            )

    def _cells(self, row: ranking.Ranked) -> list[str]:
        step, ddp_s = row.step, self._step_of(ranking.BASELINE)
        sent, rate = f"{step.program.sent_bytes / 1e6:.1f}", row.needed_bits_per_s
        needs = table.MISSING if rate is None else "no rate" if rate == inf else f"{rate / 1e9:.3g}"
        gain = table.MISSING if ddp_s is None else f"{ddp_s / step.step_s:.3f}"
        times = _ms(step.step_s), _ms(sum(step.exposed_s.values())), gain
        last = f"{row.efficiency(self.workload):.1%}", needs if self.need else sent
        return [row.name, *times, *last, quality_of(row)]

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
            is_counted = best.compressor not in ("none", self.workload.compressor)
            condition = ", if encoding is as fast as counted: as on a GPU (device=...)"
            said = [f"Use {best.name} ({quality_of(best)}){condition if is_counted else ''}."]
            if is_counted and self.backend == "gloo":
                said.append(f"CPUs encode more slowly: {_CALIBRATE}{best.compressor} measures it.")
            if ddp_s is not None:
                said.append(f"A step under DDP takes {ddp_s / best.step.step_s:.2f} times as long.")
        said.append(self._sureness())
        if self.dear_s:
            said.append(_backends_said(self.dear_s))
        asked = "gloo" if self.backend == "staged" else None
        commands = [self._command(best), f"In a script: {script_of(best, asked)}"]
        return "\n".join([_wrapped(*said), *commands, *self._lossless_command()])

    def _sureness(self) -> str:
        name, best_s = self.best.name, self.best.step.step_s
        others = [row for row in self._choices if row is not self.best]
        near = [row.name for row in others if abs(row.step.step_s / best_s - 1) <= KNOWN_ERROR]
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
                "efficiency": row.efficiency(self.workload),
                "needed_bits_per_s": row.needed_bits_per_s,
                **{f"exposed_{kind}_s": row.step.exposed_s.get(kind, 0.0) for kind in kinds},
                "sent_bytes": row.step.program.sent_bytes,
                "quality": quality_of(row),
            }
            for row in self.rows
        ]
        files.write_lines(path, figures)

    def write_curves(self, path: Path, points: Sequence[Point], column: str, label: str) -> None:
        """Write a CSV file, and a picture beside it: efficiency over ranks, or over the rate.

        Args:
            path: Path of the CSV file.
            points: Numbers of ranks or rates, each with a prediction for it.
            column: Title of these numbers in the file.
            label: What they are, in the picture.
        """
        from matplotlib import colormaps

        figures: list[files.Line] = []
        curves: dict[str, dict[float, float]] = {}
        for place, row in points:
            figures.append({"strategy": row.name, column: place, "step_s": row.step.step_s})
            curves.setdefault(row.name, {})[place] = 100 * row.efficiency(self.workload)
        files.write_lines(path, figures)
        with plot.picture(path.with_suffix(".png"), [14]) as (axis,):
            lines = ["-"] * 20 + [":"] * 20
            axis.set_prop_cycle(color=[*colormaps["tab20"](range(20))] * 2, linestyle=lines)
            for name, shares in curves.items():
                width = 2.5 if name.startswith("dear") else 1.0
                axis.plot(shares.keys(), shares.values(), label=name, marker=".", linewidth=width)
            axis.set_xscale("log", base=2)
            places = list(dict.fromkeys(place for place, _ in points))
            axis.set_xticks(places, [f"{place:.4g}" for place in places])
            ylabel = "scaling efficiency, % (one rank's step over this step)"
            title = f"{self.workload.name}: weak scaling over {label}, simulated"
            axis.set(xlabel=label, ylabel=ylabel, ylim=(0, None), title=title)
            # `picture` inverts the y axis for bars listed from top to bottom; this undoes it.
            axis.invert_yaxis()


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
    workload, network = config.workload_of(cfg), config.network_for(cfg)
    cases_on = partial(config.cases_of, cfg, workload)
    cases = cases_on(network)
    own, sizes = network.world_size, config.world_sizes_of(cfg)
    fixed = [case for case in cases if cfg.need and not case[0].searches]
    middle = round(log2(8e-9 / (network.outer_link.beta_s or 8e-9)))
    rates = [2.0 ** (middle + power) for power in range(-6, 7)] if cfg.need else []
    with closing(Progress(len(cases) * len(sizes) + len(fixed) * len(rates))) as progress:
        every = list(_each(cases, network, progress, cfg.need))
        rows = sorted(every, key=lambda row: row.step.step_s)
        ways = config.backend_of(cfg), _dear_s(cfg, workload)
        found = Report(rows, workload, network, cfg.enough, *ways, cfg.need)
        hosts = int(cfg.cluster.num_nodes)
        source = str(cfg.cluster.get("source") or "its file names no source")
        is_computed = cfg.compute_s is None and not cfg.profile.endswith(".json")
        described = found.describe(hosts, source, _COMPUTED if is_computed else "")
        text = f"{described}\n{found.table()}\n{found.advice()}"
        progress.close()
        print(text, flush=True)
        (folder / "table.txt").write_text(f"{text}\n")
        found.write_rows(folder / "plan.csv")
        print("That is the answer. Curves follow, of more predictions.", flush=True)
        scaled: list[Point] = []
        for size in sizes:
            net = config.network_for(cfg, size)
            some = every if size == own else _each(cases_on(net), net, progress)
            scaled += ((size, row) for row in some)
        nets = {rate: network.at_rate(1e9 * rate) for rate in rates}
        rated = [(rate, row) for rate in nets for row in _each(fixed, nets[rate], progress)]
    found.write_curves(folder / "scaling.csv", scaled, "world_size", "ranks")
    if rated:
        found.write_curves(folder / "rates.csv", rated, "gbit_per_s", "Gb/s")
    print(f"All figures, and how each scales: {folder}", flush=True)
    return found.best


def _dear_s(cfg: DictConfig, workload: Workload) -> dict[str, float]:
    """Return backend -> step of `strategy="dear"`, for both of GPUs; {} on other clusters."""
    if config.backend_of(cfg) == "gloo" or cfg.cluster.get("measured") is not None:
        return {}
    dear, plain = strategies.STRATEGIES["dear"], workload.uncompressed
    networks = {one: config.network_for(cfg, backend=one) for one in ("nccl", "staged")}
    steps = {one: ranking.predicted(dear, plain, net).step for one, net in networks.items()}
    return {one: step.step_s for one, step in steps.items()}


def _each(
    cases: Sequence[ranking.Pair], network: Network, progress: Progress, need: float | None = None
) -> Iterator[ranking.Ranked]:
    for strategy, one in cases:
        progress.begin(f"{strategy.name}, {network.world_size} ranks")
        yield ranking.predicted(strategy, one, network, need)
        progress.step()
