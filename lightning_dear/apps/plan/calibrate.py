"""``dear-plan calibrate``: measures this cluster and this model, for ``dear-plan`` to plan with.

The engine measures both whenever a planner wants times: so this is a short training with a planner
that writes down what it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Literal

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_dear.apps import emulated, job
from lightning_dear.apps.plan.measured_costs import Costs, cluster_of, summary
from lightning_dear.apps.train import train
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.work import Collectives
from lightning_dear.paths import conf_dir
from lightning_dear.planning import LinkCost, ModelTimes, PlanSearch, TensorSpec, ThresholdFusion
from lightning_dear.planning.measured import NO_CODEC, CodecCosts
from lightning_dear.planning.search import NoContest
from lightning_dear.simulator import Workload
from lightning_dear.simulator.curve import Curve, rising
from lightning_dear.simulator.fsdp2_units import units_of
from lightning_dear.simulator.saved import save_workload
from lightning_dear.simulator.workload import BLOCKS
from lightning_dear.studies.probes.ddp import gradient_copies_s, module_buffers_s
from lightning_dear.studies.probes.paced import due_of, with_paced_alpha
from lightning_dear.studies.probes.sharding import (
    probe_gather,
    probe_reduce_scatter,
    sharded_tensor_s,
)
from lightning_dear.studies.probes.sharding_host import Units, sharding_s
from lightning_dear.studies.probes.sizes import Of, Spread, measure_sizes

MODULE = "lightning_dear.apps.plan.calibrate"
_TIMEOUT = timedelta(minutes=10)
_WAITED_BYTES = tuple(1 << power for power in range(12, 22, 2))
"""Of whole buffers, 4 KiB to 1 MiB; and a quarter of what is moved in large exchanges."""

_BYTES_PER_ELEMENT = 4
_LARGE_BYTES = 1 << 22, 1 << 24
"""Least and most that is moved in large exchanges; in between as much as the model has."""

log = logging.getLogger(__name__)


class Calibration(ThresholdFusion):
    """A planner that keeps its own buckets, and what the engine has measured for it.

    Attributes:
        found: Tensors, times, the link's costs and a codec's, on rank 0 once they are there.
    """

    name = "calibration"
    plans_for_codecs = True

    def __init__(
        self, *, bucket_cap_mb: float | None = None, first_bucket_cap_mb: float = 1.0
    ) -> None:
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)
        self.found: tuple[Sequence[TensorSpec], ModelTimes, LinkCost, CodecCosts] | None = None

    def search(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> PlanSearch:
        """See `SearchingPlanner`; called on rank 0."""
        self.found = tensors, times, link, codecs
        return NoContest(self.plan(tensors, world_size), "calibration: measured")


class ExchangeProbe(Callback):
    """Measures exchanges when training has ended.

    Args:
        planner: What training has told of the model, on rank 0.

    Attributes:
        costs: None until then, and of one rank.
    """

    def __init__(self, planner: Calibration) -> None:
        self.costs: Costs | None = None
        self._planner = planner

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1:
            return
        device = trainer.strategy.root_device
        collectives = new_collectives(device, _TIMEOUT)
        model_bytes = sum(p.numel() * p.itemsize for p in pl_module.parameters())
        least, most = _LARGE_BYTES
        large = min(max(model_bytes, least), most)
        halves, all_reduce = measure_sizes(collectives, device, large)
        # Known on rank 0.
        found = self._planner.found
        told = None if found is None else (due_of(*found[:2]), _units(found[0], pl_module))
        due, units = collectives.all_gather_object(told)[0] or (None, [])
        cpu_s, tensor_s, own_s = 0.0, Spread(0.0, 0.0, 0.0), None
        if device.type == "cpu":
            repeats_s = sharded_tensor_s(collectives, device, trainer.optimizers[0])
            tensor_s = Spread(repeats_s[0], median(repeats_s), repeats_s[-1])
            own_s = sharding_s(collectives, device, units, trainer.optimizers[0])
            if due is not None:
                all_reduce, cpu_s = with_paced_alpha(all_reduce, collectives, device, due)
        all_gather, reduce_scatter = (
            _waited_for(probe, collectives, device, large // 4)
            for probe in (probe_gather, probe_reduce_scatter)
        )
        self.costs = Costs(
            halves,
            all_reduce,
            all_gather,
            reduce_scatter,
            cpu_s,
            tensor_s,
            buffers_s=module_buffers_s(collectives, device, pl_module),
            copies_s=gradient_copies_s(collectives, device, pl_module),
            sharding_s=own_s,
        )


def _units(tensors: Sequence[TensorSpec], model: LightningModule) -> Units:
    """Elements of what FSDP2 would shard together, as if all were in fp32."""
    numels = {one.index: -(-one.numel * one.itemsize // _BYTES_PER_ELEMENT) for one in tensors}
    workload = Workload("", tensors, ModelTimes(0.0, 0.0, {}, {}), shard_unit_mb=_unit_mb_of(model))
    return [[numels[index] for index in unit] for unit in units_of(workload)]


def _unit_mb_of(model: LightningModule) -> float | Literal["blocks"]:
    # Of a replay; others' blocks are sharded, as `Task`s' are.
    return getattr(model, "shard_unit_mb", BLOCKS)


def _waited_for(
    probe: Callable[[Collectives, torch.device, int], list[float]],
    collectives: Collectives,
    device: torch.device,
    large: int,
) -> Spread[Curve]:
    sizes = sorted({*_WAITED_BYTES, large})
    times_s = [probe(collectives, device, size) for size in sizes]
    sent = [size * (collectives.world_size - 1) / collectives.world_size for size in sizes]

    def curve(of: Of) -> Curve:
        return rising(sent, [of(repeats) for repeats in times_s])

    return Spread(curve(min), curve(median), curve(max))


def calibrate(cfg: DictConfig) -> None:
    """Train some steps of ``cfg`` and write what they tell. Starts the ranks, and blocks.

    Raises:
        ValueError: If the job has one rank, whose network nobody can measure, or another strategy.
        RuntimeError: If training ended before everything was measured.
    """
    train.check(cfg)
    _check(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    datamodule = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    planner = Calibration()
    probe = ExchangeProbe(planner)
    strategy = instantiate(cfg.strategy, fusion=planner, _convert_="all")
    trainer = train.build_trainer(cfg, strategy, [probe])
    if trainer.world_size == 1:
        raise ValueError("One rank has no network to measure; set cluster.devices=2 or more.")
    trainer.fit(model, datamodule=datamodule)
    if trainer.is_global_zero:
        _finish(cfg, trainer.world_size, planner, probe.costs, model)


def _check(cfg: DictConfig) -> None:
    if not (OmegaConf.is_config(cfg.strategy) and "fusion" in cfg.strategy):
        raise ValueError("dear-plan calibrate measures with strategy=dear; leave strategy out.")
    chosen = HydraConfig.get().overrides.task
    if any(word.lstrip("+~").startswith("fusion") for word in chosen):
        log.warning("fusion is ignored: calibration trains in the default buckets.")


def _finish(
    cfg: DictConfig,
    world_size: int,
    planner: Calibration,
    costs: Costs | None,
    model: LightningModule,
) -> None:
    if planner.found is None or costs is None:
        raise RuntimeError(
            "Training ended before everything was measured: let it take more steps"
            f" (trainer.max_steps={2 * max(int(cfg.trainer.max_steps), 10)}), or more batches."
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    tensors, times, _, codecs = planner.found
    # What stepping all instead of a shard takes was not measured: so it is counted alike for all.
    others = replace(times, step_s=0.0)
    choices = HydraConfig.get().runtime.choices
    workload = Workload(
        str(choices["model"]),
        tensors,
        others,
        codecs,
        compressor=str(choices["compressor"]),
        fixed_step_s=times.step_s,
        buffers_s=costs.buffers_s,
        copies_s=costs.copies_s,
        sharding_s=costs.sharding_s,
        shard_unit_mb=_unit_mb_of(model),
    )
    save_workload(workload, folder / "model.json")
    (folder / "cluster").mkdir(exist_ok=True)
    text = OmegaConf.to_yaml(OmegaConf.create(cluster_of(cfg, world_size, costs)))
    (folder / "cluster" / "measured.yaml").write_text(text)
    print(summary(costs, times, world_size))
    print(f"dear-plan --config-dir={folder} cluster=measured profile={folder / 'model.json'}")


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="calibrate")
def main(cfg: DictConfig) -> None:
    """Calibrate once."""
    with job.one_message("dear-plan calibrate"), job.isolated_job():
        if not emulated.restart_on_cluster(cfg, MODULE):
            calibrate(cfg)


if __name__ == "__main__":
    main()
