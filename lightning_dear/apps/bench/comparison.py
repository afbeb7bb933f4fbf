"""One comparison on ranks that have been started: what ``dear-bench`` does on each of them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from omegaconf import DictConfig
from torch import device

from lightning_dear.apps.bench import build, config
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.planning import BucketPlan
from lightning_dear.studies import rounds
from lightning_dear.studies.block import BlockLength, Rig, run_block
from lightning_dear.studies.comparison import said_of
from lightning_dear.studies.files import append_lines
from lightning_dear.studies.records import COMPUTE_ALONE, Block, RankBlock, Row
from lightning_dear.studies.report import Report
from lightning_dear.studies.summary import block_line, raw_lines, summarize


@dataclass
class Comparison:
    """All entries at one point.

    Args:
        setting: What sets the point apart from the job's config.
        rig: Where this process stands.
        root_device: Where its parameters live.
        report: Written on rank 0 after each block; its folder gets raw.csv and blocks.csv.

    Attributes:
        blocks: What has been measured so far, an earlier run of the same folder included.
        point: What is compared.
    """

    setting: config.Setting
    rig: Rig
    root_device: device
    report: Report[Row]
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Compose the point's config and find out what it stands for."""
        self.cfg = config.at_point(self.setting)
        self.entries = config.entries_of(self.cfg)
        self._replay = build.replay_overrides(self.cfg, self.rig.world_size)
        model = build.build_model(self._composed(()))
        self.point = build.point_of(
            self.cfg, config.label_of(self.setting), model, self.rig.world_size
        )
        datamodule = instantiate(self.cfg.data, _convert_="all")
        datamodule.prepare_data()
        datamodule.setup("fit")
        self._batches = list(islice(datamodule.train_dataloader(), self.cfg.num_batches))
        self._rows: list[Row] | None = None

    @property
    def num_steps(self) -> int:
        """How many optimizer steps `run` takes in a new folder, warm-up included."""
        cfg = self.cfg
        num_steps = cfg.rounds * (cfg.warm_up_steps + cfg.steps)
        for entry in self.entries:
            warm_up_steps = entry.warm_up_steps or cfg.warm_up_steps
            num_steps += min(entry.rounds or cfg.rounds, cfg.rounds) * (warm_up_steps + cfg.steps)
            num_steps += cfg.grid_rounds * len(entry.grid) * (cfg.warm_up_steps + cfg.grid_steps)
            if entry.tuning_steps:
                num_steps += cfg.warm_up_steps + entry.tuning_steps
        return int(num_steps)

    def run(self) -> None:
        """Measure what is missing, noting block after block. Collective, blocks."""
        taking_part = {entry.name: entry.rounds for entry in self.entries}
        wanted = self.cfg.rounds
        to_go = rounds.rounds_to_go({**taking_part, COMPUTE_ALONE: None}, self.blocks, wanted)
        if self.report.progress is not None:
            self.report.progress.leave_out(self.num_steps * (wanted - len(to_go)) // wanted)
        if not to_go:
            return
        candidates = [self._ready(number, entry) for number, entry in enumerate(self.entries)]
        # The baseline is the first entry, so what is no competitor stands last.
        candidates.append(rounds.Candidate(COMPUTE_ALONE, self._run_alone))
        length = BlockLength(self.cfg.warm_up_steps, self.cfg.steps)
        for measured in rounds.run_rounds(candidates, length, to_go, self._begin):
            self._note(measured)

    def rows(self) -> list[Row]:
        """Return the rows of all that has been measured so far."""
        if self._rows is None:
            self._rows = summarize(self.point, self.blocks)
        return self._rows

    # --- entries ------------------------------------------------------------------------------

    def _ready(self, number: int, entry: config.Entry) -> rounds.Candidate:
        overrides, note, plan = entry.overrides, "", None
        if entry.grid:
            chosen = self._best_of_grid(entry)
            overrides, note = (*overrides, *chosen), _note_of(entry, chosen)
        if entry.tuning_steps:
            plan, note = self._tuned(entry, overrides)
        run = self._runner(overrides, plan)
        return rounds.Candidate(entry.name, run, entry.rounds, entry.warm_up_steps, number, note)

    def _best_of_grid(self, entry: config.Entry) -> tuple[str, ...]:
        """Measure all values of the grid, unless an earlier run has chosen one."""
        noted = {block.note for block in self.blocks if block.entry == entry.name}
        for more in entry.grid:
            if _note_of(entry, more) in noted:
                return more
        tries = {f"{entry.name} ({', '.join(more)})": more for more in entry.grid}
        best = rounds.find_best(
            [
                rounds.Candidate(name, self._runner((*entry.overrides, *more)))
                for name, more in tries.items()
            ],
            BlockLength(self.cfg.warm_up_steps, self.cfg.grid_steps),
            self.cfg.grid_rounds,
            self._begin,
            self._note,
        )
        return tries[best.name]

    def _tuned(self, entry: config.Entry, overrides: Sequence[str]) -> tuple[BucketPlan, str]:
        """Let the strategy find its plan in one long fit; it is kept in all blocks."""
        search = self._composed(entry.plan_of or overrides)
        found: list[Strategy] = []

        def run(length: BlockLength) -> RankBlock:
            measured, strategy = self._fit(search, build.build_strategy(search), length)
            found.append(strategy)
            return measured

        length = BlockLength(self.cfg.warm_up_steps, entry.tuning_steps)
        rounds.find_best([rounds.Candidate(entry.name, run)], length, 1, self._begin, self._note)
        plan, note = found_plan(entry.name, found[0])
        if self.rig.rank == 0:
            self._keep(plan, entry.name)
        return plan, note

    def _runner(
        self, overrides: Sequence[str], plan: BucketPlan | None = None
    ) -> Callable[[BlockLength], RankBlock]:
        cfg = self._composed(overrides)
        return lambda length: self._fit(cfg, build.build_strategy(cfg, plan), length)[0]

    def _keep(self, plan: BucketPlan, entry: str) -> None:
        """Write which tensors travel together, for whoever looks at the rows later."""
        folder = self.report.folder / "plans"
        folder.mkdir(exist_ok=True)
        label = re.sub(r"[^\w.]+", "_", self.point.label)
        content = {"point": self.point.label, "entry": entry, "buckets": groups_of(plan)}
        (folder / f"{label}_{entry}.json").write_text(f"{json.dumps(content)}\n")

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        cfg = config.at_point(self.setting, [*overrides, *self._replay])
        build.scale_caps(cfg, self.rig.world_size)
        return cfg

    def _run_alone(self, length: BlockLength) -> RankBlock:
        cfg = self._composed(("trainer.devices=1", "trainer.num_nodes=1"))
        return self._fit(cfg, SingleDeviceStrategy(device=self.root_device), length)[0]

    def _fit(
        self, cfg: DictConfig, strategy: Any, length: BlockLength
    ) -> tuple[RankBlock, Strategy]:
        seed_everything(cfg.seed, workers=True, verbose=False)
        new_trainer = partial(build.build_trainer, cfg, strategy)
        return run_block(
            self.rig, new_trainer, build.build_model(cfg), self._batches, length, self._on_step
        )

    # --- noting -------------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        if self.report.progress is not None:
            self.report.progress.begin(f"{self.point.label}: {what}" if self.point.label else what)

    def _on_step(self) -> None:
        if self.report.progress is not None:
            self.report.progress.step()

    def _note(self, measured: rounds.Measured) -> None:
        block, ranks = measured
        with self.report.lock:
            self.blocks.append(block)
            self._rows = None
            if self.rig.rank == 0:
                folder = self.report.folder
                append_lines(folder / "raw.csv", raw_lines(self.point, block, ranks))
                append_lines(folder / "blocks.csv", [block_line(self.point, block)])
                self.report.write()
        if self.report.progress is not None and block.round >= 0:
            self.report.progress.say(said_of(block, self.rows()))


def _note_of(entry: config.Entry, chosen: Sequence[str]) -> str:
    return f"best of {len(entry.grid)}: {', '.join(chosen)}"


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
