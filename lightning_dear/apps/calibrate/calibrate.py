"""``dear-plan calibrate``: measures this cluster and this model, for ``dear-plan`` to predict with.

The engine measures a model's times and the link's costs whenever a planner asks for them. So this
is a short training with a planner that keeps these measurements; probes run after the last step.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_dear.apps import emulated
from lightning_dear.apps.program import Program
from lightning_dear.apps.train import train
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.emulation import emulated_rig
from lightning_dear.planning import LinkCost, PlanSearch, ThresholdFusion, measured, search
from lightning_dear.planning.predict import StepModel
from lightning_dear.simulator import saved
from lightning_dear.simulator.workload import BLOCKS, Workload, units_of
from lightning_dear.studies.interrupts import INTERRUPTS
from lightning_dear.studies.probes import Costs, measure

_TIMEOUT = timedelta(minutes=10)
_BYTES_PER_ELEMENT = 4


class Calibration(ThresholdFusion, search.StepModelPlanner):
    """A planner that makes fixed buckets and keeps the engine's measurements.

    Attributes:
        found: Measured times of the model, costs of the link and of the compressor. Set on rank 0
            when the engine has measured them. None before, and on other ranks.
    """

    name = "calibration"
    plans_for_codecs = True
    found: StepModel | None = None

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """Keep `model`, and return a search that ends at once; called on rank 0 only."""
        self.found = model
        return search.NoContest(self.plan(model.tensors, model.world_size), "calibration: measured")


class ExchangeProbe(Callback):
    """Measures exchanges, and what DDP and FSDP2 cost the host, when training has ended.

    Args:
        planner: The planner of the training; on rank 0 it has the engine's measurements.

    Attributes:
        found: The model, still without a name, and the costs. None means one rank, or a training
            that ended before the engine had measured.
    """

    def __init__(self, planner: Calibration) -> None:
        self.found: tuple[Workload, Costs] | None = None
        self._planner = planner

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        node = trainer.node_rank, trainer.local_rank
        collectives = new_collectives(trainer.strategy.root_device, _TIMEOUT, node=node)
        told: StepModel | None = collectives.all_gather_object(self._planner.found)[0]
        if trainer.world_size == 1 or told is None:
            return
        tensors, times = told.tensors, told.times
        # `ReplayModel` has this attribute. In other models FSDP2 shards the numbered blocks.
        unit_mb: Any = getattr(pl_module, "shard_unit_mb", BLOCKS)
        # Only the step of a shard was measured, not that of all parameters. So it counts as
        # `fixed_step_s`, which is the same for all strategies.
        workload = Workload("", tensors, replace(times, step_s=0.0), told.codecs)
        workload = replace(workload, fixed_step_s=times.step_s, shard_unit_mb=unit_mb)
        numels = {one.index: -(-one.numel * one.itemsize // _BYTES_PER_ELEMENT) for one in tensors}
        units = [[numels[index] for index in unit] for unit in units_of(workload)]

        def begin(what: str) -> None:
            if trainer.is_global_zero:
                print(f"dear-plan calibrate: {what} ...", file=sys.stderr, flush=True)

        ready_s, optimizer = sorted(times.ready_s.values()), trainer.optimizers[0]
        costs = measure(collectives, pl_module, optimizer, ready_s, units, begin)
        self.found = replace(workload, copies_s=costs.ddp_s, sharding_s=costs.sharding_s), costs


def run_job(cfg: DictConfig, program: Program) -> None:
    """Train some steps of ``cfg``, measure, and write the results. Starts the ranks. Blocks.

    Does so on emulated hosts if the config asks for these.

    Raises:
        ValueError: If the job has one rank, which has no network, or a strategy without a fusion.
        RuntimeError: If training ended before everything was measured.
    """
    if emulated.restart_on_cluster(cfg, "lightning_dear.apps.calibrate"):
        return
    train.check(cfg)
    if not (OmegaConf.is_config(cfg.strategy) and "fusion" in cfg.strategy):
        raise ValueError("dear-plan calibrate measures with strategy=dear. Leave strategy=... out.")
    seed_everything(cfg.seed, workers=True, verbose=False)
    datamodule = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    planner = Calibration()
    probe = ExchangeProbe(planner)
    strategy = instantiate(cfg.strategy, fusion=planner, _convert_="all")
    trainer = train.build_trainer(cfg, strategy, [probe])
    if trainer.world_size == 1:
        raise ValueError(
            "One rank has no network to measure. Set cluster.ranks_per_host=2 or more."
        )
    launcher: Any = strategy.launcher

    def interrupted(number: int) -> None:
        if trainer.is_global_zero:
            print("\ndear-plan calibrate: interrupted, and nothing is written.", file=sys.stderr)
        if launcher is not None:
            launcher.kill(signal.SIGKILL)

    with INTERRUPTS.call(interrupted):
        trainer.fit(model, datamodule=datamodule)
    if trainer.is_global_zero:
        _finish(cfg, trainer.world_size, probe.found)


def _finish(cfg: DictConfig, world_size: int, found: tuple[Workload, Costs] | None) -> None:
    if found is None:
        raise RuntimeError(
            "Training ended before everything was measured. Set"
            f" trainer.max_steps={2 * max(int(cfg.trainer.max_steps), 10)}, or use more batches."
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    choices, (workload, costs) = HydraConfig.get().runtime.choices, found
    workload = replace(workload, name=str(choices["model"]), compressor=str(choices["compressor"]))
    saved.save_workload(workload, folder / "model.json")
    (folder / "cluster").mkdir(exist_ok=True)
    cluster = cluster_of(cfg, world_size, costs, len(workload.tensors))
    text = OmegaConf.to_yaml(OmegaConf.create(cluster))
    (folder / "cluster" / "measured.yaml").write_text(text)
    print(text)
    print(f"dear-plan --config-dir={folder} cluster=measured profile={folder / 'model.json'}")


def cluster_of(cfg: DictConfig, world_size: int, costs: Costs, num_tensors: int) -> dict[str, Any]:
    """Return the content of a cluster's config file with the measured costs.

    Args:
        cfg: Config of the job that was measured.
        world_size: Number of ranks that were measured.
        costs: Measured costs.
        num_tensors: Number of the model's tensors, over which FSDP2's seconds are spread.
    """
    num_nodes = int(cfg.cluster.num_nodes)
    is_cpu = not torch.cuda.is_available() or cfg.cluster.accelerator == "cpu"
    is_gloo = is_cpu or OmegaConf.select(cfg, "strategy.process_group_backend") == "gloo"
    all_reduces = [one.all_reduce for one in costs.links if one.all_reduce is not None]
    source = f"measured by dear-plan calibrate among {world_size} ranks on {num_nodes} nodes"
    return {
        "source": ": ".join(filter(None, (source, emulated_rig()))),
        "num_hosts": num_nodes,
        "ranks_per_host": world_size // num_nodes,
        "num_nodes": "${.num_hosts}",
        "devices": "${.ranks_per_host}",
        "accelerator": str(cfg.cluster.accelerator),
        "interface": cfg.cluster.interface,
        **_link(costs.links),
        "measured": {
            "world_size": world_size,
            "num_nodes": num_nodes,
            "all_reduce": {**_link(all_reduces), "cpu_s": costs.all_reduce_cpu_s},
            # Emulated hosts are on one machine, whose cores all ranks share. null means real hosts.
            "shared_cores": os.cpu_count() if emulated_rig() else None,
            "all_gather": _curve(costs.all_gather, world_size),
            "reduce_scatter": _curve(costs.reduce_scatter, world_size),
            "has_reduce_scatter": not is_gloo,
            "sharded_tensor": {"seconds": (costs.sharding_s or 0.0) / num_tensors},
        },
    }


def _link(costs: Sequence[LinkCost]) -> dict[str, float]:
    return {
        "alpha_s": median(one.alpha_s for one in costs),
        "beta_s_per_byte": median(one.beta_s for one in costs),
    }


def _curve(times_s: Mapping[int, list[float]], world_size: int) -> dict[str, list[float]]:
    from scipy.optimize import isotonic_regression

    sent = [measured.sent_bytes(size, world_size) for size in times_s]
    # A longer message cannot take less time. If noise made it shorter, both get their mean.
    rising = isotonic_regression([median(repeats) for repeats in times_s.values()])
    return {"sizes_bytes": sent, "seconds": rising.x.tolist()}
