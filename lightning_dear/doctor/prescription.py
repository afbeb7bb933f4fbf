"""Predicts, from one training's times and links, what would shorten its step, and by how much."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_dear import compression, planning
from lightning_dear.doctor.links import Pair, link_rows, milli
from lightning_dear.doctor.step_watch import StepTimes
from lightning_dear.planning import LinkCost, ModelTimes, TensorSpec
from lightning_dear.planning.predict import KNOWN_ERROR
from lightning_dear.simulator import Link, Network, Workload, ranking, strategies
from lightning_dear.simulator.schedule import Schedule
from lightning_dear.studies.device_costs import AS_GOOD, Device, compressed, measured_device
from lightning_dear.studies.table import format_table
from lightning_dear.telemetry.statistics import latest_rank

NEGLIGIBLE_SHARE = 0.1
"""Share of a step. If communication takes less of it, nothing of ours is proposed."""

NEED = 0.9
"""Share of computing alone for which the network's rate is named."""

_LOADING_SHARE = 0.2
"""Share of a step. If data and the rest take more of it, the screen names the loader."""

_ACCUMULATED = "accumulate_grad_batches"

_MOST_PASTES = 4
"""Most lines to paste."""

_LARGE_BUCKETS = planning.ThresholdFusion(bucket_cap_mb=100.0, first_bucket_cap_mb=100.0)

_PASTES = {
    "ddp": 'strategy="ddp"',
    "ddp, large buckets": "strategy=DDPStrategy(bucket_cap_mb=100)",
    "ddp_bf16": "strategy=DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)",
}
# The same module stands for both packages, and has another name in each.
_IS_MIRROR = ".pytorch_lightning." in __name__

_BF16_ON_GLOO = "" if _IS_MIRROR else "strategy=Bf16DDPStrategy()"
"""Empty for `pytorch_lightning`, for which there is no such class."""

_OURS = "lightning_dear.pytorch_lightning" if _IS_MIRROR else "lightning_dear"
_THEIRS = "pytorch_lightning" if _IS_MIRROR else "lightning.pytorch"

_IMPORTS = {
    '="dear"': f"import {_OURS}",
    "=DearStrategy(": f"from {_OURS} import DearStrategy",
    "=Bf16DDPStrategy(": "from lightning_dear.studies.competitors import Bf16DDPStrategy",
    "=DDPStrategy(": f"from {_THEIRS}.strategies import DDPStrategy",
    "default_hooks.": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
}
"""What a line to paste may have in it, and what it then needs."""


class Option(NamedTuple):
    """Something that may shorten a step.

    Attributes:
        name: What it is, such as "dear + int8".
        batch_s: Predicted seconds for a batch.
        price: What it costs besides, such as "none".
        paste: Argument of a Trainer that brings it. Empty means that there is none.
        overrides: Overrides of `dear-train` that bring it.
    """

    name: str
    batch_s: float
    price: str
    paste: str
    overrides: str


@dataclass(frozen=True)
class Case:
    """A training as it runs now, on its slowest rank, and the links among its ranks.

    Attributes:
        tensors: Trained parameters.
        times: Forward and backward of a batch without communication, and the optimizer's step.
        num_batches: Batches of an optimizer step, of which the last one communicates.
        cost: Cost of exchanges among all ranks.
        world_size: Number of ranks.
        devices: Name of each of `AS_GOOD` -> speed with which ranks encode.
        rest_s: Seconds of a step for data, hooks and all else that no strategy changes.
        is_gloo: Whether the default process group uses gloo.
        running: Name in `cases` of what runs now. None means that it is not predicted.
        batch_s: Measured seconds of a batch. None means that nothing was trained, and that what
            runs now is predicted.
        hooks: Overridden hooks that may read `.grad`, such as "Net.on_after_backward". For them
            `strategy="dear"` gathers the mean gradient, without encoding.
        num_hook_gathers: Times that it then gathers the mean gradient in a step.
        pays_for_hooks: Whether it does so now.
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
    batch_s: float | None = None
    hooks: Sequence[str] = ()
    num_hook_gathers: int = 0
    pays_for_hooks: bool = False

    @cached_property
    def workload(self) -> Workload:
        """The model as the simulator needs it."""
        return Workload("your model", self.tensors, self.times, fixed_step_s=self.rest_s)

    @cached_property
    def network(self) -> Network:
        """The network: each rank counts as a node, since measured costs include shared links."""
        costs = self.cost, self.cost.all_reduce or self.cost
        ours, theirs = (Link(one.alpha_s, one.beta_s) for one in costs)
        one_hop = Network(ours, self.world_size, algorithm="pairwise", all_reduce=theirs)
        return replace(one_hop, has_reduce_scatter=not self.is_gloo)

    @property
    def alone_s(self) -> float:
        """Seconds of a batch on one rank alone."""
        return ranking.alone_s(self.workload, self.num_batches)

    @cached_property
    def cases(self) -> dict[str, ranking.Pair]:
        """Name -> strategy and workload to predict."""
        known, plain, size = strategies.STRATEGIES, self.workload, self.world_size
        build = strategies.planned(_LARGE_BUCKETS.plan, Schedule(is_ddp=True), all_reduces=True)
        overrides = "strategy=ddp strategy.bucket_cap_mb=100"
        large = replace(known["ddp"], build=build, overrides=overrides)
        encoded = {name: compressed(plain, name, one, size) for name, one in self.devices.items()}
        return {
            "ddp": (known["ddp"], plain),
            "ddp, large buckets": (large, plain),
            "ddp_bf16": (known["ddp"], encoded["bf16"]),
            "dear": (known["dear"], plain),
            **{f"dear + {name}": (known["dear"], one) for name, one in encoded.items()},
        }

    def predicted(self, name: str, num_batches: int | None = None) -> ranking.Ranked:
        """Return the prediction for a batch, of which so many make a step; None means as now."""
        strategy, workload = self.cases[name]
        count = num_batches or self.num_batches
        # More batches also have more data to load.
        rest_s = self.rest_s * count / self.num_batches
        strategy = strategies.accumulating(strategy, count)
        return ranking.predicted(strategy, replace(workload, fixed_step_s=rest_s), self.network)

    @cached_property
    def options(self) -> list[Option]:
        """All that may help, the fastest first; what runs now is among them."""
        found = []
        for name, (strategy, workload) in self.cases.items():
            codec = workload.compressor
            price = "none" if codec == "none" else f"{codec}; no worse loss in our studies"
            paste = _PASTES.get(name) or self._dear(codec)
            paste = _BF16_ON_GLOO if name == "ddp_bf16" and self.is_gloo else paste
            seconds, overrides = self.predicted(name).step.step_s, strategy.overrides_for(workload)
            found.append(Option(name, seconds, price, paste, overrides or ""))
        for times in strategies.BATCHES if self.running is not None else ():
            count = times * self.num_batches
            name, price = f"{_ACCUMULATED}={count}", f"{times} times the batch size"
            seconds = self.predicted(self.running or "", count).step.step_s
            seconds += self.hooks_s / times * self.pays_for_hooks
            found.append(Option(name, seconds, price, name, f"trainer.{name}"))
        return sorted(found, key=lambda option: option.batch_s)

    def _dear(self, codec: str) -> str:
        options = [f'compressor="{codec}"'] * (codec != "none")
        options += ["gradients_in_hooks=False"] * bool(self.hooks)
        return f"strategy=DearStrategy({', '.join(options)})" if options else 'strategy="dear"'

    @property
    def hooks_s(self) -> float:
        """Seconds that `strategy="dear"` takes longer for a batch, so that hooks see gradients."""
        gather_s = self.cost.reduce_scatter_s(self.workload.nbytes, self.world_size)
        return self.num_hook_gathers * gather_s / self.num_batches

    @property
    def now_s(self) -> float:
        """Seconds of a batch as it runs now."""
        return self.batch_s or self.predicted(self.running or "ddp").step.step_s

    @property
    def error(self) -> float:
        """Share by which predictions may err: the usual one, or more if that of now errs more."""
        now_s = self.predicted(self.running).step.step_s if self.running else self.now_s
        now_s += self.hooks_s * self.pays_for_hooks
        return max(KNOWN_ERROR, abs(now_s / self.now_s - 1))

    def needed(self, name: str) -> float | None:
        """Return the bits a second of each rank for `NEED` of computing alone.

        None means that no rate is enough: messages take too long to start, or encoding does.
        """
        strategy, workload = self.cases[name]
        strategy = strategies.accumulating(strategy, self.num_batches)
        rate = ranking.needed_rate(strategy, workload, self.network, NEED)
        return rate if rate < math.inf else None

    @cached_property
    def all_needed(self) -> dict[str, float | None]:
        """Name -> `needed`, for some. Empty if links are too fast for their rate to be told."""
        names = ("ddp", "ddp_bf16", "dear", "dear + int8") if self.cost.beta_s else ()
        return {name: self.needed(name) for name in names}

    def verdict(self, share: float, *, for_dear_train: bool = False) -> str:
        """Return a table of what would help, lines to paste, and how fast a network would do.

        Args:
            share: Share of a step in which ranks wait for messages.
            for_dear_train: Whether the lines are overrides of `dear-train`.
        """
        said = f"Communication is {share:.0%} of a step"
        if share < NEGLIGIBLE_SHARE:
            return f"{said}: nothing here will help."
        titles = "what", "ms a batch", "speed-up", "price"
        # Rows leave out what hooks cost.
        running = None if self.pays_for_hooks else self.running
        others = [one for one in self.options if one.name != running]
        own = [one for one in self.options if one.name == running]
        now = [one._replace(name=f"{one.name} (now)", batch_s=self.now_s) for one in own]
        rows = [
            [one.name, f"{one.batch_s * 1e3:.1f}", f"{self.now_s / one.batch_s:.2f}", one.price]
            for one in sorted(others + now, key=lambda one: one.batch_s)
        ]
        helps = [one for one in others if one.paste and one.batch_s * (1 + self.error) < self.now_s]
        # A larger batch is a last resort, since training may need another learning rate.
        helps.sort(key=lambda one: one.name.startswith(_ACCUMULATED))
        pastes = self._pastes(helps[:_MOST_PASTES], for_dear_train=for_dear_train)
        rates = ", ".join(
            f"{name} {'no rate is enough' if bits is None else f'{bits / 1e9:.3g} Gb/s'}"
            for name, bits in self.all_needed.items()
        )
        how = "predicted" if self.batch_s is None else "measured"
        lines = [
            f"{said}. Now ({how}): {self.now_s * 1e3:.1f} ms a batch; without communication:"
            f" {self.alone_s * 1e3:.1f}. These predictions are off by {self.error:.0%} on the"
            " average:",
            *(format_table(titles, rows), *pastes),
        ]
        if rates:
            lines.append(
                f"For {NEED:.0%} of the speed without communication each rank needs a link of:"
                f" {rates}. Now it has {8e-9 / self.cost.beta_s:.3g} Gb/s."
            )
        return "\n".join(lines)

    def _pastes(self, helps: Sequence[Option], *, for_dear_train: bool) -> list[str]:
        """Returns the lines to paste, and what a user must know of them."""
        if not helps:
            return ["Nothing here will help: no row is shorter by more than predictions err."]
        if for_dear_train:
            return [f"  dear-train {one.overrides}" for one in helps]
        text = " ".join(one.paste for one in helps)
        hint = (
            f"{', '.join(self.hooks)} may read .grad. If so, leave gradients_in_hooks=False out; a"
            f" batch then takes {self.hooks_s * 1e3:.1f} ms more under dear."
        )
        return [
            "Paste one of these in place of yours (fastest first, larger batches last):",
            *(f"  {line}" for word, line in _IMPORTS.items() if word in text),
            *(
                f"  Trainer({one.paste}, ...)  # {one.name}: {one.batch_s * 1e3:.0f} ms"
                for one in helps
            ),
            *[hint] * ("gradients_in_hooks" in text),
        ]


def measured_devices(device: torch.device) -> dict[str, Device]:
    """Return for each of `AS_GOOD` the speed with which this rank encodes. Local. Blocks."""
    return {name: measured_device(compression.CODECS[name](), device) for name in AS_GOOD}


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
        return {
            "step_s": step_s,
            "computing_s": slowest.computing_s,
            "messages_s": min(waits_s),
            "late_rank_s": max(waits_s) - min(waits_s),
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
                "needed_bits_per_s": self.case.all_needed,
            }
        return found

    @property
    def text(self) -> str:
        """One screen."""
        now = self.numbers
        rank, _ = latest_rank([(one.exposed_s, one.error_s, one.step_s) for one in self.told])
        late = "no rank is late" if rank is None else f"rank {rank} is late"
        is_loading = now["rest_s"] > _LOADING_SHARE * now["step_s"]
        hint = " (the loader? Try a larger num_workers)" if is_loading else ""
        lines = [
            f"NetworkDoctor: a step takes {milli(now['step_s'])} on {len(self.told)} ranks:"
            f" computing {milli(now['computing_s'])}, waiting for messages"
            f" {milli(now['messages_s'])}, for the latest rank {milli(now['late_rank_s'])}"
            f" ({late}), data and the rest {milli(now['rest_s'])}{hint}."
        ]
        if self.case is None:
            return f"{lines[0]}\nLinks were not measured: that has not been run with NCCL yet."
        links = link_rows(self.case.cost, self.pairs, self.hosts)
        lines += [f"{title}: {value}" for title, value in links]
        return "\n".join([*lines, self.case.verdict(self.share)])
