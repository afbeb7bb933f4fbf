"""One comparison of ``dear-bench``, as each of the started ranks runs it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig
from torch import device

from lightning_dear.apps.bench import build, config
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.planning import BucketPlan
from lightning_dear.studies import comparison, files, rounds, summary
from lightning_dear.studies.block import BlockLength, RankBlock, Rig, run_block
from lightning_dear.studies.report import Report

Run = Callable[[], RankBlock]
"""Fits a fresh module and returns this rank's measurements. Collective. Blocks."""


@dataclass
class Comparison:
    """All entries of a comparison at one point.

    Args:
        setting: Overrides that set the point apart from the job's config.
        rig: This process's rank and host.
        root_device: Device of this rank's parameters.
        report: Report that rank 0 writes after each block; its folder gets raw.csv and blocks.csv.
        known: Blocks that earlier runs in the same folder have measured, at any point.

    Attributes:
        blocks: Blocks of this point that have been measured so far.
        point: Columns that all entries of the point share; see `build.point_of`.
    """

    setting: config.Setting
    rig: Rig
    root_device: device
    report: Report
    known: Sequence[files.Line]

    def __post_init__(self) -> None:
        """Compose the point's config, describe the point and load the batches."""
        self.cfg = config.at_point(self.setting)
        own = config.entries_of(self.cfg)
        self.entries = [replace(one, length=self._whole(one.overrides, one.length)) for one in own]
        self._usual = BlockLength(self.cfg.warm_up_steps, self.cfg.steps)
        # Ratios are to the first row, so COMPUTE_ALONE, which is no competitor, comes last.
        most = {entry.name: min(entry.rounds, self.cfg.rounds) for entry in self.entries}
        self._turns = list(rounds.turns({**most, summary.COMPUTE_ALONE: self.cfg.rounds}))
        self._replay = build.replay_overrides(self.cfg, self.rig.world_size)
        model, label = build.build_model(self._composed(())), config.label_of(self.setting)
        self.point = build.point_of(self.cfg, label, model, self.rig.world_size)
        self.blocks = [block for block in self.known if block["point"] == label]
        datamodule = instantiate(self.cfg.data, _convert_="all")
        datamodule.prepare_data()
        datamodule.setup("fit")
        self._batches = list(islice(datamodule.train_dataloader(), self.cfg.num_batches))

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that `run` takes in a new folder, warm-up included."""
        cfg, lengths = self.cfg, {entry.name: entry.length for entry in self.entries}
        num_steps = sum(lengths.get(turn.entry, self._usual).max_steps - 1 for turn in self._turns)
        for entry in self.entries:
            num_steps += cfg.grid_rounds * len(entry.grid) * (cfg.warm_up_steps + cfg.grid_steps)
            num_steps += (cfg.warm_up_steps + entry.tuning_steps) * bool(entry.tuning_steps)
        return int(num_steps)

    def run(self) -> None:
        """Measure the missing blocks, and write each one when it ends. Collective. Blocks."""
        known = {(block["entry"], block["round"]) for block in self.blocks}
        to_go = [turn for turn in self._turns if turn[:2] not in known]
        num_known = len(self._turns) - len(to_go)
        self.report.progress.leave_out(self.num_steps * num_known // len(self._turns))
        if not to_go:
            return
        runs = {entry.name: self._ready(entry) for entry in self.entries}
        runs[summary.COMPUTE_ALONE] = self._alone(), ""
        for turn in to_go:
            run, note = runs[turn.entry]
            self._measure(turn, run, list(runs).index(turn.entry), note)

    def rows(self) -> list[files.Line]:
        """Return the rows of all blocks that have been measured so far."""
        return summary.summarize(self.point, self.blocks)

    # --- entries ------------------------------------------------------------------------------

    def _ready(self, entry: config.Entry) -> tuple[Run, str]:
        """Tune an entry if its config says so. Return a function that runs a block, and a note."""
        overrides, note, plan = entry.overrides, "", None
        if entry.grid:
            chosen = self._best_of_grid(entry)
            overrides, note = (*overrides, chosen), _note_of(entry, chosen)
        if entry.tuning_steps:
            plan, note = self._tuned(entry, overrides)
        return self._runner(overrides, entry.length, plan), note

    def _best_of_grid(self, entry: config.Entry) -> str:
        """Return the fastest override of the grid: measured now, or chosen by an earlier run."""
        noted = {block["note"] for block in self.blocks if block["entry"] == entry.name}
        for more in entry.grid:
            if _note_of(entry, more) in noted:
                return more
        length = BlockLength(self.cfg.warm_up_steps, self.cfg.grid_steps)
        tries = {f"{entry.name} ({more})": more for more in entry.grid}
        runs = {one: self._runner((*entry.overrides, more), length) for one, more in tries.items()}

        def measure(turn: rounds.Turn) -> float:
            return float(self._measure(turn, runs[turn.entry])["step_s"])

        return tries[rounds.find_best(list(runs), self.cfg.grid_rounds, measure)]

    def _tuned(self, entry: config.Entry, overrides: Sequence[str]) -> tuple[BucketPlan, str]:
        """Let the strategy search for its plan in one long fit. All blocks then use that plan."""
        search = self._composed(entry.plan_of or overrides)
        strategy = build.build_strategy(search)
        length = BlockLength(self.cfg.warm_up_steps, entry.tuning_steps)
        run = partial(self._fit, search, strategy, length)
        self._measure(rounds.Turn(entry.name, rounds.TUNING_ROUND, 0), run)
        plan, note = found_plan(entry.name, strategy)
        if self.rig.rank == 0:
            self._keep(plan, entry.name)
        return plan, note

    def _runner(
        self, overrides: Sequence[str], length: BlockLength, plan: BucketPlan | None = None
    ) -> Run:
        cfg, whole = self._composed(overrides), self._whole(overrides, length)
        return lambda: self._fit(cfg, build.build_strategy(cfg, plan), whole)

    def _whole(self, overrides: Sequence[str], length: BlockLength) -> BlockLength:
        """Return the length in whole rounds of the local steps that the overrides ask for."""
        return length.of_rounds(build.round_of(config.at_point(self.setting, overrides)))

    def _keep(self, plan: BucketPlan, entry: str) -> None:
        """Write the buckets of the plan to a file, to be read beside the table."""
        folder = self.report.folder / "plans"
        folder.mkdir(exist_ok=True)
        buckets = [[piece.tensor for piece in bucket.slices] for bucket in plan.buckets]
        content = {"point": self.point["point"], "entry": entry, "buckets": buckets}
        label = re.sub(r"[^\w.]+", "_", self.point["point"])
        (folder / f"{label}_{entry}.json").write_text(f"{json.dumps(content)}\n")

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        cfg = config.at_point(self.setting, [*overrides, *self._replay])
        build.scale_caps(cfg, self.rig.world_size)
        return cfg

    def _alone(self) -> Run:
        cfg = self._composed(("trainer.devices=1", "trainer.num_nodes=1"))
        return lambda: self._fit(cfg, SingleDeviceStrategy(device=self.root_device), self._usual)

    def _fit(self, cfg: DictConfig, strategy: Any, length: BlockLength) -> RankBlock:
        seed_everything(cfg.seed, workers=True, verbose=False)
        new_trainer, model = partial(build.build_trainer, cfg, strategy), build.build_model(cfg)
        on_step = self.report.progress.step
        return run_block(self.rig, new_trainer, model, self._batches, length, on_step)

    def _measure(self, turn: rounds.Turn, run: Run, number: int = 0, note: str = "") -> files.Line:
        """Run one block on all ranks, write it, and return it. Collective. Blocks."""
        what = f"{turn.entry}, round {turn.round + 1} of {self.cfg.rounds}"
        if turn.round < 0:
            what = f"looking for the best: {turn.entry}"
        self.report.progress.begin(": ".join(filter(None, (self.point["point"], what))))
        # A barrier: no rank starts while another one still ends its last block or loads its model.
        from_all_ranks(None)
        ranks = from_all_ranks(run())
        block = summary.block_of(turn, ranks, number, note)
        with self.report.lock:
            self.blocks.append(block)
            if self.rig.rank == 0:
                folder = self.report.folder
                files.append_lines(folder / "raw.csv", summary.raw_lines(self.point, block, ranks))
                files.append_lines(folder / "blocks.csv", [{**self.point, **block}])
                self.report.write()
        if block["round"] >= 0:
            self.report.progress.say(comparison.said_of(block, self.rows()))
        return block


def _note_of(entry: config.Entry, chosen: str) -> str:
    return f"best of {len(entry.grid)}: {chosen}"


def found_plan(entry: str, strategy: Any) -> tuple[BucketPlan, str]:
    """Return the plan that a strategy has found in a fit that has ended, and a note for people.

    Raises:
        ValueError: If the strategy makes no plan, or was still searching for one.
    """
    plan: BucketPlan | None = getattr(strategy, "plan", None)
    if plan is None:
        raise ValueError(
            f"Entry {entry} has tuning_steps, but its strategy makes no plan to keep. Leave"
            " tuning_steps out, or choose strategy=dear."
        )
    callbacks = strategy.lightning_module.trainer.callbacks
    tuners = [one for one in callbacks if isinstance(one, FusionTuner)]
    if any(one.is_searching for one in tuners):
        raise ValueError(
            f"Entry {entry} was still looking for its plan after its tuning_steps. Raise"
            " tuning_steps (fusion=mergecomp takes 60 with a compressor), or shorten the search"
            " (fusion.num_steps of fusion=auto, fusion.num_trials of fusion=bayesian)."
        )
    return plan, f"plan: {''.join(one.reason for one in tuners) or plan.name}"
