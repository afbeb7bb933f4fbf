"""What a config of ``dear-plan`` asks for."""

import math
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.compression import Compressor
from lightning_dear.simulator import Algorithm, Curve, Link, Network, Workload
from lightning_dear.simulator.ranking import Pair, pairs
from lightning_dear.simulator.saved import load_workload
from lightning_dear.simulator.strategies import HOOKS, STRATEGIES, resolve_strategy
from lightning_dear.studies.device_costs import Device, halves_costs, whole_costs
from lightning_dear.workloads.replay.profile import load_profile, planned

LOOPBACK = Link(5e-5, 1e-9)
"""Between ranks of one host on CPUs: an assumption, as that of conf/cluster/local.yaml."""

DEFAULT_COMPRESSORS = ("bf16", "int8")
"""Those that our studies found as good as dense."""


def workload_of(cfg: DictConfig) -> Workload:
    """Return the profile's model, with the seconds that the config gives it.

    Raises:
        ValueError: If there is no such profile, or its seconds make no sense.
    """
    path = Path(cfg.profile)
    if path.suffix == ".json" and path.is_file() and '"tensors"' in path.read_text():
        if cfg.compute_s is not None or cfg.step_s:
            raise ValueError(
                "compute_s and step_s change a profile's seconds, and these were measured; leave"
                " them out."
            )
        return load_workload(cfg.profile)
    profile = load_profile(cfg.profile)
    if cfg.compute_s is not None:
        profile = profile.with_compute(float(cfg.compute_s))
    if not profile.forward_s + profile.backward_s:
        raise ValueError(
            f"The profile {profile.name!r} takes no time, so there is nothing to compare exchanges"
            " with; record it again, or give another one."
        )
    tensors, times = planned(profile)
    return Workload(profile.name, tensors, replace(times, step_s=float(cfg.step_s)))


def workloads_of(cfg: DictConfig, workload: Workload, world_size: int) -> list[Workload]:
    """Return `workload`, and the same with each of `cfg.compressors`, among so many ranks.

    Raises:
        ValueError: If the model was measured with a compressor.
    """
    names = cfg.compressors
    if names is None:
        names = DEFAULT_COMPRESSORS if workload.codecs.are_none else ()
    names = [name for name in names if name != "none"]
    if names and not workload.codecs.are_none:
        raise ValueError(
            f"This model was measured with {workload.compressor!r}; leave compressors out, or"
            " calibrate without one."
        )
    device = device_of(cfg)
    return [workload, *(compressed(workload, name, device, world_size) for name in names)]


def device_of(cfg: DictConfig) -> Device:
    """Return what encodes, where that was not measured."""
    return Device(float(cfg.device.kernel_s), float(cfg.device.bytes_per_s))


def compressed(
    workload: Workload, compressor: str | Compressor, device: Device, world_size: int
) -> Workload:
    """Return `workload` with what a compressor would cost on `device`.

    Raises:
        ValueError: If it is unknown, or cannot be counted.
    """
    return replace(
        workload,
        codecs=halves_costs(compressor, device, world_size),
        whole_codecs=whole_costs(compressor, device, world_size),
        compressor=compressor if isinstance(compressor, str) else compressor.name,
    )


def network_of(
    cluster: DictConfig, algorithm: Algorithm = "best", world_size: int | None = None
) -> Network:
    """Return the cluster's network, for another number of ranks if one is given.

    Raises:
        ValueError: If the cluster's file lacks something, or has one rank.
    """
    beta_s, rate_mbit = cluster.beta_s_per_byte, cluster.get("rate_mbit")
    if beta_s is None and rate_mbit is None:
        raise ValueError(
            "The cluster's file says nothing of its links; set cluster.beta_s_per_byte (seconds a"
            " byte: 8.0e-10 at 10 Gb/s) and cluster.alpha_s."
        )
    inside, num_nodes = ranks_per_node(cluster), int(cluster.num_nodes)
    if inside * num_nodes < 2:
        raise ValueError(
            "The cluster has one rank, which sends nothing; set cluster.num_nodes and"
            " cluster.devices to those of yours."
        )
    world_size = inside * num_nodes if world_size is None else world_size
    if cluster.get("only_world_size", world_size) != world_size:
        raise ValueError(
            f"The cluster's file says nothing of {world_size} ranks, but of"
            f" {cluster.only_world_size} alone; ask for as many, or choose another cluster."
        )
    if (measured := cluster.get("measured")) is not None:
        if algorithm != "best":
            raise ValueError(
                f"algorithm={algorithm} means nothing for a cluster that was measured; leave it"
                " out."
            )
        if measured.num_nodes == 1 and (num_nodes > 1 or world_size > measured.world_size):
            raise ValueError(
                "This cluster was measured on one node, which says nothing of links between"
                " several; calibrate on two or more, or choose another cluster."
            )
        return measured_network(cluster, world_size)
    between = Link(float(cluster.alpha_s), float(8e-6 / rate_mbit if beta_s is None else beta_s))
    is_gloo = cluster.accelerator == "cpu"
    if algorithm == "best":
        # What the cluster's figures are of.
        algorithm = cluster.get("algorithm") or ("two_hops" if is_gloo else "best")
    return Network(
        between=between,
        world_size=world_size,
        ranks_per_node=inside,
        within=_within(cluster, between, is_gloo),
        algorithm=algorithm,
        has_reduce_scatter=not is_gloo,
    )


def _within(cluster: DictConfig, between: Link, is_gloo: bool) -> Link:
    """What the cluster's file says; else, on CPUs, loopback, where it is faster than the link."""
    within = cluster.get("within")
    if within is not None:
        return Link(within.alpha_s, within.beta_s_per_byte)
    return LOOPBACK if is_gloo and LOOPBACK.beta_s < between.beta_s else between


def measured_network(cluster: DictConfig, world_size: int) -> Network:
    """Return what was measured, for another number of ranks.

    Each rank counts as a node of its own: that ranks share a node's link is in what was measured.
    A rank starts P - 1 messages in each half, and takes part in 2 (P - 1) steps of an all-reduce:
    so alpha grows with P - 1. Seconds a byte stay. Where all ranks share one machine's cores, as
    those of an emulated cluster do, an all-reduce takes at least what these need for all of them:
    of many that are under way, cores are the limit. One that is waited for, as FSDP2's are, has the
    cores for itself, and its steps are.
    """
    measured = cluster.measured
    growth = (world_size - 1) / (measured.world_size - 1)

    def link(costs: DictConfig) -> Link:
        return Link(growth * costs.alpha_s, costs.beta_s_per_byte)

    all_reduce, cores = link(measured.all_reduce), measured.get("shared_cores")
    host_growth = 1.0
    if cores:
        busy_s = growth * measured.all_reduce.get("cpu_s", 0.0) * world_size / cores
        all_reduce = Link(max(all_reduce.alpha_s, busy_s), all_reduce.beta_s)
        # Ranks that are more than the cores that they share wait for each other.
        sharing, shared = (max(ranks / cores, 1.0) for ranks in (world_size, measured.world_size))
        host_growth = float(sharing / shared)
    return Network(
        between=link(cluster),
        world_size=world_size,
        within=link(cluster),
        algorithm="pairwise",
        all_reduce=all_reduce,
        all_gather=_read_curve(measured.get("all_gather"), growth),
        reduce_scatter=_read_curve(measured.get("reduce_scatter"), growth),
        has_reduce_scatter=measured.has_reduce_scatter,
        sharded_tensor_s=host_growth * measured.sharded_tensor.seconds,
        host_growth=host_growth,
    )


def _read_curve(measured: DictConfig | None, growth: float) -> Curve:
    """As measured; what the smallest takes grows as starts do, and longer ones' bytes hide it.

    For fewer ranks than were measured it stays: how much of a longer one was its start is unknown.
    """
    if measured is None or "sizes_bytes" not in measured:
        raise ValueError(
            "This cluster's file was measured by an earlier version, which knew less of the"
            " backend's own halves; run dear-plan calibrate again."
        )
    curve = Curve(tuple(map(float, measured.sizes_bytes)), tuple(map(float, measured.seconds)))
    return replace(curve, least_s=growth * curve.seconds[0])


def ranks_per_node(cluster: DictConfig) -> int:
    """Return how many ranks a node has.

    Raises:
        ValueError: If the cluster's file leaves it open.
    """
    if not isinstance(cluster.devices, int):
        raise ValueError(
            f"dear-plan has to know how many ranks a node has, not devices={cluster.devices!r}; set"
            " cluster.devices=8 (or another number)."
        )
    return cluster.devices


def cases_of(cfg: DictConfig, workload: Workload, world_size: int) -> list[Pair]:
    """Return each strategy with each compressor to predict, and DDP's hooks in any case.

    Where none are named, the strategies are all that can be used for the workload.
    """
    has_codec = not workload.codecs.are_none
    strategies = [one for one in STRATEGIES.values() if one.plans_for_codecs or not has_codec]
    if cfg.strategies is not None:
        strategies = [resolve_strategy(name) for name in cfg.strategies if name not in HOOKS]
    cases = pairs(strategies, workloads_of(cfg, workload, world_size))
    there, names = [(strategy.name, one.compressor) for strategy, one in cases], cfg.strategies
    for hooked, (strategy, name) in HOOKS.items():
        is_asked = strategy in strategies or hooked in (names or ())
        if is_asked and (strategy.name, name) not in there:
            one = compressed(workload.uncompressed, name, device_of(cfg), world_size)
            cases.append((strategy, one))
    # What cannot be run is shown as it is known, unless it was asked for.
    return [
        (strategy, one)
        for strategy, one in cases
        if cfg.strategies is not None
        or not strategy.encodes(one)
        or strategy.overrides_for(one) is not None
    ]


def world_sizes_of(cfg: DictConfig) -> list[int]:
    """Return the numbers of ranks of the scaling curves, the cluster's own among them.

    For null from an eighth of that to eight times as many, and one; those are left out that do not
    fill nodes, or of which nothing is known.

    Raises:
        ValueError: If one that was asked for would be left out.
    """
    inside, measured = ranks_per_node(cfg.cluster), cfg.cluster.get("measured")
    own, only = inside * int(cfg.cluster.num_nodes), cfg.cluster.get("only_world_size")
    most = measured.world_size if measured is not None and measured.num_nodes == 1 else math.inf
    asked = set(cfg.world_sizes or (1, *(own * 2**power // 8 for power in range(7))))
    filling = [size for size in asked if size <= inside or size % inside == 0]
    known = {size for size in filling if 1 <= size <= most and only in (None, size)}
    if cfg.world_sizes and asked != known:
        raise ValueError(
            f"Leave {sorted(asked - known)} out of world_sizes: that many ranks do not fill nodes"
            f" of {inside}, or the cluster's file says nothing of them."
        )
    return sorted({*known, own})
