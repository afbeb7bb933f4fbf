"""What ``dear-plan`` says: the table, and the advice."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_dear.planning.step import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from lightning_dear.simulator import Network, Workload
from lightning_dear.simulator.ranking import Ranked, alone_s, recommended
from lightning_dear.studies.table import MISSING, format_table
from lightning_dear.workloads.replay.profile import PROFILES

_BASELINE = "ddp"
_WIDTH = 100

KNOWN_ERROR = 0.06
"""Share of a step by which predictions were off on the average; see docs/simulator.md."""

LOSSLESS, AS_GOOD, LOSSY = "lossless", "as good as dense", "lossy"

_ARE_AS_GOOD = ("bf16", "fp16", "int8")
"""No worse than dense on digits and on a GPT, in all runs of recipes/compression."""

_MORE_STEPS = {
    "oktopk": (
        "+121 % steps",
        "oktopk took 171 steps to DDP's loss on digits, where DDP took 77, and did not reach it in"
        " 400 steps on a GPT (recipes/convergence).",
    )
}
"""Compressor -> how many steps more it is known to take, in a word and in a sentence."""

_BAND = "Band: with the shortest and with the longest of all exchanges that calibrate timed."
_NO_BAND = "These links were not measured; dear-plan calibrate measures yours."
_QUALITY = (
    "lossless: the gradients of DDP. as good as dense: in our studies (recipes/compression). lossy:"
    " it may take more steps, or end worse; train a while with both before you use it."
)
Bands = Mapping[str, tuple[float, float]]
"""A row's name -> seconds of its step at the best and at the worst."""

_EMULATED_MBIT, _MOST_MBIT = 1e3, 1e6
"""What this machine's links are shaped to at most; what counts as fast as can be."""


def quality_of(row: Ranked) -> str:
    """Return what becomes of a training's gradients."""
    if row.compressor == "none":
        return LOSSLESS
    return AS_GOOD if row.compressor in _ARE_AS_GOOD else LOSSY


@dataclass(frozen=True)
class Report:
    """What was predicted for one model on one cluster.

    Attributes:
        rows: The fastest first.
        workload: The model.
        network: The cluster's.
        bands: Of clusters that were measured.
        enough: See `recommended`.
        has_no_gpu: Whether encoding is counted for a GPU although the cluster has none.
    """

    rows: Sequence[Ranked]
    workload: Workload
    network: Network
    bands: Bands
    enough: float
    has_no_gpu: bool

    @cached_property
    def best(self) -> Ranked:
        """What to use: nothing lossy, unless there is nothing else."""
        return recommended(self._choices or self.rows, _BASELINE, self.enough)

    @cached_property
    def _choices(self) -> list[Ranked]:
        """What may be advised."""
        return [
            row
            for row in self.rows
            if row.overrides is not None and quality_of(row) != LOSSY and not self._is_guessed(row)
        ]

    def _is_guessed(self, row: Ranked) -> bool:
        """Whether nothing is known of what encoding takes on this cluster."""
        is_counted = row.compressor not in ("none", self.workload.compressor)
        return self.has_no_gpu and is_counted

    def describe(self, source: str) -> str:
        """Return in a few lines what is predicted for what."""
        workload, times, network = self.workload, self.workload.times, self.network
        link = network.outer_link
        rate = f"{8 / link.beta_s / 1e9:.3g} Gb/s" if link.beta_s else "of any rate"
        place = "within the node" if network.num_nodes == 1 else "between nodes"
        has_codec = not workload.codecs.are_none
        codec = f"; ours with compressor={workload.compressor}" if has_codec else ""
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
        """Return what can be run, lossy rows below a line; then, in a line, what cannot."""
        can_run = [row for row in self.rows if row.overrides is not None]
        safe = [row for row in can_run if quality_of(row) != LOSSY]
        lossy = [row for row in can_run if quality_of(row) == LOSSY]
        cells = [list(self._cells(row)) for row in (*safe, *lossy)]
        titles = list(self._cells(None))
        lines = format_table(titles, cells).splitlines()
        if safe and lossy:
            # After the titles and a line above and below them.
            lines.insert(3 + len(safe), lines[0])
        notes = [_QUALITY, *(note for name, (_, note) in _MORE_STEPS.items() if _has(lossy, name))]
        if others := [row for row in self.rows if row.overrides is None]:
            listed = ", ".join(f"{row.name} {_ms(row.step.step_s)} ms" for row in others)
            notes.append(f"Cannot be run with dear-train, for comparing: {listed}.")
        return "\n".join([*lines, _wrapped(*notes, _BAND if self.bands else _NO_BAND)])

    def _cells(self, row: Ranked | None) -> list[str]:
        """A row of the table; of None its titles."""
        if row is None:
            middle = "band ms" if self.bands else "waits ms"
            titles = "strategy", "step ms", middle, "x ddp", "scaling", "MB/step", ""
            return list(titles)
        step, ddp_s = row.step, self._step_of(_BASELINE)
        middle = _ms(sum(step.exposed_s.values()))
        if self.bands:
            band = self.bands.get(row.name)
            middle = "-".join(map(_ms, band)) if band else MISSING
        quality, (steps, _) = quality_of(row), _MORE_STEPS.get(row.compressor, ("", ""))
        return [
            row.name,
            _ms(step.step_s),
            middle,
            MISSING if ddp_s is None else f"{ddp_s / step.step_s:.3f}",
            f"{row.efficiency(alone_s(self.workload)):.1%}",
            f"{step.sent_bytes / 1e6:.1f}",
            ", ".join(filter(None, (quality, steps))),
        ]

    def _step_of(self, name: str) -> float | None:
        return next((row.step.step_s for row in self.rows if row.name == name), None)

    # --- the advice -------------------------------------------------------------------------------

    def advice(self, cfg: DictConfig) -> str:
        """Return what to use, how sure that is, and the overrides to paste."""
        best, ddp_s = self.best, self._step_of(_BASELINE)
        if best.name == _BASELINE:
            gain = best.step.step_s / min(row.step.step_s for row in self._choices) - 1
            said = [f"DDP will do: nothing that can be advised is more than {gain:.1%} faster."]
        else:
            with_codec = "" if best.compressor == "none" else f", with compressor {best.compressor}"
            said = [f"Use {best.name}: {best.strategy.what}{with_codec} ({quality_of(best)})."]
            if ddp_s is not None:
                said.append(f"A step under DDP takes {ddp_s / best.step.step_s:.2f} times as long.")
        said.append(self._sureness())
        if any(map(self._is_guessed, self.rows)):
            said.append(
                "Encoding is counted for a GPU (device=...), and takes longer on this cluster's"
                " CPUs: so no compressor is advised; dear-plan calibrate compressor=int8 measures"
                " it."
            )
        commands = [f"dear-train {best.overrides}", *self._lossless_command()]
        if best.strategy.name.startswith("dear") and cfg.profile in PROFILES:
            commands.append(self._command_to_try(cfg))
        return "\n".join([_wrapped(*said), *commands])

    def _sureness(self) -> str:
        best_s = self.best.step.step_s
        near = [
            row.name
            for row in self._choices
            if row is not self.best and abs(row.step.step_s / best_s - 1) <= KNOWN_ERROR
        ]
        known = f"Predictions are 4 to {100 * KNOWN_ERROR:.0f} % off on the average"
        if near:
            return (
                f"{known}: {', '.join(near)}: no real difference from {self.best.name}; the other"
                " rows do differ."
            )
        return f"{known}: every other row differs from {self.best.name} by more than that."

    def _lossless_command(self) -> list[str]:
        lossless = [row for row in self._choices if row.compressor == "none"]
        if self.best.compressor == "none" or not lossless:
            return []
        row = recommended(lossless, _BASELINE, self.enough)
        return [
            f"Without a compressor, {_ms(row.step.step_s)} ms ({row.name}): dear-train"
            f" {row.overrides}"
        ]

    def _command_to_try(self, cfg: DictConfig) -> str:
        scale, rate_mbit = _emulated(self.network)
        return (
            "Try it here, without the cluster (Linux, iproute2): dear-bench cluster=emulated"
            f" cluster.rate_mbit={rate_mbit} model.profile={cfg.profile} model.scale={scale}"
            + (f" model.compute_s={cfg.compute_s}" if cfg.compute_s is not None else "")
        )

    # --- files ------------------------------------------------------------------------------------

    def write_rows(self, path: Path) -> None:
        """Write all figures as CSV, in seconds and bytes."""
        kinds = (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER)
        figures: list[dict[str, Any]] = [
            {
                "strategy": row.name,
                "step_s": row.step.step_s,
                **dict(zip(("least_s", "most_s"), self.bands.get(row.name, ("", "")), strict=True)),
                "efficiency": row.efficiency(alone_s(self.workload)),
                **{f"exposed_{kind}_s": row.step.exposed_s.get(kind, 0.0) for kind in kinds},
                "sent_bytes": row.step.sent_bytes,
                "quality": quality_of(row),
            }
            for row in self.rows
        ]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(figures[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(figures)


def _has(rows: Sequence[Ranked], compressor: str) -> bool:
    return any(row.compressor == compressor for row in rows)


def _wrapped(*lines: str) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)


def _emulated(network: Network) -> tuple[int, int]:
    """By what to divide a model, and a link's rate (Mb/s), so that this machine can emulate it."""
    rate_mbit = 8e-6 / max(network.outer_link.beta_s, 8e-6 / _MOST_MBIT)
    scale = 1
    while rate_mbit / scale > _EMULATED_MBIT:
        scale *= 2
    return scale, max(round(rate_mbit / scale), 1)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
