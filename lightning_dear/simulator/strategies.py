"""Strategies by name: how each makes its buckets, and what it does with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_dear import planning
from lightning_dear.names import check_name
from lightning_dear.planning.fusion import MIB, fuse_groups
from lightning_dear.planning.measured import NO_CODEC
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.programme import backward_order
from lightning_dear.planning.refine import everything_all_reduced
from lightning_dear.planning.step import Program
from lightning_dear.simulator.fsdp2_units import units_of
from lightning_dear.simulator.network import Network
from lightning_dear.simulator.schedule import Schedule, partitioned_program, single_program
from lightning_dear.simulator.simulate import simulate
from lightning_dear.simulator.workload import Workload

HOROVOD_FUSION_MB = 128.0
"""Of its buffer, and so of a bucket; HOROVOD_FUSION_THRESHOLD's default since 0.21, 64 before."""

HOROVOD_CYCLE_S = 1e-3
"""HOROVOD_CYCLE_TIME's default since 0.21; 5 ms before."""

OURS = Schedule()

Builder = Callable[[Workload, Network], Program]


@dataclass(frozen=True)
class Strategy:
    """One way to train with many ranks.

    Attributes:
        name: Its key in `STRATEGIES`.
        build: Makes its step of a workload on a network.
        overrides: What `dear-train` takes to use it; None where it cannot.
        compresses: What a workload's compressor is to it: it has halves to encode, or all-reduces,
            of which all ranks' bytes become all-gathers; "no": it goes without.
        plans_for_codecs: Whether it may be used with a compressor.
        searches: Whether its buckets are those of a search, which not all compressors allow.
        hooks: Compressor -> the strategy of `dear-train` that all-reduces with it.
    """

    name: str
    build: Builder
    overrides: str | None = None
    compresses: Literal["no", "halves", "whole"] = "no"
    plans_for_codecs: bool = True
    searches: bool = False
    hooks: Mapping[str, str] = field(default_factory=dict)

    def program(self, workload: Workload, network: Network) -> Program:
        """Its step of `workload` on `network`.

        Raises:
            ValueError: If there is a compressor and it may not be used with one.
        """
        if not self.allows(workload):
            raise ValueError(
                f"{self.name} may not be used with {workload.compressor!r}; leave one of them out."
            )
        if not self.encodes(workload):
            workload = workload.uncompressed
        elif self.compresses == "whole":
            workload = replace(workload, codecs=workload.whole_codecs or NO_CODEC)
        return self.build(workload, network)

    def allows(self, workload: Workload) -> bool:
        """Whether it may be used where the workload's compressor is wanted, with it or without."""
        codecs = workload.codecs
        return codecs.are_none or (self.plans_for_codecs and (codecs.may_plan or not self.searches))

    def encodes(self, workload: Workload) -> bool:
        """Whether its step of `workload` uses the compressor."""
        may = {"no": False, "halves": True, "whole": workload.whole_codecs is not None}
        return may[self.compresses] and not workload.codecs.are_none

    def overrides_for(self, workload: Workload) -> str | None:
        """What `dear-train` takes to use it for `workload`; None where it cannot."""
        if self.overrides is None or not self.encodes(workload):
            return self.overrides
        if self.compresses == "whole":
            hook = self.hooks.get(workload.compressor)
            return None if hook is None else f"strategy={hook}"
        return f"{self.overrides} compressor={workload.compressor}"


def planned(
    plan: Callable[[Sequence[planning.TensorSpec], int], planning.BucketPlan],
    schedule: Schedule = OURS,
    *,
    all_reduces: bool = False,
) -> Builder:
    """Buckets by a fixed rule."""

    def build(workload: Workload, network: Network) -> Program:
        made = plan(workload.tensors, network.world_size)
        return schedule.program(whole(made) if all_reduces else made, workload, network)

    return build


def as_published(cap_mb: float | None) -> Builder:
    """DeAR's schedule, in buckets up to a cap; without one in a bucket for every tensor."""
    caps: Any = {"bucket_cap_mb": cap_mb, "first_bucket_cap_mb": cap_mb}
    fusion = planning.NoFusion() if cap_mb is None else planning.ThresholdFusion(**caps)
    return planned(fusion.plan, Schedule(gathers="one_ahead", steps_late=True))


def whole(plan: planning.BucketPlan) -> planning.BucketPlan:
    """`plan` with every bucket all-reduced."""
    return replace(plan, all_reduced=tuple(range(len(plan.buckets))))


def searched(planner: planning.SearchingPlanner) -> Builder:
    """What the engine's own search ends with, if its trial steps take what is simulated."""

    def build(workload: Workload, network: Network) -> Program:
        times, world_size = workload.sharded_times(network.world_size), network.world_size
        link, codecs = linear(workload, network), workload.codecs
        given = () if codecs.are_none else (codecs,)
        search = planner.search(workload.tensors, world_size, times, link, *given)
        while (plan := search.next()) is not None:
            search.tell(plan, simulate(OURS.program(plan, workload, network)).step_s)
        return OURS.program(search.best, workload, network)

    return build


def linear(workload: Workload, network: Network) -> planning.LinkCost:
    """What planners know of a network: alpha and beta, of a small bucket and of half the model.

    Of all-reduces, too. What no line fits, such as a change of algorithm, they do not see.
    """
    small, large = 1024.0, workload.nbytes / 2 + 2048.0

    def fitted(cost_s: Callable[[float], float], halves: int) -> tuple[float, float]:
        sent = halves * (network.sent_bytes(large) - network.sent_bytes(small))
        beta_s = (cost_s(large) - cost_s(small)) / sent if sent else 0.0
        return max(cost_s(small) - beta_s * halves * network.sent_bytes(small), 0.0), beta_s

    return planning.LinkCost(
        *fitted(network.half_s, 1), all_reduce=planning.LinkCost(*fitted(network.all_reduce_s, 2))
    )


def _mgwfbp(workload: Workload, network: Network) -> Program:
    """MG-WFBP's rule with the cost of an all-reduce."""
    link = linear(workload, network).all_reduce
    assert link is not None
    as_half = planning.LinkCost(link.alpha_s, 2 * link.beta_s)
    times = workload.sharded_times(network.world_size)
    model = StepModel(workload.tensors, network.world_size, times, as_half)
    return OURS.program(whole(planning.MGWFBPFusion().best_plan(model)), workload, network)


def horovod_program(
    workload: Workload,
    network: Network,
    cycle_s: float = HOROVOD_CYCLE_S,
    fusion_mb: float = HOROVOD_FUSION_MB,
) -> Program:
    """All gradients that a cycle finds ready, up to the buffer's size, are one all-reduce."""
    times, groups = workload.times, list[list[int]]()
    for family in backward_order(workload.tensors, times):
        last_cycle, filled = -1.0, 0.0
        for tensor in family:
            cycle = -(-times.ready_s.get(tensor.index, times.backward_s) // cycle_s)
            if cycle != last_cycle or filled + tensor.nbytes > fusion_mb * MIB:
                groups.append([])
                last_cycle, filled = cycle, 0.0
            groups[-1].append(tensor.index)
            filled += tensor.nbytes
    plan = whole(fuse_groups("horovod", workload.tensors, network.world_size, groups))
    return Schedule(cycle_s=cycle_s).program(plan, workload, network)


def in_units(schedule: Schedule) -> Builder:
    """Buckets that are a workload's units; see `Workload.shard_unit_mb`."""

    def build(workload: Workload, network: Network) -> Program:
        name = f"units({workload.shard_unit_mb})"
        plan = fuse_groups(name, workload.tensors, network.world_size, units_of(workload))
        return schedule.program(plan, workload, network)

    return build


_ZERO = Schedule(gathers="at_once", uses_the_backends=True)
_FSDP2 = Schedule(gathers="one_ahead", uses_the_backends=True, shards_tensors=True)
_DDP = Schedule(is_ddp=True)

FUSED = "dear_"
"""Before the name of a fusion: ours with it."""


def _fused(fusion: str) -> Strategy:
    planner = planning.FUSIONS[fusion]()
    is_searched = isinstance(planner, planning.SearchingPlanner)
    return Strategy(
        FUSED + fusion,
        searched(planner) if is_searched else planned(planner.plan),
        f"strategy=dear fusion={fusion}",
        compresses="halves",
        plans_for_codecs=not is_searched or getattr(planner, "plans_for_codecs", False),
        searches=is_searched,
    )


_EACH = planned(planning.NoFusion().plan, _DDP, all_reduces=True)
_IN_CAPS = planned(everything_all_reduced, _DDP)

STRATEGIES: dict[str, Strategy] = {
    one.name: one
    for one in (
        # One rank alone, which sends nothing: what the others are measured against.
        Strategy("single", single_program),
        # An all-reduce for every tensor, as soon as its gradient is there.
        Strategy("wfbp", _EACH, "strategy=wfbp", "whole"),
        # DistributedDataParallel: all-reduces of 25 MiB, the first of 1 MiB.
        Strategy("ddp", _IN_CAPS, "strategy=ddp", "whole", hooks={"bf16": "ddp_bf16"}),
        # All-reduces of what each cycle of 1 ms finds, up to 128 MiB.
        Strategy("horovod", horovod_program, compresses="whole"),
        Strategy("mgwfbp", _mgwfbp, compresses="whole"),
        # All-reduces of 4 MiB, those that forward needs first before the others.
        Strategy("bytescheduler", partitioned_program),
        # ZeRO-2: reduce-scatters in backward, all-gathers before the next forward.
        Strategy("zero", in_units(_ZERO)),
        # FSDP2 that keeps parameters: all-gathers in forward, one ahead.
        Strategy("fsdp2", in_units(_FSDP2), "strategy=fsdp2_zero2"),
        # DeAR as published: gradients are gathered one ahead, every rank steps all.
        Strategy("dear_paper", as_published(25.0), "strategy=dear_paper"),
        # Ours: in buckets of 8 to 25 MiB, in those that are predicted to be best, in measured ones.
        Strategy("dear", planned(planning.ThresholdFusion().plan), "strategy=dear", "halves"),
        _fused("mergecomp"),
        _fused("auto"),
    )
}
"""Name -> strategy."""

HOOKS = {hooked: (one, name) for one in STRATEGIES.values() for name, hooked in one.hooks.items()}
"""What `dear-train` calls a strategy with a hook of its own -> that strategy and the compressor."""


def resolve_strategy(name: str) -> Strategy:
    """The strategy of that name, the one that has a hook of that name, or ours with a fusion.

    Raises:
        ValueError: If there is none; the message lists the names.
    """
    known = STRATEGIES | {hooked: one for hooked, (one, _) in HOOKS.items()}
    fused = [FUSED + one for one in planning.FUSIONS]
    if name not in known and name in fused:
        return _fused(name.removeprefix(FUSED))
    return known[check_name("strategy", name, dict.fromkeys([*known, *fused]))]
