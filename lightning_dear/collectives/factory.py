"""Makes the process groups of a training, and the `Collectives` object that launches on them.

If there are several ranks, two groups are made beside the default group, one for reduce-scatters
and one for all-gathers. So Lightning's collectives on the default group (it broadcasts a flag
before every batch) never queue behind those of the engine, nor the other way round. With NCCL there
is a third group, on gloo, for Python objects: ranks must be able to send these whatever NCCL is
waiting for. Two hops on NCCL need four more groups: for each half the ranks of one host, and the
ranks with one place on their hosts. `gloo.py`, `nccl.py` and `two_hops.py` use the groups.
"""

import atexit
import os
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dear import private_names
from lightning_dear.collectives import gloo, nccl, staged, two_hops
from lightning_dear.collectives.streams import CudaStreams, Streams
from lightning_dear.collectives.work import Collectives, alive, reusable_groups, under_way
from lightning_dear.collectives.world import RankPlace, World, hosts_of

_NUM_GROUPS = 3
"""Number of groups made with NCCL, without those for two hops."""

_RankInfo = tuple[bool, RankPlace, int | None]
"""What a rank tells all others before groups are made: `sends_rows`, where the rank runs, and
`hops`, the arguments of `new_collectives`."""


def new_collectives(
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    sends_rows: bool = False,
    hops: int | None = None,
    node: tuple[int, int] = (0, 0),
) -> Collectives:
    """Makes the collectives over all ranks. Collective, blocks.

    Makes new process groups and opens their connections. A later fit with the same `timeout` uses
    the same groups again, if the default process group is still the same on all ranks.

    Args:
        device: Device of the parameters.
        timeout: How long a collective may take before it raises. None means torch's default.
        sends_rows: Whether to open the connections for all-to-alls now, too, which lead from each
            rank to each other rank. One rank that asks for them is enough. If no rank asks, the
            first all-to-all opens them.
        hops: 1 means that every shard goes straight to its owner. 2 means that shards go within a
            host first, then between hosts. 2 needs several hosts with the same number of ranks, two
            or more, and consecutive rank numbers on each host; otherwise rank 0 warns, and 1 is
            used. None means 2 with gloo where that is possible, else 1, without a warning.
        node: Node rank and local rank of this rank. They tell hosts apart if no two ranks have both
            alike, see `hosts_of`. Rank 0 warns if they contradict what the ranks see.

    Returns:
        The collectives. If torch.distributed is not initialised, or has one rank, they have this
        rank alone and no process groups.

    Raises:
        ValueError: If parameters on a device other than CUDA would travel through gloo, if the
            default process group has no backend for `device`, if ranks ask for different `hops`, or
            if `TORCH_NCCL_BLOCKING_WAIT` is set with NCCL.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return gloo.PairwiseCollectives(None, None, None, streams=_streams_of(device))
    backend = _backend_of(device)
    _check_backend(backend, device)
    streams = _streams_of(device)
    groups, infos = _process_groups(timeout, backend, (sends_rows, (_host(), node), hops))
    world = _agreed_world([place for _, place, _ in infos])
    has_two_hops = _agreed_hops([wanted for *_, wanted in infos], backend, world) == 2
    has_subgroups = has_two_hops and backend != "gloo"
    subgroups = _groups_of_two_hops(timeout, backend, world) if has_subgroups else ()
    kind = _KINDS[backend == "gloo", has_two_hops]
    # For reduce-scatters, all-gathers and objects. With gloo, objects travel in the all-gather
    # group, where all other messages are matched by tag.
    three = (*groups, groups[1])[:3]
    is_staged = _is_staged(backend, device)
    of_backend: Any = kind(*subgroups, *three, world, streams=Streams() if is_staged else streams)
    collectives: Collectives
    collectives = staged.StagedCollectives(of_backend, streams) if is_staged else of_backend
    # Registered anew, to run before Lightning's own function, which destroys NCCL's groups.
    atexit.unregister(abort_after_failure)
    atexit.register(abort_after_failure)
    _connect(collectives, device, sends_rows=any(sends for sends, *_ in infos))
    return collectives


@contextmanager
def temporary_collectives(
    device: torch.device, timeout: timedelta, *, node: tuple[int, int]
) -> Iterator[Collectives]:
    """Makes collectives on process groups that no fit uses, and destroys the groups at the end.

    Collective. Blocks. The arguments are those of `new_collectives`.
    """
    kept = dict(reusable_groups)
    reusable_groups.clear()
    try:
        yield new_collectives(device, timeout, node=node)
    finally:
        made = [one for _, groups in reusable_groups.values() for one in groups]
        reusable_groups.clear()
        reusable_groups.update(kept)
        for group in made:
            dist.destroy_process_group(group)


def _streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()


def alone(others: Collectives) -> Collectives:
    """Makes collectives of this rank alone, on the device of `others`. Local."""
    return gloo.PairwiseCollectives(None, None, None, streams=others.streams)


def on_host(others: Collectives) -> Collectives:
    """Makes collectives over gloo among the same ranks, for tensors of the host. Local."""
    if others.streams.device.type == "cpu" or isinstance(others, staged.StagedCollectives):
        return others
    groups = [others.object_group] * 3
    made: Collectives = _KINDS[True, others.world.ranks_a_host > 1](*groups, others.world)
    return made


_TRUE = ("1", "y", "yes", "t", "true")
"""What torch takes as true in the environment."""

_KINDS: dict[tuple[bool, bool], Any] = {
    (True, False): gloo.PairwiseCollectives,
    (True, True): two_hops.TwoHopCollectives,
    (False, False): nccl.NativeCollectives,
    (False, True): two_hops.NativeTwoHopCollectives,
}
"""(whether the backend is gloo, whether there are two hops) -> class of the collectives."""


def _check_backend(backend: str, device: torch.device) -> None:
    if backend != "gloo" and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in _TRUE:
        raise ValueError(
            "TORCH_NCCL_BLOCKING_WAIT is set. Remove it from the environment: with it every wait"
            " for a message would block the host, in backward too, so that nothing would overlap."
            " Errors are reported without it."
        )
    if backend == "gloo" and device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"strategy='dear' cannot send parameters on {device} through gloo. Train on CUDA or"
            " ROCm devices, or on CPUs: copies between host and device need streams of the device."
        )


def _is_staged(backend: str, device: torch.device) -> bool:
    """Whether messages travel through host memory, and parameters lie on a device."""
    return backend == "gloo" and device.type != "cpu"


def _agreed_hops(wanted: Sequence[int | None], backend: str, world: World) -> int:
    """Returns the number of hops. Rank 0 warns if 2 were asked for and are not possible.

    Raises:
        ValueError: If ranks ask for different numbers.
    """
    if len(set(wanted)) > 1:
        raise ValueError(f"hops must be the same on all ranks, got {list(wanted)}. Set one value.")
    has_two = world.ranks_a_host > 1
    if wanted[0] == 2 and not has_two and world.rank == 0:
        warnings.warn(
            "hops=2 has no effect here. Leave it out. It needs several hosts, the same number of"
            " ranks on each, at least two, and consecutive rank numbers on each host. The first"
            f" rank on each rank's host is {', '.join(map(str, world.hosts))}.",
            stacklevel=3,
        )
    return 2 if has_two and (wanted[0] or (2 if backend == "gloo" else 1)) == 2 else 1


def _agreed_world(places: Sequence[RankPlace]) -> World:
    """Returns all ranks and their hosts, see `hosts_of`.

    Rank 0 warns if the node ranks contradict what ranks see, so that they are not used.
    """
    hosts, wrong = hosts_of(places)
    world = World(dist.get_rank(), dist.get_world_size(), hosts)
    if wrong and world.rank == 0:
        nodes = sorted({node for _, (node, _) in places})
        warnings.warn(
            f"Node ranks {nodes[:9]} are not used: {wrong}. Give each host a node rank (NODE_RANK)"
            " of its own. Now the names of machines and networks tell hosts apart.",
            stacklevel=3,
        )
    return world


def _backend_of(device: torch.device) -> str:
    """Returns the name of the backend that the default group uses for devices like `device`.

    The default group may have one backend for each type of device.

    Raises:
        ValueError: If it has none for this type.
    """
    world: Any = dist.group.WORLD
    try:
        name: str = private_names.GET_BACKEND.of(world)(torch.device(device.type)).name()
    except RuntimeError as error:
        raise ValueError(
            f"The default process group ('{dist.get_backend_config()}') has no backend for"
            f" parameters on {device}. Set process_group_backend='nccl' for CUDA devices, 'gloo'"
            " for CPUs, or name a backend for each in torch.distributed.init_process_group."
        ) from error
    return name


def _host() -> tuple[str, str]:
    """Returns names for this machine and, on Linux, for the network that this process sees.

    All containers of a machine get the same machine name.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return booted, os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""


def _process_groups(
    timeout: timedelta | None, backend: str, info: _RankInfo
) -> tuple[list[Any], list[_RankInfo]]:
    """Returns the process groups, and the infos of all ranks. Collective, blocks.

    The groups are for reduce-scatters, for all-gathers and, with NCCL, for objects. If they were
    kept from the fit before, those for two hops on NCCL may follow. They are kept in
    `reusable_groups`.
    """
    default_group, groups = reusable_groups.get(timeout, (lambda: None, []))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (default_group() is dist.group.WORLD, info))
    # Either all ranks make new groups or none does: making one is collective, and a rank that
    # reused its old group would not take part.
    if not all(can_reuse for can_reuse, _ in told):
        groups = [dist.new_group(**_arguments_of(timeout, backend)) for _ in range(2)]
        if backend != "gloo":
            groups.append(dist.new_group(timeout=timeout, backend="gloo"))
        reusable_groups.clear()
        # Once the user has destroyed the default group, nothing must keep its store: the next group
        # would find the addresses of this one's ranks there.
        weakref.finalize(dist.group.WORLD, forget_process_groups).atexit = False
        reusable_groups[timeout] = weakref.ref(dist.group.WORLD), groups
    return groups, [info for _, info in told]


def _groups_of_two_hops(timeout: timedelta | None, backend: str, world: World) -> Sequence[Any]:
    """Returns the groups of this host's ranks and of the ranks with this rank's place, twice.

    Collective. Makes them, unless `_process_groups` has returned groups that were used in two hops
    before.
    """
    _, groups = reusable_groups[timeout]
    ranks, size = range(world.size), world.ranks_a_host
    layouts = (
        [list(ranks[first : first + size]) for first in ranks[::size]],
        [list(world.with_place(place)) for place in ranks[:size]],
    )
    new_subgroups: Any = dist.new_subgroups_by_enumeration
    made: list[Any] = []
    for layout in layouts * 2 if len(groups) == _NUM_GROUPS else ():
        made.append(new_subgroups(layout, **_arguments_of(timeout, backend))[0])
    # All at once: if making one fails, the next fit must not find some of them.
    groups += made
    return groups[_NUM_GROUPS:]


def _arguments_of(timeout: timedelta | None, backend: str) -> dict[str, Any]:
    """Returns arguments for a new group, whose NCCL kernels run before compute kernels."""
    options: Any = None
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            # Otherwise torch warns that the options have another timeout than the group.
            setattr(options, private_names.NCCL_TIMEOUT.name, timeout)
    return {"timeout": timeout, "pg_options": options}


def forget_process_groups() -> None:
    """Drops all references to the groups made here, so that torch can end their threads. Local.

    For the end of a job: a group with references would outlive `destroy_process_group`. Afterwards
    collectives made before can send nothing, and the next fit makes new groups.
    """
    reusable_groups.clear()
    under_way.clear()
    for collectives in alive:
        collectives.forget_groups()


_leaving = threading.Lock()
"""Held while groups are destroyed: `hang_up` does so in another thread than the end of a job."""


def leave_process_groups() -> None:
    """Destroys all process groups, the default one included, so that the next job begins with none.

    For a process that goes on after a job. The job must have ended without an error on this rank,
    or all other ranks must have ended: on NCCL destroying may wait for them.
    """
    with _leaving:
        forget_process_groups()
        if dist.is_initialized():
            dist.destroy_process_group()


def hang_up(when: threading.Event) -> None:
    """After a failure: closes this rank's connections, so that ranks that wait for it raise.

    Only on gloo, whose waits nothing else interrupts. To be called in a thread of its own: it
    waits for `when` first, and then blocks as long as an all-reduce is under way.
    """
    when.wait()
    if dist.is_initialized() and _has_only_gloo():
        leave_process_groups()


def end_process_groups() -> None:
    """At exit: destroys all process groups if all are gloo's, so that their threads end in time.

    A gloo thread that still holds a Python tensor when the interpreter shuts down aborts the
    process (signal 6, "terminate called without an active exception"). Lightning destroys only
    NCCL's groups. Destroys nothing if no collectives were made here, and after an uncaught
    exception: other ranks might never come, and destroying would wait for them.
    """
    have_sent = bool(alive or reusable_groups)
    forget_process_groups()
    if have_sent and not _is_failing() and dist.is_initialized() and _has_only_gloo():
        dist.destroy_process_group()


atexit.register(end_process_groups)


def abort_after_failure() -> None:
    """At exit after a failure: aborts NCCL's communicators, if the device still waits in them.

    Otherwise destroying them would wait for kernels that wait for other ranks in vain.
    """
    for collectives in alive:
        if collectives.was_discarded or _is_failing():
            collectives.abort_if_stuck()


def _is_failing() -> bool:
    """Returns whether an uncaught exception ends this process."""
    # Python sets this before it prints the exception.
    return getattr(sys, "last_value", None) is not None


def _has_only_gloo() -> bool:
    """Returns whether gloo is the default group's backend for all types of devices."""
    names = dist.get_backend_config().split(",")
    return all(name.rpartition(":")[2] == "gloo" for name in names)


def _connect(collectives: Collectives, device: torch.device, *, sends_rows: bool) -> None:
    """Opens connections now, by messages in the same order on all ranks. Collective, blocks.

    Otherwise the first backward would open them. Those between each pair of ranks on NCCL are
    opened only if `sends_rows` is True, since they take memory on the device. Empties the ledger.
    """
    if sends_rows:
        rows = torch.zeros((2, collectives.world.size, 1), dtype=torch.uint8, device=device)
        collectives.launch_all_to_all(rows[0], rows[1], 0).wait()
    collectives.launch_max(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    collectives.launch_all_gather(torch.zeros(collectives.world.size, device=device), 0).wait()
    if collectives.hops == 2:
        # In two hops on NCCL that all-gather has used other groups, and the all-gather group has no
        # connections yet.
        collectives.launch_broadcast(torch.zeros(1, device=device), 0).wait()
        size = collectives.world.size
        buffer = torch.zeros(2 * size, device=device)
        received = buffer.new_zeros(collectives.scratch_numel(2 * size))
        collectives.launch_reduce_scatter(buffer, received, buffer.new_zeros(2), 0).wait()
    collectives.streams.synchronize()
    collectives.ledger.clear()
