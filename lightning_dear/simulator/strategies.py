"""Strategies by name: how each makes its buckets, and its schedule for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_dear import planning
from lightning_dear.names import check_name
from lightning_dear.planning import measured, programme, refine
from lightning_dear.planning.fusion import MIB, fuse_groups
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.step import Phase, Program
from lightning_dear.simulator import Network, Workload, simulate
from lightning_dear.simulator import schedule as schedules
from lightning_dear.simulator.workload import units_of

if TYPE_CHECKING:
    from lightning_dear.local_steps import LocalSteps

HOROVOD_FUSION_MB = 128.0
"""Most MiB of a Horovod bucket: default of HOROVOD_FUSION_THRESHOLD since 0.21; 64 before."""

HOROVOD_CYCLE_S = 1e-3
"""Default of HOROVOD_CYCLE_TIME since 0.21; 5 ms before."""

OURS = schedules.Schedule()

Builder = Callable[[Workload, Network], Program]


@dataclass(frozen=True)
class Strategy:
    """A strategy that can be simulated: DDP, FSDP2, `strategy="dear"` or a published one.

    Attributes:
        name: Key in `STRATEGIES`.
        build: Makes the program of a step from a workload and a network.
        overrides: Overrides of `dear-train` that select the strategy. None means that `dear-train`
            cannot run it.
        compresses: How it uses a workload's compressor. "halves": it encodes reduce-scatters and
            all-gathers. "whole": it gathers all ranks' encoded gradients instead of all-reducing.
            "no": it does not use it.
        plans_for_codecs: Whether it may be used with a workload that has a compressor.
        searches: Whether a search finds its buckets. Not all compressors allow that.
        hooks: Compressor -> name that `dear-train` has for this strategy with that compressor.
        costs_samples: Whether training takes more steps than under DDP, whatever the compressor.
        batches: Number of micro-batches whose gradients are summed before they are exchanged. A
            step of the simulation is then one micro-batch.
    """

    name: str
    build: Builder
    overrides: str | None = None
    compresses: Literal["no", "halves", "whole"] = "no"
    plans_for_codecs: bool = True
    searches: bool = False
    hooks: Mapping[str, str] = field(default_factory=dict)
    costs_samples: bool = False
    batches: int = 1

    def program(self, workload: Workload, network: Network) -> Program:
        """Return the program of a step of `workload` on `network`.

        Raises:
            ValueError: If the workload has a compressor that the strategy does not allow.
        """
        if not self.allows(workload):
            raise ValueError(
                f"{self.name} may not be used with {workload.compressor!r}. Leave one of them out."
            )
        if not self.encodes(workload):
            workload = workload.uncompressed
        elif self.compresses == "whole":
            workload = replace(workload, codecs=workload.whole_codecs or measured.NO_CODEC)
        return self.build(workload, network)

    def allows(self, workload: Workload) -> bool:
        """Whether the strategy may run a workload that has this compressor, using it or not."""
        codecs = workload.codecs
        return codecs.are_none or (self.plans_for_codecs and (codecs.may_plan or not self.searches))

    def encodes(self, workload: Workload) -> bool:
        """Whether the strategy's step of `workload` uses the compressor."""
        may = {"no": False, "halves": True, "whole": workload.whole_codecs is not None}
        return may[self.compresses] and not workload.codecs.are_none

    def overrides_for(self, workload: Workload) -> str | None:
        """Return the overrides of `dear-train` for `workload`. None means it cannot run it."""
        if self.overrides is None or not self.encodes(workload):
            return self.overrides
        if self.compresses == "whole":
            hook = self.hooks.get(workload.compressor)
            return None if hook is None else f"strategy={hook}"
        return f"{self.overrides} compressor={workload.compressor}"


def planned(
    plan: Callable[[Sequence[planning.TensorSpec], int], planning.BucketPlan],
    schedule: schedules.Schedule = OURS,
    *,
    all_reduces: bool = False,
) -> Builder:
    """Return a builder whose buckets come from the fixed rule `plan`.

    Args:
        plan: Makes a plan from tensors and the number of ranks.
        schedule: How buckets are exchanged and stepped.
        all_reduces: Whether all buckets are all-reduced.
    """

    def build(workload: Workload, network: Network) -> Program:
        made = plan(workload.tensors, network.world_size)
        return schedule.program(whole(made) if all_reduces else made, workload, network)

    return build


def as_published(cap_mb: float | None) -> Builder:
    """Return a builder of the DeAR paper's step, in buckets up to a cap.

    Args:
        cap_mb: Most MiB of a bucket. None means a bucket for every tensor.
    """
    caps: Any = {"bucket_cap_mb": cap_mb, "first_bucket_cap_mb": cap_mb}
    fusion = planning.NoFusion() if cap_mb is None else planning.ThresholdFusion(**caps)
    return planned(fusion.plan, schedules.Schedule(gathers="one_ahead", steps_late=True))


def whole(plan: planning.BucketPlan) -> planning.BucketPlan:
    """Return `plan` with every bucket all-reduced."""
    return replace(plan, all_reduced=tuple(range(len(plan.buckets))))


def searched(planner: planning.SearchingPlanner) -> Builder:
    """Return a builder that runs the engine's own search, with simulated instead of trial steps."""

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
    """Return the costs that planners get of a network: a line through two points.

    The points are a bucket of 1 KiB and a bucket of half the model, for halves and for all-reduces.
    So planners do not see costs that are not linear in the size, such as a change of algorithm.
    """
    small, large = 1024.0, workload.nbytes / 2 + 2048.0

    def fitted(cost_s: Callable[[float], float], halves: int) -> tuple[float, float]:
        sent = halves * (network.sent_bytes(large) - network.sent_bytes(small))
        beta_s = (cost_s(large) - cost_s(small)) / sent if sent else 0.0
        return max(cost_s(small) - beta_s * halves * network.sent_bytes(small), 0.0), beta_s

    all_reduce = planning.LinkCost(*fitted(network.all_reduce_s, 2))
    return planning.LinkCost(*fitted(network.half_s, 1), all_reduce=all_reduce)


def _mgwfbp(workload: Workload, network: Network) -> Program:
    """MG-WFBP's rule, with the cost of an all-reduce instead of a half's."""
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
    """Return Horovod's step: the gradients ready in a cycle, up to a size, are one all-reduce.

    Args:
        workload: The model.
        network: The network.
        cycle_s: Seconds of a cycle.
        fusion_mb: Most MiB of an all-reduce.
    """
    times, groups = workload.times, list[list[int]]()
    for family in programme.backward_order(workload.tensors, times):
        last_cycle, filled = -1.0, 0.0
        for tensor in family:
            cycle = -(-times.ready_s.get(tensor.index, times.backward_s) // cycle_s)
            if cycle != last_cycle or filled + tensor.nbytes > fusion_mb * MIB:
                groups.append([])
                last_cycle, filled = cycle, 0.0
            groups[-1].append(tensor.index)
            filled += tensor.nbytes
    plan = whole(fuse_groups("horovod", workload.tensors, network.world_size, groups))
    return schedules.Schedule(cycle_s=cycle_s).program(plan, workload, network)


def in_units(schedule: schedules.Schedule) -> Builder:
    """Return a builder whose buckets are the workload's units; see `Workload.shard_unit_mb`."""

    def build(workload: Workload, network: Network) -> Program:
        name = f"units({workload.shard_unit_mb})"
        plan = fuse_groups(name, workload.tensors, network.world_size, units_of(workload))
        return schedule.program(plan, workload, network)

    return build


_FSDP2 = schedules.Schedule(gathers="one_ahead", uses_the_backends=True, shards_tensors=True)
_DDP = schedules.Schedule(is_ddp=True)

FUSED = "dear_"
"""Prefix of a fusion's name: `strategy="dear"` with that fusion, as dear_mergecomp."""


def _fused(fusion: str) -> Strategy:
    planner = planning.FUSIONS[fusion]()
    is_searched = isinstance(planner, planning.SearchingPlanner)
    build = searched(planner) if is_searched else planned(planner.plan)
    may_encode = not is_searched or getattr(planner, "plans_for_codecs", False)
    overrides = f"strategy=dear fusion={fusion}"
    return Strategy(FUSED + fusion, build, overrides, "halves", may_encode, is_searched)


def with_local_steps(options: "LocalSteps") -> Strategy:
    """Return `strategy="dear"` with local steps.

    Args:
        options: The options. `dear-train`'s overrides tell `every` alone.
    """
    name = f"local_steps={options.every}"
    build, overrides = partial(schedules.round_program, options), f"strategy=dear strategy.{name}"
    return Strategy(f"dear, {name}", build, overrides, "halves", costs_samples=True)


def in_two_hops(strategy: Strategy) -> Strategy:
    """Return a strategy of ours with `hops=2`, which NCCL's own collectives do not have."""

    def build(workload: Workload, network: Network) -> Program:
        return strategy.build(workload, replace(network, algorithm="two_hops"))

    name, overrides = f"{strategy.name}, hops=2", f"{strategy.overrides} strategy.hops=2"
    return replace(strategy, name=name, build=build, overrides=overrides)


BATCHES = (2, 4, 8)
"""Numbers of micro-batches for which accumulation is predicted."""


def accumulating(strategy: Strategy, batches: int) -> Strategy:
    """Return a strategy that exchanges the sums of several micro-batches.

    All of them but one are computing alone, so that each takes, with the forward F, the backward B
    and a step S of one micro-batch, ((batches - 1) (F + B) + S) / batches.

    Args:
        strategy: Strategy with a forward and a backward in each step.
        batches: Number of micro-batches, as `Trainer(accumulate_grad_batches=...)`.
    """

    def build(workload: Workload, network: Network) -> Program:
        name, ops, _ = strategy.build(workload, network)
        forward, backward, _ = schedules.single_program(workload, network).ops
        # The first forward waits for what the step before has gathered; the last backward launches.
        end = ops.index(Phase(begins=False)) + 1
        more = (backward, forward) * (batches - 1)
        return Program(name, (*ops[:end], *more, *ops[end:]), batches)

    name = f"{strategy.name}, accumulate={batches}"
    overrides = f"{strategy.overrides} trainer.accumulate_grad_batches={batches}"
    return replace(strategy, name=name, build=build, overrides=overrides, hooks={}, batches=batches)


_EACH = planned(planning.NoFusion().plan, _DDP, all_reduces=True)
_IN_CAPS = planned(refine.everything_all_reduced, _DDP)

STRATEGIES: dict[str, Strategy] = {
    one.name: one
    for one in (
        # One rank alone, which sends nothing: the reference for scaling efficiency.
        Strategy("single", schedules.single_program),
        # An all-reduce for every tensor, as soon as its gradient is ready.
        Strategy("wfbp", _EACH, "strategy=wfbp", "whole"),
        # DistributedDataParallel: all-reduces of 25 MiB, the first of 1 MiB.
        Strategy("ddp", _IN_CAPS, "strategy=ddp", "whole", hooks={"bf16": "ddp_bf16"}),
        # An all-reduce of the gradients that are ready in a cycle of 1 ms, up to 128 MiB.
        Strategy("horovod", horovod_program, compresses="whole"),
        Strategy("mgwfbp", _mgwfbp, compresses="whole"),
        # All-reduces of 4 MiB; tensors that forward reads first have priority.
        Strategy("bytescheduler", schedules.partitioned_program),
        # ZeRO-2: reduce-scatters in backward, all-gathers before the next forward.
        Strategy("zero", in_units(schedules.Schedule(gathers="at_once", uses_the_backends=True))),
        # FSDP2 with reshard_after_forward=False: all-gathers in forward, one ahead.
        Strategy("fsdp2", in_units(_FSDP2), "strategy=fsdp2_zero2"),
        # The DeAR paper: gradients are gathered one ahead, and every rank steps all parameters.
        Strategy("dear_paper", as_published(25.0), "strategy=dear_paper"),
        # Ours: buckets of 8 to 25 MiB; predicted to be fastest (mergecomp); found by trials (auto).
        Strategy("dear", planned(planning.ThresholdFusion().plan), "strategy=dear", "halves"),
        _fused("mergecomp"),
        _fused("auto"),
    )
}
"""Name -> strategy."""

HOOKS = {hooked: (one, name) for one in STRATEGIES.values() for name, hooked in one.hooks.items()}
"""Name that `dear-train` has for a strategy with a hook (ddp_bf16) -> strategy and compressor."""


def resolve_strategy(name: str) -> Strategy:
    """Return a strategy by its name, by its name with a hook, or by `FUSED` and a fusion's name.

    Raises:
        ValueError: If there is no such strategy; the message lists the names.
    """
    known = STRATEGIES | {hooked: one for hooked, (one, _) in HOOKS.items()}
    fused = [FUSED + one for one in planning.FUSIONS]
    if name not in known and name in fused:
        return _fused(name.removeprefix(FUSED))
    return known[check_name("strategy", name, dict.fromkeys([*known, *fused]))]
