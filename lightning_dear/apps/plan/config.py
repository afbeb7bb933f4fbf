"""Builds workloads, networks and cases from a config of ``dear-plan``."""

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.local_steps import LocalSteps
from lightning_dear.simulator import Curve, Link, Network, Workload, ranking, saved, strategies
from lightning_dear.simulator.network import Algorithm
from lightning_dear.strategy import DearStrategy
from lightning_dear.studies.device_costs import AS_GOOD, Device, compressed
from lightning_dear.workloads.replay.profile import load_profile, planned

LOOPBACK = Link(5e-5, 1e-9)
"""Assumed link between ranks of one host on CPUs; conf/cluster/local.yaml has the same figures."""


def workload_of(cfg: DictConfig) -> Workload:
    """Return the model of ``cfg.profile``, with the seconds of the config if it has any.

    Raises:
        ValueError: If there is no such profile, it takes no time, or the config changes the seconds
            of a measured model.
    """
    path = Path(cfg.profile)
    if path.suffix == ".json" and path.is_file() and '"tensors"' in path.read_text():
        if cfg.compute_s is not None or cfg.step_s:
            raise ValueError(f"{cfg.profile} has measured seconds. Leave compute_s and step_s out.")
        return saved.load_workload(cfg.profile)
    profile = load_profile(cfg.profile)
    if cfg.compute_s is not None:
        profile = profile.with_compute(float(cfg.compute_s))
    if not profile.forward_s + profile.backward_s:
        raise ValueError(
            f"The profile {profile.name!r} takes no time. Record it again with record_profile, or"
            " choose another profile. Exchanges are compared with the time of forward and backward."
        )
    return Workload(profile.name, *planned(profile, float(cfg.step_s)))


def workloads_of(cfg: DictConfig, workload: Workload, world_size: int) -> list[Workload]:
    """Return `workload`, and one copy of it for each of `cfg.compressors`.

    Args:
        cfg: Config of the job.
        workload: Model to predict.
        world_size: Number of ranks.

    Raises:
        ValueError: If compressors are given and the model was measured with a compressor.
    """
    usual = AS_GOOD if workload.codecs.are_none else ()
    asked = usual if cfg.compressors is None else cfg.compressors
    names = [name for name in asked if name != "none"]
    if names and not workload.codecs.are_none:
        raise ValueError(
            f"This model was measured with {workload.compressor!r}. Leave compressors out, or"
            " run dear-plan calibrate without a compressor."
        )
    return [workload, *(compressed(workload, name, device_of(cfg), world_size) for name in names)]


def device_of(cfg: DictConfig) -> Device:
    """Return the speed of the device that encodes, from the config."""
    return Device(float(cfg.device.kernel_s), float(cfg.device.bytes_per_s))


def backend_of(cfg: DictConfig) -> str:
    """Return the backend to predict: the config's, or that with which the cluster was measured.

    Raises:
        ValueError: If the config names a backend, and the cluster was measured.
    """
    has_gpus, measured = cfg.cluster.accelerator != "cpu", cfg.cluster.get("measured")
    if measured is not None and cfg.backend is not None:
        raise ValueError(
            f"A measured cluster ignores backend={cfg.backend}. Leave it out. dear-plan calibrate"
            " strategy.process_group_backend=... measures another one."
        )
    is_host = has_gpus and measured is not None and not measured.has_reduce_scatter
    return cfg.backend or ("staged" if is_host else "nccl" if has_gpus else "gloo")


def network_for(
    cfg: DictConfig, world_size: int | None = None, backend: str | None = None
) -> Network:
    """Return the network of the config's cluster, with its algorithm and its way through hosts.

    Args:
        cfg: Config of the job.
        world_size: Number of ranks. None means as many as the cluster has.
        backend: One of `simulator.network.BACKENDS`. None means the config's.

    Raises:
        ValueError: In the same cases as `network_of` and `backend_of`.
    """
    backend, rates = backend or backend_of(cfg), cfg.staged
    network = network_of(cfg.cluster, cfg.algorithm, world_size, backend)
    if backend != "staged" or cfg.cluster.get("measured") is not None:
        return network
    bus = Link(float(rates.copy_s), 1 / rates.bus_bytes_per_s)
    return replace(network, bus=bus, sum_s=1 / rates.sum_bytes_per_s)


def network_of(
    cluster: DictConfig,
    algorithm: Algorithm | None = None,
    world_size: int | None = None,
    backend: str | None = None,
) -> Network:
    """Return the network of a cluster.

    Args:
        cluster: Config of the cluster.
        algorithm: Algorithm of the collectives. None means that with which the cluster's figures
            were obtained, if its file names one; else what the backend uses.
        world_size: Number of ranks. None means as many as the cluster has.
        backend: One of `simulator.network.BACKENDS`. None means gloo on clusters of CPUs, and
            NCCL on others.

    Raises:
        ValueError: If the cluster's config lacks a value, or it has one rank only.
    """
    beta_s, rate_mbit = cluster.beta_s_per_byte, cluster.get("rate_mbit")
    if beta_s is None and rate_mbit is None:
        raise ValueError(
            "The cluster's file says nothing of its links. Set cluster.beta_s_per_byte (seconds a"
            " byte: 8.0e-10 at 10 Gb/s) and cluster.alpha_s (seconds a message)."
        )
    if beta_s is None and not rate_mbit > 0:
        raise ValueError(f"cluster.rate_mbit={rate_mbit} is not valid. Set it to more than 0.")
    inside, num_nodes = ranks_per_node(cluster), int(cluster.num_nodes)
    if inside * num_nodes < 2:
        raise ValueError(
            "The cluster has one rank, which sends nothing. Set cluster.num_hosts and"
            " cluster.ranks_per_host so that it has two or more."
        )
    world_size = inside * num_nodes if world_size is None else world_size
    if cluster.get("only_world_size", world_size) != world_size:
        raise ValueError(
            f"The cluster's file says nothing of {world_size} ranks, but of"
            f" {cluster.only_world_size} alone. Set cluster.num_hosts and cluster.ranks_per_host so"
            " that there are as many, or choose another cluster."
        )
    if (measured := cluster.get("measured")) is not None:
        if algorithm is not None:
            raise ValueError(f"A measured cluster ignores algorithm={algorithm}. Leave it out.")
        if measured.num_nodes == 1 and (num_nodes > 1 or world_size > measured.world_size):
            raise ValueError(
                f"This cluster was measured with {measured.world_size} ranks on one host. Leave out"
                " cluster.num_hosts and cluster.ranks_per_host, or run dear-plan calibrate on"
                f" {num_nodes} hosts with {world_size} ranks."
            )
        return measured_network(cluster, world_size)
    alpha_s = float(cluster.alpha_s) + float(cluster.get("delay_ms", 0.0)) / 1e3
    between = Link(alpha_s, float(8e-6 / rate_mbit if beta_s is None else beta_s))
    is_gloo = backend in ("gloo", "staged") if backend else cluster.accelerator == "cpu"
    algorithm = algorithm or cluster.get("algorithm") or ("two_hops" if is_gloo else "nccl")
    if algorithm == "two_hops" and not is_gloo:
        # NCCL does not know two hops. Ours use them if `hops=2` says so, in rows of their own.
        algorithm = "nccl"
    within = _within(cluster, between, is_gloo)
    return Network(between, world_size, inside, within, algorithm, has_reduce_scatter=not is_gloo)


def _within(cluster: DictConfig, between: Link, is_gloo: bool) -> Link:
    """Return the link between ranks of one node.

    It is the cluster's `within` if its file has one. Without one it is `LOOPBACK` on CPUs, if that
    is faster than the link between nodes; otherwise it is the link between nodes.
    """
    if (within := cluster.get("within")) is not None:
        return Link(within.alpha_s, within.beta_s_per_byte)
    return LOOPBACK if is_gloo and LOOPBACK.beta_s < between.beta_s else between


def measured_network(cluster: DictConfig, world_size: int) -> Network:
    """Return a measured cluster's network, for another number of ranks.

    Each rank counts as a node of its own, because the measured costs include the sharing of a
    node's link. A rank starts P - 1 messages in each half, and takes part in 2 (P - 1) steps of an
    all-reduce, so alpha grows with P - 1. Beta (seconds per byte) stays. If all ranks share the
    cores of one machine, as on an emulated cluster, an all-reduce takes at least the CPU time that
    all ranks need for it divided by the cores, because many all-reduces run at once. The exchanges
    of FSDP2 are waited for one by one and have all cores, so this limit does not apply to them.
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
        # With more ranks than cores, ranks wait for each other's host work.
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
    """Return a measured curve for `growth` times as many message starts.

    The time of the smallest message, which is mostly its start, is multiplied by `growth` and
    becomes the least time of any message. Times of longer messages stay as measured, because it is
    unknown how much of them was the start. So a `growth` below 1 changes nothing.
    """
    if measured is None or "sizes_bytes" not in measured:
        raise ValueError(
            "This cluster's file was measured by an earlier version, and lacks times of the"
            " backend's own all-gather and reduce-scatter. Run dear-plan calibrate again."
        )
    curve = Curve(tuple(map(float, measured.sizes_bytes)), tuple(map(float, measured.seconds)))
    return replace(curve, least_s=growth * curve.seconds[0])


def ranks_per_node(cluster: DictConfig) -> int:
    """Return the number of ranks of a node.

    Raises:
        ValueError: If ``cluster.ranks_per_host`` is no number, such as "auto".
    """
    if not isinstance(cluster.devices, int):
        raise ValueError(
            f"cluster.ranks_per_host={cluster.devices!r} is no number. Set it to those of one host."
        )
    return cluster.devices


def cases_of(cfg: DictConfig, workload: Workload, network: Network) -> list[ranking.Pair]:
    """Return the pairs of strategy and workload to predict.

    These are ``cfg.strategies``, or all that the workload allows if that is null, with each
    compressor; DDP with its own hook (ddp_bf16), even if that compressor was not asked for, and
    with sums of `strategies.BATCHES` micro-batches; and beside `dear` itself `dear` with
    ``cfg.local_steps``, with the compressors that it takes. On nodes of several ranks with NCCL
    there is also `dear` in two hops, and if ``cfg.algorithm`` is two_hops so is each other one of
    ours.
    """
    known, asked = strategies.STRATEGIES, cfg.strategies
    chosen = [one for one in known.values() if one.plans_for_codecs or workload.codecs.are_none]
    if asked is not None:
        chosen = [strategies.resolve_strategy(one) for one in asked if one not in strategies.HOOKS]
    if network.has_nccl_hosts:
        hopped = [*known] if cfg.algorithm == "two_hops" else ["dear"]
        ours = [one for one in chosen if one.compresses == "halves" and one.name in hopped]
        chosen += map(strategies.in_two_hops, ours)
    workloads = workloads_of(cfg, workload, network.world_size)
    cases = ranking.pairs(chosen, workloads)
    if (ddp := known[ranking.BASELINE]) in chosen:
        plain = workload.uncompressed
        cases += ((strategies.accumulating(ddp, number), plain) for number in strategies.BATCHES)
    if cfg.local_steps is not None and known["dear"] in chosen:
        local = strategies.with_local_steps(LocalSteps(every=cfg.local_steps))
        cases += ((local, one) for one in workloads if _takes_local_steps(one.compressor))
    there = [(strategy.name, one.compressor) for strategy, one in cases]
    for hooked, (strategy, name) in strategies.HOOKS.items():
        is_asked = strategy in chosen or hooked in (asked or ())
        if is_asked and (strategy.name, name) not in there:
            one = compressed(workload.uncompressed, name, device_of(cfg), network.world_size)
            cases.append((strategy, one))
    # A pair that encodes is left out if dear-train cannot run it, unless the config names it.
    return [
        (strategy, one)
        for strategy, one in cases
        if asked is not None or not strategy.encodes(one) or strategy.overrides_for(one) is not None
    ]


def _takes_local_steps(compressor: str) -> bool:
    try:
        DearStrategy(compressor=compressor, local_steps=1)
    except ValueError:
        return False
    return True


def world_sizes_of(cfg: DictConfig) -> list[int]:
    """Return the numbers of ranks of the scaling curves; the cluster's own number is one of them.

    If ``cfg.world_sizes`` is null, they are 1 and the powers of two times the cluster's number,
    from 1/8 to 8. A number that does not fill nodes, or for which the cluster's file has no
    figures, is left out.

    Raises:
        ValueError: If a number in ``cfg.world_sizes`` would be left out.
    """
    inside, measured = ranks_per_node(cfg.cluster), cfg.cluster.get("measured")
    own, only = inside * int(cfg.cluster.num_nodes), cfg.cluster.get("only_world_size")
    most = measured.world_size if measured is not None and measured.num_nodes == 1 else float("inf")
    asked = set(cfg.world_sizes or (1, *(own * 2**power // 8 for power in range(7))))
    filling = [size for size in asked if size <= inside or size % inside == 0]
    known = {size for size in filling if 1 <= size <= most and only in (None, size)}
    if cfg.world_sizes and asked != known:
        raise ValueError(
            f"{sorted(asked - known)} ranks do not fill hosts of {inside}, or the cluster's file"
            f" says nothing of them. Leave {sorted(asked - known)} out of world_sizes."
        )
    return sorted({*known, own})
