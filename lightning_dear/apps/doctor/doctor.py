"""``dear-train doctor=true``: is this cluster fit for the job, and does the job need more than DDP?

Every rank joins the others at a store, compares versions, opens a TCP connection to every other
rank, measures the links, and times a few forwards and backwards of the configured model on its own
data. Nothing is written.
"""

import hashlib
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.doctor.measuring import Compute, measure_compute
from lightning_dear.apps.doctor.reachability import Door, MeetingPoint, knock_from, named, open_door
from lightning_dear.apps.train import report
from lightning_dear.callbacks.batch_split import quickest
from lightning_dear.collectives.factory import new_collectives, on_host
from lightning_dear.collectives.work import Collectives
from lightning_dear.collectives.world import World
from lightning_dear.doctor.links import Pair, Rows, link_rows, measure_links, milli
from lightning_dear.doctor.prescription import NEGLIGIBLE_SHARE, Case, measured_devices
from lightning_dear.local_steps import LocalSteps, hiding
from lightning_dear.planning import LinkCost
from lightning_dear.telemetry.statistics import latest_rank
from lightning_dear.tuning.host_path import measure_host_path

COMPUTE_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other while models are built and timed."""

_MANY_STEPS = 2.0
"""Times as many steps as others local steps may need. They are proposed where a step with int8
takes longer than computing alone by more than this factor: elsewhere they may gain nothing."""

_PARTS = 8
"""Number of parts of a rank's batch. The proposed split moves whole parts."""


class Findings(NamedTuple):
    """Results of all checks; equal on every rank.

    Attributes:
        problems: One sentence for each check that failed.
        table: Title and result of each check.
        verdict: Whether DDP would be as good, in a sentence or two. Empty if a check failed.
    """

    problems: list[str]
    table: Rows
    verdict: str


def examine_job(cfg: DictConfig, trainer: Trainer) -> Findings:
    """Start the ranks as for training, examine, and print on rank 0. Blocks.

    Raises:
        UnreachableError: If a rank does not come within ``cfg.doctor_timeout_s``.
        SystemExit: With code 1 on rank 0, if a check failed.
    """
    # Ranks that a launcher forks or spawns have no Hydra to resolve ${hydra:...} with.
    OmegaConf.resolve(cfg)
    strategy = trainer.strategy
    launcher: Any = strategy.launcher
    findings = launcher.launch(examine, strategy, cfg) if launcher else examine(strategy, cfg)
    if trainer.is_global_zero:
        title = f"doctor: {cfg.task_name}, {trainer.world_size} rank(s)"
        below = [f"PROBLEM: {problem}" for problem in findings.problems] or [findings.verdict]
        print(report.format_table(title, findings.table), *below, sep="\n", flush=True)
        if findings.problems:
            raise SystemExit(1)
    return findings


def examine(strategy: Any, cfg: DictConfig) -> Findings:
    """Run all checks on a started rank, as part of :func:`examine_job`. Collective. Blocks."""
    if not isinstance(strategy, ParallelStrategy) or strategy.world_size == 1:
        compute = measure_compute(cfg, strategy.root_device)
        table = [*version_rows([facts_of()]), *compute_rows(compute)]
        return Findings([], table, "One rank sends nothing: strategy=single would do as well.")
    strategy._timeout = timedelta(seconds=cfg.doctor_timeout_s)  # type: ignore[attr-defined]
    strategy.set_world_ranks()  # type: ignore[attr-defined]
    environment = strategy.cluster_environment
    assert environment is not None
    place, timeout_s = (environment.main_address, environment.main_port), cfg.doctor_timeout_s
    meeting = MeetingPoint(*place, strategy.global_rank, strategy.world_size, timeout_s)
    findings = _examine_all(meeting, strategy, cfg)
    # Ends the threads that listen to the ranks' store, before rank 0 ends and the store with it.
    strategy.teardown()
    # Rank 0, whose process serves the store, waits until all others have left.
    (meeting.leave if meeting.rank else meeting.exchange)("end", None)
    return findings


def _examine_all(meeting: MeetingPoint, strategy: ParallelStrategy, cfg: DictConfig) -> Findings:
    _say(meeting, "connections")
    facts = meeting.exchange("start", facts_of())
    problems = version_problems(facts) + _unreachable(meeting)
    num_failed = sum("->" in problem for problem in problems)
    state = f"{num_failed} connection(s) FAILED" if num_failed else "all ranks reach each other"
    table = [("connections", state), *version_rows(facts)]
    if problems:
        return Findings(problems, table, "")
    # FSDP2's strategy gives its device mesh to the connected module; the real model is built later.
    strategy.connect(LightningModule())
    strategy.setup_environment()
    _say(meeting, "forward and backward")
    # As in training, one process of each host downloads data before the others read them.
    if strategy.local_rank == 0:
        instantiate(cfg.data, _convert_="all").prepare_data()
    meeting.exchange("data", None, COMPUTE_TIMEOUT_S)
    own = measure_compute(cfg, strategy.root_device)
    total_s = own.times.times.forward_s + own.times.times.backward_s
    told = (total_s, own.times.error_s)
    computing = meeting.exchange("forward and backward", told, COMPUTE_TIMEOUT_S)
    _say(meeting, "links")
    hops = cfg.strategy.get("hops") if OmegaConf.is_config(cfg.strategy) else None
    timeout, node = timedelta(seconds=meeting.timeout_s), (strategy.node_rank, strategy.local_rank)
    collectives = new_collectives(strategy.root_device, timeout, hops=hops, node=node)
    cost, own_pairs = measure_links(collectives, strategy.root_device, own.gradient_bytes)
    everyones = meeting.exchange("pairs", own_pairs, max(COMPUTE_TIMEOUT_S, meeting.timeout_s))
    pairs = [Pair(*one) for some in everyones for one in some]
    backend = str(strategy.process_group_backend)  # type: ignore[attr-defined]
    table += [("backend", backend), layout_row(collectives.world, collectives.hops)]
    table += link_rows(cost, pairs, collectives.world.hosts)
    # What exchanges at once cost does not tell how long one of them is on its way.
    far = replace(cost, alpha_s=cost.alpha_s + max(pair.round_trip_s for pair in pairs) / 2)
    case = Case(
        own.tensors,
        own.times.times.scaled(max(computing)[0] / total_s),
        int(cfg.trainer.get("accumulate_grad_batches") or 1),
        cost,
        meeting.world_size,
        measured_devices(strategy.root_device),
        rest_s=0.0,
        is_gloo=collectives.wait_blocks_host,
        running="ddp",
    )
    said = verdict(case, far, own.num_modules)
    if strategy.root_device.type != "cpu":
        rows, both = _host_path(collectives, own, cost, backend)
        table, said = [*table, *rows], f"{said}\n{both}"
    late = late_row(computing)
    return Findings([], [*table, *compute_rows(own), late], said)


def _host_path(
    collectives: Collectives, compute: Compute, cost: LinkCost, backend: str
) -> tuple[Rows, str]:
    """Return a row about the way of messages through the host, and a comparison with NCCL.

    Collective. Blocks.
    """
    nbytes, size = compute.gradient_bytes, collectives.world.size
    path = measure_host_path(on_host(collectives), collectives.streams, max(nbytes, 1 << 20))
    nccl_s = 2 * cost.reduce_scatter_s(nbytes, size) if backend == "nccl" else None
    rates = f"bus_bytes_per_s={1 / path.bus_s:.2e} staged.sum_bytes_per_s={1 / path.sum_s:.2e}"
    row = "through the host, for dear-plan", f"backend=staged staged.{rates}"
    return [row], path.described(nbytes, size, nccl_s)


def _say(meeting: MeetingPoint, what: str) -> None:
    if meeting.rank == 0:
        print(f"doctor: {what} ...", file=sys.stderr, flush=True)


# --- the checks -------------------------------------------------------------------------------


def facts_of() -> dict[str, str]:
    """Return this process's versions, by name."""
    theirs = {name: version(name) for name in ("torch", "lightning")}
    return {"python": platform.python_version(), **theirs, "lightning_dear": _own_version()}


def _own_version() -> str:
    """Return this package's version and a digest of its source.

    Two clones may have the same version but different source.
    """
    digest = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    try:
        number = version("lightning-dear")
    except PackageNotFoundError:
        number = "not installed"
    return f"{number}, source {digest.hexdigest()[:8]}"


def version_problems(facts: Sequence[dict[str, str]]) -> list[str]:
    """Return a sentence for each version that is not the same on all ranks."""
    return [
        f"{name} differs: {_spread(facts, name)}. Install the same version on every host."
        for name in facts[0]
        if len({one[name] for one in facts}) > 1
    ]


def version_rows(facts: Sequence[dict[str, str]]) -> Rows:
    """Return a row for each version."""
    return [(name, _spread(facts, name)) for name in facts[0]]


def _spread(facts: Sequence[dict[str, str]], name: str) -> str:
    """Return a version for people: "2.13.0", or "2.13.0 (ranks 0, 2), 2.6.0 (rank 1)"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        ranks_of.setdefault(one[name], []).append(rank)
    if len(ranks_of) == 1:
        return facts[0][name]
    return ", ".join(f"{value} ({named(ranks).lower()})" for value, ranks in ranks_of.items())


def _unreachable(meeting: MeetingPoint) -> list[str]:
    with open_door(meeting.world_size) as listening:
        own = Door(meeting.rank, socket.gethostname(), *listening.getsockname())
        doors = [Door(*one) for one in meeting.exchange("doors", own)]
        # A rank tries one connection after the other, and each may take its full time.
        patience_s = meeting.timeout_s * meeting.world_size
        failed = meeting.exchange("knocking", knock_from(meeting.rank, doors), patience_s)
    return [sentence for one in failed for sentence in one]


# --- output ------------------------------------------------------------------------------------


def layout_row(world: World, hops: int) -> tuple[str, str]:
    """Return a row that says which ranks share a host and whether `strategy=dear` uses two hops."""
    has_choice = 1 < len(set(world.hosts)) < world.size
    how = f": {'' if hops == 2 else 'no '}two hops" if has_choice else ""
    return "layout", f"{world.description}{how}"


def compute_rows(compute: Compute) -> Rows:
    """Return rows for the gradients and this rank's forward and backward."""
    times = compute.times.times
    return [
        ("gradients", f"{compute.gradient_bytes / 1e6:.2f} MB"),
        ("forward (median)", milli(times.forward_s)),
        ("backward (median)", milli(times.backward_s)),
    ]


def late_row(computing: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Return a row with the rank that computes longest, for which the others would wait.

    It proposes a `split` of samples, and what that gains if time grows with samples as measured
    at one batch size. `split="auto"` measures two sizes.

    Args:
        computing: Seconds of forward and backward of each rank, two ranks or more, and by how much
            these may be wrong.
    """
    # As in training, a rank would wait in the time in which it does not compute.
    longest_s, _ = max(computing)
    rank, late_s = latest_rank([(longest_s - one, error, longest_s) for one, error in computing])
    if rank is None:
        return "late rank", "none"
    shares, needed = quickest([(0.0, one) for one, _ in computing], [_PARTS] * len(computing))
    shares = [share // gcd(*shares) for share in shares]
    gain = _PARTS * longest_s / needed
    said = f"rank {rank}, by {milli(late_s)} a batch; split={shares}: {gain:.1f} times faster"
    return "late rank", said


def verdict(case: Case, far: LinkCost, modules: int) -> str:
    """Return what would help, and whether local steps would.

    Args:
        case: The job under DDP, of which nothing was trained.
        far: Cost of exchanges that are waited for one by one.
        modules: Number of modules that own trainable parameters.
    """
    share = 1 - case.alone_s / case.now_s
    said = case.verdict(share, for_dear_train=True)
    if share < NEGLIGIBLE_SHARE:
        return f"{said} strategy=ddp would do as well."
    local = local_steps_said(case, far, modules)
    return f"Nothing was trained: the step is predicted.\n{said}{local}"


def local_steps_said(case: Case, far: LinkCost, modules: int) -> str:
    """Return lines that propose local steps with int8, and options to paste.

    Empty if steps with int8 do not mostly wait, since local steps cost samples.

    Args:
        case: The job.
        far: Cost of exchanges that are waited for one by one.
        modules: Number of modules that own trainable parameters.
    """
    computed_s = case.num_batches * case.alone_s
    batch_s = case.predicted("dear + int8").step.step_s
    if batch_s <= _MANY_STEPS * case.alone_s:
        return ""
    parts, numel = LocalSteps().schedule(modules).fragments, sum(t.numel for t in case.tensors)
    # int8 sends a byte for each element.
    round_s = 2 * parts * far.reduce_scatter_s(numel / parts, case.world_size)
    waited_s = round_s - case.times.forward_s - case.times.backward_s
    found = hiding([(computed_s + waited_s, waited_s)], modules)
    if found is None:
        return ""
    names = "every", "fragments", "delay"
    arguments = ", ".join(f"{name}={getattr(found, name)}" for name in names)
    local_s = max(computed_s, round_s / found.every)
    return (
        f"\nWith compressor=int8 a batch would still take {milli(batch_s)}, and with local steps"
        f" about {milli(local_s / case.num_batches)}. They cost samples: about 1.5 to 2 times the"
        " steps for a small model; see docs/local_steps.md.\n"
        "strategy=dear compressor=int8 'strategy.local_steps="
        f"{{_target_: lightning_dear.local_steps.LocalSteps, {arguments.replace('=', ': ')}}}'\n"
        f'In a script: DearStrategy(compressor="int8", local_steps=LocalSteps({arguments}))'
    )
