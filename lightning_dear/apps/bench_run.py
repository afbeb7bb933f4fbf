"""One comparison on ranks that have been started: what ``dear-bench`` does on each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import device

from lightning_dear.apps.bench_config import (
    Entry,
    Setting,
    as_override,
    composed,
    entries_of,
    label_of,
    merged,
    overrides_of,
)
from lightning_dear.benchmarking.block import BlockLength, Rig, run_block
from lightning_dear.benchmarking.bounds import Bounds, compute_for_ratio
from lightning_dear.benchmarking.comparison import Candidate, find_best, run_rounds
from lightning_dear.benchmarking.competitors import default_ddp_caps
from lightning_dear.benchmarking.files import RawFile
from lightning_dear.benchmarking.progress import Progress
from lightning_dear.benchmarking.records import Block, Point, RankBlock, Row
from lightning_dear.benchmarking.summary import summarize
from lightning_dear.workloads.replay.model import ReplayModel
from lightning_dear.workloads.replay.profile import load_profile

COMPUTE_ALONE = "compute alone"
"""Name of the row that every rank trains for itself, with nothing sent."""

_CAPS = ("bucket_cap_mb", "first_bucket_cap_mb", "min_cap_mb", "max_cap_mb")
"""Options in MiB that say how much travels together."""


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
    def num_blocks(self) -> int:
        """How many blocks `run` will take."""
        tries = sum(len(entry.grid) for entry in self.entries) * self.cfg.grid_rounds
        tunings = sum(entry.tuning_steps > 0 for entry in self.entries)
        return int(tries + tunings + self.cfg.rounds * (len(self.entries) + 1))

    def run(self) -> None:
        """Measure everything, noting block after block. Collective, blocks."""
        # The baseline is the first entry, so what is no competitor stands last.
        candidates = [self._ready(entry) for entry in self.entries]
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
        steps = [step for block in alone for step in block.slowest_steps]
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
        return self._candidate(entry.name, overrides)

    def _candidate(self, name: str, overrides: Sequence[str]) -> Candidate:
        cfg = self._composed(overrides)
        return Candidate(name, partial(self._run, cfg, lambda: build_strategy(cfg)))

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        cfg = composed(merged(overrides_of(self.setting), [*overrides, *self._replay]))
        scale_caps(cfg)
        return cfg

    def _run_alone(self, length: BlockLength) -> RankBlock:
        cfg = self._composed(("trainer.devices=1", "trainer.num_nodes=1"))
        return self._run(cfg, lambda: SingleDeviceStrategy(device=self.root_device), length)

    def _run(
        self, cfg: DictConfig, new_strategy: Callable[[], Strategy], length: BlockLength
    ) -> RankBlock:
        seed_everything(cfg.seed, workers=True, verbose=False)
        new_trainer = partial(build_trainer, cfg, new_strategy())
        measured, _ = run_block(self.rig, new_trainer, build_model(cfg), self._batches, length)
        return measured

    # --- noting -------------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        if self.progress is not None:
            self.progress.begin(f"{self._point.label}: {what}" if self._point.label else what)

    def _note(self, block: Block) -> None:
        self.blocks.append(block)
        if self.progress is not None:
            self.progress.end()
        if self.rig.rank == 0:
            self._raw.add(self._point, block)


# --- building -----------------------------------------------------------------------------------


def build_model(cfg: DictConfig) -> LightningModule:
    """Build a fresh model."""
    model: LightningModule = instantiate(cfg.model, _convert_="all")
    return model


def build_strategy(cfg: DictConfig) -> Any:
    """Build a fresh strategy; a name where the config has one."""
    if OmegaConf.is_config(cfg.strategy):
        return instantiate(cfg.strategy, _convert_="all")
    return cfg.strategy


def build_trainer(cfg: DictConfig, strategy: Any, **options: Any) -> Trainer:
    """Build a trainer that only trains, until ``max_steps``."""
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        fast_dev_run=False,
        _convert_="all",
        **options,
    )
    return trainer


# --- what a point stands for --------------------------------------------------------------------


def is_replay(cfg: DictConfig) -> bool:
    """Whether the model waits instead of computing."""
    return str(cfg.model._target_).endswith(f".{ReplayModel.__name__}")


def replay_overrides(cfg: DictConfig, world_size: int) -> tuple[str, ...]:
    """Return what ``ratio`` means for the model: how long it waits.

    Raises:
        ValueError: If it is set and the model is no replay, or the link has no known rate.
    """
    if cfg.ratio is None:
        return ()
    if not is_replay(cfg):
        raise ValueError(
            "ratio changes how long a replayed model waits, and this one computes:"
            f" {cfg.model._target_}. Leave ratio out, or choose model=replay."
        )
    model_bytes = load_profile(cfg.model.profile).scaled(cfg.model.scale).nbytes
    compute_s = compute_for_ratio(cfg.ratio, model_bytes, world_size, rate_of(cfg))
    return (as_override("model.compute_s", compute_s),)


def scale_of(cfg: DictConfig) -> float:
    """Return what a replayed model's bytes are divided by; 1 for others."""
    return float(cfg.model.scale) if is_replay(cfg) else 1.0


def rate_of(cfg: DictConfig) -> float | None:
    """Return bytes per second of each link; None if the cluster's file has none."""
    rate_mbit = link_rate_mbit(cfg)
    return None if rate_mbit is None else rate_mbit * 1e6 / 8


def scale_caps(cfg: DictConfig) -> None:
    """Divide caps of buckets by the model's scale, in place: they are meant for the whole model.

    Without it a model of 1/20 of the bytes would travel in 1/20 of the buckets.
    """
    scale = scale_of(cfg)
    if scale == 1:
        return
    for node in (cfg.strategy, cfg.fusion):
        for name in node if OmegaConf.is_config(node) else ():
            if name in _CAPS and isinstance(node[name], (int, float)):
                node[name] = node[name] / scale
    if cfg.strategy.get("bucket_cap_mb", 0) is None and "DDP" in cfg.strategy._target_:
        with open_dict(cfg.strategy):
            cfg.strategy.update(default_ddp_caps(scale))


def link_rate_mbit(cfg: DictConfig) -> float | None:
    """Return the rate of a link, as the cluster's file has it, in 10^6 bits per second."""
    if cfg.cluster.get("rate_mbit") is not None:
        return float(cfg.cluster.rate_mbit)
    beta = cfg.cluster.beta_s_per_byte
    return 8 / beta / 1e6 if beta else None


def point_of(cfg: DictConfig, label: str, model: LightningModule, world_size: int) -> Point:
    """Return what is compared; a model that computes has no seconds yet.

    Args:
        cfg: The point's config.
        label: Of the point.
        model: One that was built as all entries build theirs.
        world_size: Number of ranks.
    """
    profile = model.profile if isinstance(model, ReplayModel) else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bounds = Bounds(
        forward_s=profile.forward_s if profile else None,
        backward_s=profile.backward_s if profile else None,
        model_bytes=sum(parameter.nbytes for parameter in trained),
        world_size=world_size,
        rate=rate_of(cfg),
    )
    net = cfg.model.get("net", {})
    name = profile.name if profile else str(net.get("_target_", cfg.model._target_)).split(".")[-1]
    return Point(
        label=label,
        model=name,
        scale=scale_of(cfg),
        link_rate_mbit=link_rate_mbit(cfg),
        rate_source="shaped" if cfg.cluster.get("rate_mbit") is not None else "assumed",
        is_replay=profile is not None,
        compute_source="profile" if profile else "not measured",
        bounds=bounds,
    )
