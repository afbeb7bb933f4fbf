"""Predicts, from one training's times and links, what would shorten its step, and by how much."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_dear import compression, planning
from lightning_dear.compression import Codec
from lightning_dear.doctor.links import Pair
from lightning_dear.doctor.step_watch import StepTimes
from lightning_dear.planning import LinkCost, ModelTimes, TensorSpec
from lightning_dear.simulator import Link, Network, Workload, ranking, strategies
from lightning_dear.simulator.schedule import Schedule
from lightning_dear.studies.device_costs import Device, halves_costs, measured_device, whole_costs
from lightning_dear.studies.table import format_table
from lightning_dear.telemetry.statistics import latest_rank

KNOWN_ERROR = 0.06
"""Average error of predictions, as a share of a step; see docs/simulator.md."""

NEGLIGIBLE_SHARE = 0.1
"""Share of a step. If communication takes less of it, nothing of ours is proposed."""

NEED = 0.9
"""Share of computing alone for which the network's rate is named."""

CODECS = ("bf16", "int8")
"""Compressors that are predicted. In recipes/compression trainings ended with them as without."""

_ACCUMULATED = "accumulate_grad_batches"

_MOST_PASTES = 4
"""Most lines to paste."""

_LARGE_BUCKETS = planning.ThresholdFusion(bucket_cap_mb=100.0, first_bucket_cap_mb=100.0)

_PASTES = {
    "ddp": 'Trainer(strategy="ddp")',
    "ddp, large buckets": "Trainer(strategy=DDPStrategy(bucket_cap_mb=100))",
    "ddp_bf16": "Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook))",
    "dear": 'Trainer(strategy="dear")',
}
_BF16_ON_GLOO = "Trainer(strategy=lightning_dear.studies.competitors.Bf16DDPStrategy())"


class Option(NamedTuple):
    """Something that may shorten a step.

    Attributes:
        name: What it is, such as "dear + int8".
        batch_s: Predicted seconds for a batch.
        loss: What training may lose, such as "nothing".
        paste: The line that brings it.
    """

    name: str
    batch_s: float
    loss: str
    paste: str


@dataclass(frozen=True)
class Case:
    """A training as it runs now, on its slowest rank, and the links among its ranks.

    Attributes:
        tensors: Trained parameters.
        times: Forward and backward of a batch without communication, and the optimizer's step.
        num_batches: Batches of an optimizer step, of which the last one communicates.
        cost: Cost of exchanges among all ranks.
        world_size: Number of ranks.
        devices: Name of each of `CODECS` -> speed with which ranks encode.
        rest_s: Seconds of a step for data, hooks and all else that no strategy changes.
        is_gloo: Whether the default process group uses gloo.
        running: Name in `options` of what runs now. None means that it is not predicted.
        batch_s: Measured seconds of a batch.
    """

    tensors: Sequence[TensorSpec]
    times: ModelTimes
    num_batches: int
    cost: LinkCost
    world_size: int
    devices: dict[str, Device]
    rest_s: float
    is_gloo: bool
    running: str | None
    batch_s: float

    @cached_property
    def workload(self) -> Workload:
        """The model as the simulator needs it."""
        return Workload("your model", self.tensors, self.times, fixed_step_s=self.rest_s)

    @cached_property
    def network(self) -> Network:
        """The network: each rank counts as a node, since measured costs include shared links."""
        ours, theirs = (
            Link(one.alpha_s, one.beta_s) for one in (self.cost, self.cost.all_reduce or self.cost)
        )
        shape: Any = self.world_size, 1, None, "pairwise", theirs
        return Network(ours, *shape, has_reduce_scatter=not self.is_gloo)

    @property
    def alone_s(self) -> float:
        """Seconds of a batch on one rank alone."""
        return ranking.alone_s(self.workload, self.num_batches)

    @cached_property
    def cases(self) -> dict[str, ranking.Pair]:
        """Name -> strategy and workload to predict."""
        large = replace(
            strategies.STRATEGIES["ddp"],
            build=strategies.planned(_LARGE_BUCKETS.plan, Schedule(is_ddp=True), all_reduces=True),
        )
        known, plain = strategies.STRATEGIES, self.workload
        encoded = {
            name: replace(
                plain,
                codecs=halves_costs(name, device, self.world_size),
                whole_codecs=whole_costs(name, device, self.world_size),
                compressor=name,
            )
            for name, device in self.devices.items()
        }
        return {
            "ddp": (known["ddp"], plain),
            "ddp, large buckets": (large, plain),
            "ddp_bf16": (known["ddp"], encoded["bf16"]),
            "dear": (known["dear"], plain),
            **{f"dear + {name}": (known["dear"], one) for name, one in encoded.items()},
        }

    def batch_s_of(self, name: str, num_batches: int) -> float:
        """Return the predicted seconds of a batch, of which so many make a step."""
        strategy, workload = self.cases[name]
        strategy = strategies.accumulating(strategy, num_batches)
        return ranking.predicted(strategy, workload, self.network).step.step_s

    @cached_property
    def options(self) -> list[Option]:
        """All that may help, the fastest first; what runs now is among them."""
        found = []
        for name in self.cases:
            codec = name.partition(" + ")[2] or ("bf16" if name == "ddp_bf16" else "")
            loss = f"nothing seen in our studies ({codec})" if codec else "nothing"
            seconds = self.batch_s_of(name, self.num_batches)
            found.append(Option(name, seconds, loss, self._paste(name, codec)))
        for times in (2, 4, 8) if self.running is not None else ():
            count = times * self.num_batches
            name, loss = f"{_ACCUMULATED}={count}", f"a batch {times} times as large"
            seconds = self.batch_s_of(self.running or "", count)
            found.append(Option(name, seconds, loss, f"Trainer({name}, ...)"))
        return sorted(found, key=lambda option: option.batch_s)

    def _paste(self, name: str, codec: str) -> str:
        if name == "ddp_bf16" and self.is_gloo:
            return _BF16_ON_GLOO
        return _PASTES.get(name, f'Trainer(strategy=DearStrategy(compressor="{codec}"))')

    @property
    def error(self) -> float:
        """Share by which predictions may err: the usual one, or more if that of now errs more."""
        now = next((one for one in self.options if one.name == self.running), None)
        return max(KNOWN_ERROR, abs(now.batch_s / self.batch_s - 1) if now else 0.0)

    def needed(self, name: str) -> float | None:
        """Return the bits a second of each rank for `NEED` of computing alone.

        None means that no rate is enough: messages take too long to start, or encoding does.
        """
        strategy, workload = self.cases[name]
        strategy = strategies.accumulating(strategy, self.num_batches)
        rate = ranking.needed_rate(strategy, workload, self.network, NEED)
        return rate if rate < math.inf else None


def measured_devices(device: torch.device) -> dict[str, Device]:
    """Return for each of `CODECS` the speed with which this rank encodes. Local. Blocks."""
    made: Any = {name: compression.resolve_compressor(name) for name in CODECS}
    return {
        name: measured_device(one, device) for name, one in made.items() if isinstance(one, Codec)
    }


# --- the screen -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """What rank 0 tells.

    Attributes:
        told: Times of each rank.
        case: The training and its links. None means that links were not measured.
        pairs: Pairs of ranks that were measured alone.
        hosts: Host number of each rank, as in `World`.
    """

    told: Sequence[StepTimes]
    case: Case | None
    pairs: Sequence[Pair]
    hosts: Sequence[int]

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Seconds of a step by what they went into."""
        step_s = max(one.step_s for one in self.told)
        slowest = max(self.told, key=lambda one: one.computing_s)
        waits_s = [one.exposed_s for one in self.told]
        known_s = slowest.computing_s + min(waits_s)
        late_s = max(waits_s) - min(waits_s)
        return {
            "step_s": step_s,
            "computing_s": slowest.computing_s,
            "messages_s": min(waits_s),
            "late_rank_s": late_s,
            "rest_s": max(step_s - known_s, 0.0),
        }

    @property
    def share(self) -> float:
        """Share of a step in which ranks wait for messages."""
        return self.numbers["messages_s"] / self.numbers["step_s"]

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, for a JSON file."""
        found: dict[str, Any] = {**self.numbers, "share": self.share}
        if self.case is not None:
            found |= {
                "cost": asdict(self.case.cost),
                "pairs": [one._asdict() for one in self.pairs],
                "error": self.case.error,
                "running": self.case.running,
                "batch_s": self.case.batch_s,
                "alone_s": self.case.alone_s,
                "options": [one._asdict() for one in self.case.options],
                "needed_bits_per_s": self.needed,
            }
        return found

    @cached_property
    def needed(self) -> dict[str, float | None]:
        """Name -> bits a second of each rank for `NEED` of computing alone. None means no rate.

        Empty if the links are too fast for their rate to be told.
        """
        assert self.case is not None
        names = ("ddp", "ddp_bf16", "dear", "dear + int8") if self.case.cost.beta_s else ()
        return {name: self.case.needed(name) for name in names}

    @property
    def text(self) -> str:
        """One screen."""
        now = self.numbers
        rank, _ = latest_rank([(one.exposed_s, one.error_s, one.step_s) for one in self.told])
        late = "no rank is late" if rank is None else f"rank {rank} is late"
        lines = [
            f"NetworkDoctor: a step takes {_milli(now['step_s'])} on {len(self.told)} ranks:"
            f" computing {_milli(now['computing_s'])}, waiting for messages"
            f" {_milli(now['messages_s'])}, for the latest rank {_milli(now['late_rank_s'])}"
            f" ({late}), data and the rest {_milli(now['rest_s'])}."
        ]
        if self.case is None:
            return (
                f"{lines[0]}\nLinks were not measured, since this has not been run with NCCL yet."
            )
        lines += self._of_links(self.case)
        if self.share < NEGLIGIBLE_SHARE:
            return "\n".join([*lines, f"{self._communication}: nothing here will help."])
        return "\n".join([*lines, f"{self._communication}. {self._verdict(self.case)}"])

    @property
    def _communication(self) -> str:
        return f"Communication is {self.share:.0%} of a step"

    def _of_links(self, case: Case) -> list[str]:
        """Return lines on links."""
        beta_s = case.cost.beta_s
        rate = f"{8e-9 / beta_s:.3g} Gb/s a rank" if beta_s else "too fast to tell"
        lines = [f"Links, all ranks at once: {rate}, {case.cost.alpha_s * 1e6:.0f} us to start."]
        for kind, is_within in (("within hosts", True), ("between hosts", False)):
            of = [p for p in self.pairs if (self.hosts[p.low] == self.hosts[p.high]) == is_within]
            if of:
                slow = min(of, key=lambda pair: pair.rate)
                trip_s = max(pair.round_trip_s for pair in of)
                lines.append(
                    f"Slowest pair {kind}: ranks {slow.low} and {slow.high},"
                    f" {8e-9 * slow.rate:.3g} Gb/s; longest round trip {_milli(trip_s)}."
                )
        return lines

    def _verdict(self, case: Case) -> str:
        """Return the table of options, lines to paste, and how fast a network would do."""
        titles = "what", "ms a batch", "x now", "training may lose"
        rows = [
            [
                f"{one.name}{' (now)' * (one.name == case.running)}",
                f"{one.batch_s * 1e3:.1f}",
                f"{case.batch_s / one.batch_s:.2f}",
                one.loss,
            ]
            for one in case.options
        ]
        others = [one for one in case.options if one.name != case.running]
        helps = [one for one in others if one.batch_s * (1 + case.error) < case.batch_s]
        # A larger batch is a last resort, since training may need another learning rate.
        helps.sort(key=lambda one: one.name.startswith(_ACCUMULATED))
        pastes = [f"  {one.name}: {one.paste}" for one in helps[:_MOST_PASTES]]
        if not helps:
            pastes = ["Nothing here will help: no row is shorter by more than predictions err."]
        rates = ", ".join(
            f"{name} {'no rate is enough' if bits is None else f'{bits / 1e9:.3g} Gb/s'}"
            for name, bits in self.needed.items()
        )
        return (
            f"Predicted, {case.error:.0%} off on the average (now, measured:"
            f" {case.batch_s * 1e3:.1f} ms a batch; computing alone: {case.alone_s * 1e3:.1f}):\n"
            f"{format_table(titles, rows)}\n"
            + "\n".join(pastes)
            + (f"\nA network for {NEED:.0%} of computing alone, a rank: {rates}." if rates else "")
        )


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
