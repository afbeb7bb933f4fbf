"""What ``dear-plan calibrate`` has measured: as a cluster's file, and for people."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from lightning_dear.emulation import emulated_rig
from lightning_dear.planning import LinkCost, ModelTimes
from lightning_dear.simulator.curve import Curve
from lightning_dear.studies.probes.sizes import Spread


@dataclass(frozen=True)
class Costs:
    """What exchanges cost, by what a rank sends; the same on all ranks.

    Attributes:
        halves: Our reduce-scatter and all-gather.
        all_reduce: The backend's.
        all_gather: The backend's own, which ours is not on gloo.
        reduce_scatter: The backend's own, too, by what a rank sends in a half.
        all_reduce_cpu_s: Of a rank, for a short all-reduce; 0 where it was not measured.
        sharded_tensor_s: Of a rank in a step, for a tensor that FSDP2 shards; 0 where hosts run
            ahead.
        buffers_s: For which DDP holds up forward to send the model's buffers; of it, and not of the
            cluster.
        copies_s: In which DDP copies the model's gradients.
        sharding_s: That FSDP2 takes of a host for the model; None where it was not measured.
    """

    halves: Spread[LinkCost]
    all_reduce: Spread[LinkCost]
    all_gather: Spread[Curve]
    reduce_scatter: Spread[Curve]
    all_reduce_cpu_s: float = 0.0
    sharded_tensor_s: Spread[float] = Spread(0.0, 0.0, 0.0)
    buffers_s: float = 0.0
    copies_s: float = 0.0
    sharding_s: float | None = None


def cluster_of(cfg: DictConfig, world_size: int, costs: Costs) -> dict[str, Any]:
    """Return a cluster's file with what was measured among so many ranks."""
    num_nodes = int(cfg.cluster.num_nodes)
    is_gloo = not torch.cuda.is_available() or cfg.cluster.accelerator == "cpu"

    def written(cost: Spread[LinkCost]) -> dict[str, Any]:
        return {
            **_link(cost.middle),
            # What dear-plan makes an error band of.
            "least": _link(cost.least),
            "most": _link(cost.most),
        }

    source = f"measured by dear-plan calibrate among {world_size} ranks on {num_nodes} nodes"
    return {
        "source": ": ".join(filter(None, (source, emulated_rig()))),
        "num_nodes": num_nodes,
        "devices": world_size // num_nodes,
        "accelerator": str(cfg.cluster.accelerator),
        "interface": cfg.cluster.interface,
        **_link(costs.halves.middle),
        "measured": {
            "world_size": world_size,
            "num_nodes": num_nodes,
            "halves": written(costs.halves),
            "all_reduce": {**written(costs.all_reduce), "cpu_s": costs.all_reduce_cpu_s},
            # Of one machine that all ranks are on, whatever their number; null for others.
            "shared_cores": os.cpu_count() if emulated_rig() else None,
            "all_gather": _written(costs.all_gather),
            "reduce_scatter": _written(costs.reduce_scatter),
            "has_reduce_scatter": not is_gloo,
            "sharded_tensor": {
                "seconds": costs.sharded_tensor_s.middle,
                "least": costs.sharded_tensor_s.least,
                "most": costs.sharded_tensor_s.most,
            },
        },
    }


def _written(spread: Spread[Curve]) -> dict[str, list[float]]:
    return {
        "sizes_bytes": list(spread.middle.sizes),
        "seconds": list(spread.middle.seconds),
        "least": list(spread.least.seconds),
        "most": list(spread.most.seconds),
    }


def _link(cost: LinkCost) -> dict[str, float]:
    return {"alpha_s": cost.alpha_s, "beta_s_per_byte": cost.beta_s}


def summary(costs: Costs, times: ModelTimes, world_size: int) -> str:
    """Return what was measured, for people."""
    title = f"Measured among {world_size} ranks (alpha: a start; rate: of what a rank sends):"
    lines = [*filter(None, [emulated_rig()]), title]
    named = {
        "our reduce-scatter, all-gather": (_alphas_s(costs.halves), costs.halves.middle.beta_s),
        "the backend's all-reduce": (_alphas_s(costs.all_reduce), costs.all_reduce.middle.beta_s),
        "the backend's all-gather": _of_curve(costs.all_gather),
        "its reduce-scatter (of a half)": _of_curve(costs.reduce_scatter),
    }
    for name, (starts_s, beta_s) in named.items():
        least, start, most = (1e3 * one for one in starts_s)
        rate = f"{8e-6 / beta_s:.0f} Mb/s" if beta_s else "too fast to tell"
        lines.append(f"  {name:32s} {start:8.3f} ms ({least:.3f} to {most:.3f})  {rate}")
    lines.append(
        f"  forward {times.forward_s * 1e3:.1f} ms, backward {times.backward_s * 1e3:.1f} ms,"
        f" step of a shard {times.step_s * 1e3:.1f} ms"
    )
    if costs.buffers_s:
        lines.append(f"  DDP sends module buffers for {costs.buffers_s * 1e3:.1f} ms of forward")
    if costs.copies_s:
        lines.append(f"  DDP copies gradients for {costs.copies_s * 1e3:.1f} ms of a step")
    if costs.sharding_s:
        lines.append(f"  FSDP2 takes {costs.sharding_s * 1e3:.1f} ms of a host for the model")
    if host_s := costs.sharded_tensor_s.middle:
        lines.append(f"  FSDP2 takes {host_s * 1e6:.0f} us of a host for each tensor")
    return "\n".join(lines)


def _of_curve(spread: Spread[Curve]) -> tuple[list[float], float]:
    starts_s = [one.seconds[0] for one in (spread.least, spread.middle, spread.most)]
    return starts_s, spread.middle.seconds[-1] / spread.middle.sizes[-1]


def _alphas_s(spread: Spread[LinkCost]) -> list[float]:
    return [one.alpha_s for one in (spread.least, spread.middle, spread.most)]
