"""One comparison on ranks that have been started: what ``dear-bench`` does on each of them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from omegaconf import DictConfig
from torch import device

from lightning_dear.apps.bench.build import (
    build_model,
    build_strategy,
    build_trainer,
    point_of,
    replay_overrides,
    scale_caps,
)
from lightning_dear.apps.bench.config import (
    Entry,
    Setting,
    composed,
    entries_of,
    label_of,
    merged,
    overrides_of,
)
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.planning import BucketPlan
from lightning_dear.studies.block import BlockLength, Rig, run_block
from lightning_dear.studies.comparison import Candidate, find_best, run_rounds
from lightning_dear.studies.files import RawFile
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.records import COMPUTE_ALONE, Block, Point, RankBlock, Row
from lightning_dear.studies.summary import summarize
from lightning_dear.studies.table import times_as_fast


@dataclass
class Comparison:
    """All entries at one point.

    Args:
        setting: What sets the point apart from the job's config.
        rig: Where this process stands.
        root_device: Where its parameters live.
        folder: Gets raw.csv, on rank 0.
        progress: Shown on rank 0; None elsewhere.

    Attributes:
        blocks: What has been measured so far.
        notes: Entry -> what its tuning found.
    """

    setting: Setting
    rig: Rig
    root_device: device
    folder: Path
    progress: Progress | None
    blocks: list[Block] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compose the point's config and find out what it stands for."""
        self.cfg = composed(overrides_of(self.setting))
        self.entries = entries_of(self.cfg)
        self._replay = replay_overrides(self.cfg, self.rig.world_size)
        self._raw = RawFile(self.folder / "raw.csv")
        model = build_model(self._composed(()))
        self._point = point_of(self.cfg, label_of(self.setting), model, self.rig.world_size)
        datamodule = instantiate(self.cfg.data, _convert_="all")
        datamodule.prepare_data()
        datamodule.setup("fit")
        self._batches = list(islice(datamodule.train_dataloader(), self.cfg.num_batches))

    @property
    def num_steps(self) -> int:
        """How many optimizer steps `run` will take, warm-up included."""
        cfg = self.cfg
        tries = cfg.grid_rounds * sum(len(entry.grid) for entry in self.entries)
        tunings = [entry.tuning_steps for entry in self.entries if entry.tuning_steps]
        warm_up = [self._warm_up_of(one) for one in self.entries]
        rounds = [min(one.rounds or cfg.rounds, cfg.rounds) for one in self.entries]
        blocks = [
            count * (warm_up_steps + cfg.steps)
            for count, warm_up_steps in zip(rounds, warm_up, strict=True)
        ]
        alone = cfg.rounds * (cfg.warm_up_steps + cfg.steps)
        per_try = cfg.warm_up_steps + cfg.grid_steps
        tuned = sum(tunings) + len(tunings) * cfg.warm_up_steps
        return int(sum(blocks) + alone + tries * per_try + tuned)

    def _warm_up_of(self, entry: Entry) -> int:
        warm_up_steps = entry.warm_up_steps
        return self.cfg.warm_up_steps if warm_up_steps is None else warm_up_steps

    def run(self) -> None:
        """Measure everything, noting block after block. Collective, blocks."""
        # The baseline is the first entry, so what is no competitor stands last.
        candidates = [
            replace(self._ready(one), num_rounds=one.rounds, num_warm_up_steps=one.warm_up_steps)
            for one in self.entries
        ]
        candidates.append(Candidate(COMPUTE_ALONE, self._run_alone))
        length = BlockLength(self.cfg.warm_up_steps, self.cfg.steps)
        for block in run_rounds(candidates, length, self.cfg.rounds, self._begin):
            self._note(block)

    def rows(self) -> list[Row]:
        """Return the rows of all that has been measured so far."""
        names = [*(entry.name for entry in self.entries), COMPUTE_ALONE]
        return summarize(self.point, self.blocks, names, self.notes)

    @property
    def point(self) -> Point:
        """What is compared, with bounds from a replay's profile or else from what was measured."""
        alone = [block for block in self.blocks if block.entry == COMPUTE_ALONE]
        if self._point.is_replay or not alone:
            return self._point
        steps = [step for block in alone for step in block.steps]
        bounds = replace(
            self._point.bounds,
            forward_s=median(step.forward_s for step in steps),
            backward_s=median(step.backward_s for step in steps),
        )
        return replace(self._point, bounds=bounds, compute_source="measured")

    # --- entries ------------------------------------------------------------------------------

    def _ready(self, entry: Entry) -> Candidate:
        overrides = entry.overrides
        if entry.grid:
            tries = {f"{entry.name} ({', '.join(more)})": more for more in entry.grid}
            length = BlockLength(self.cfg.warm_up_steps, self.cfg.grid_steps)
            best = find_best(
                [self._candidate(name, (*overrides, *more)) for name, more in tries.items()],
                length,
                self.cfg.grid_rounds,
                self._begin,
                self._note,
            )
            overrides = (*overrides, *tries[best.name])
            self.notes[entry.name] = f"best of {len(tries)}: {', '.join(tries[best.name])}"
        if entry.tuning_steps:
            return self._tuned(entry, overrides)
        return self._candidate(entry.name, overrides)

    def _candidate(self, name: str, overrides: Sequence[str]) -> Candidate:
        cfg = self._composed(overrides)
        return Candidate(name, partial(self._run, cfg, partial(build_strategy, cfg)))

    def _tuned(self, entry: Entry, overrides: Sequence[str]) -> Candidate:
        """Let the strategy find its plan in one long fit, and keep that plan in all blocks."""
        cfg = self._composed(overrides)
        search = self._composed(entry.plan_of) if entry.plan_of else cfg
        found: list[Strategy] = []

        def run(length: BlockLength) -> RankBlock:
            measured, strategy = self._fit(search, build_strategy(search), length)
            found.append(strategy)
            return measured

        length = BlockLength(self.cfg.warm_up_steps, entry.tuning_steps)
        find_best([Candidate(entry.name, run)], length, 1, self._begin, self._note)
        plan, self.notes[entry.name] = found_plan(entry.name, found[0])
        if self.rig.rank == 0:
            self._keep(plan, entry.name)
        return Candidate(entry.name, partial(self._run, cfg, partial(build_strategy, cfg, plan)))

    def _keep(self, plan: BucketPlan, entry: str) -> None:
        """Write which tensors travel together, for whoever looks at the rows later."""
        folder = self.folder / "plans"
        folder.mkdir(exist_ok=True)
        label = re.sub(r"[^\w.]+", "_", self._point.label)
        content = {"point": self._point.label, "entry": entry, "buckets": groups_of(plan)}
        (folder / f"{label}_{entry}.json").write_text(f"{json.dumps(content)}\n")

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        cfg = composed(merged(overrides_of(self.setting), [*overrides, *self._replay]))
        scale_caps(cfg, self.rig.world_size)
        return cfg

    def _run_alone(self, length: BlockLength) -> RankBlock:
        cfg = self._composed(("trainer.devices=1", "trainer.num_nodes=1"))
        return self._run(cfg, lambda: SingleDeviceStrategy(device=self.root_device), length)

    def _run(
        self, cfg: DictConfig, new_strategy: Callable[[], Any], length: BlockLength
    ) -> RankBlock:
        return self._fit(cfg, new_strategy(), length)[0]

    def _fit(
        self, cfg: DictConfig, strategy: Any, length: BlockLength
    ) -> tuple[RankBlock, Strategy]:
        seed_everything(cfg.seed, workers=True, verbose=False)
        new_trainer = partial(build_trainer, cfg, strategy)
        return run_block(
            self.rig, new_trainer, build_model(cfg), self._batches, length, self._on_step
        )

    # --- noting -------------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        if self.progress is not None:
            self.progress.begin(f"{self._point.label}: {what}" if self._point.label else what)

    def _on_step(self) -> None:
        if self.progress is not None:
            self.progress.step()

    def _note(self, block: Block) -> None:
        self.blocks.append(block)
        if self.rig.rank == 0:
            self._raw.add(self._point, block)
        if self.progress is not None and block.round_number >= 0:
            self.progress.say(said_of(block, self.rows()))


def said_of(block: Block, rows: Sequence[Row]) -> str:
    """Return a line on a block that has ended: its step, and the entry's ratio so far."""
    step_s = median(step.step_s for step in block.steps)
    row = next(one for one in rows if one.entry == block.entry)
    is_compared = row.entry not in (rows[0].entry, COMPUTE_ALONE)
    times = times_as_fast(row, rows[0].entry) if is_compared else ""
    so_far = f", so far {times}" if times else ""
    return f"round {block.round_number + 1}: {block.entry} {step_s * 1e3:.0f} ms a step{so_far}"


def groups_of(plan: BucketPlan) -> list[list[int]]:
    """Return the numbers of the tensors of each bucket."""
    return [[piece.tensor for piece in bucket.slices] for bucket in plan.buckets]


def found_plan(entry: str, strategy: Any) -> tuple[BucketPlan, str]:
    """Return the plan that a strategy has found in a fit that has ended, and what it says of it.

    Raises:
        ValueError: If it makes none, or was still looking for it.
    """
    plan: BucketPlan | None = getattr(strategy, "plan", None)
    if plan is None:
        raise ValueError(
            f"Entry {entry} has tuning_steps, but its strategy makes no plan to keep; leave"
            " tuning_steps out, or choose strategy=dear."
        )
    callbacks = strategy.lightning_module.trainer.callbacks
    tuners = [one for one in callbacks if isinstance(one, FusionTuner)]
    if any(one.is_searching for one in tuners):
        raise ValueError(
            f"Entry {entry} was still looking for its plan after its tuning_steps; give it more"
            " (fusion=mergecomp takes 60 with a compressor), or its fusion fewer (fusion.num_steps"
            " of auto, fusion.num_trials of bayesian)."
        )
    reasons = "".join(one.reason for one in tuners)
    return plan, f"plan: {reasons or plan.name}"
