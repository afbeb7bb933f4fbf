"""Makes the collectives of a training: what moves a bucket, asynchronously.

Two process groups of our own, one for reduce-scatters and one for all-gathers, so that the host's
collectives on the default group (Lightning broadcasts a flag before every batch) never queue
behind ours, nor ours behind theirs. NCCL has a third group, gloo's, for objects: ranks must meet in
it whatever NCCL is still waiting for. In two hops it has two more, of the ranks of a host and of
those with one place on their hosts. `gloo.py`, `nccl.py` and `two_hops.py` use them.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dear import private_names
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.streams import CudaStreams, Streams
from lightning_dear.collectives.two_hops import NativeTwoHopCollectives, TwoHopCollectives
from lightning_dear.collectives.work import Collectives, alive, reusable_groups
from lightning_dear.collectives.world import RankPlace, World, hosts_of

_NUM_GROUPS = 3
"""With NCCL, before those that two hops need."""

_Said = tuple[bool, RankPlace, int | None]
"""What a rank says of itself: whether it sends rows, where it is, how many hops it wants."""


def new_collectives(
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    sends_rows: bool = False,
    hops: int | None = None,
    node: tuple[int, int] = (0, 0),
) -> Collectives:
    """Over all ranks, with new process groups or those of the fit before. Collective, blocks.

    Args:
        device: Where parameters live.
        timeout: How long a collective may take before it raises; None keeps torch's default.
        sends_rows: Whether connections from each rank to each other one are opened now, too.
        hops: 1: every shard goes straight to its owner. 2: within a host, then between hosts, where
            several hosts have the same number of ranks, two or more, and a host's ranks follow one
            another; elsewhere people are warned and 1 is used. None: 2 with gloo, where it is
            possible; else 1.
        node: This rank's node rank and local rank, by which hosts are told apart where these are
            unique; see `hosts_of`. People are warned if they contradict what ranks see.

    Returns:
        Collectives of one rank if torch.distributed is not initialised.

    Raises:
        ValueError: If parameters on an accelerator are to travel through gloo, or the default
            process group has no backend for them; or if ranks have other `hops`.
    """
    streams = CudaStreams(device) if device.type == "cuda" else Streams()
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return PairwiseCollectives(None, None, None, streams=streams)
    backend = _backend_of(device)
    if backend == "gloo" and device.type != "cpu":
        raise ValueError(
            f"strategy='dear' cannot send parameters on {device} through gloo;"
            " use process_group_backend='nccl'."
        )
    groups, everyones = _process_groups(timeout, backend, (sends_rows, (_host(), node), hops))
    world = _agreed_world([place for _, place, _ in everyones])
    has_two_hops = _agreed_hops([one[2] for one in everyones], backend, world) == 2
    has_subgroups = has_two_hops and backend != "gloo"
    subgroups = _groups_of_two_hops(timeout, backend, world) if has_subgroups else ()
    kind = _KINDS[backend == "gloo", has_two_hops]
    # With gloo objects travel among the all-gathers, since all else there is matched by tags.
    reduce_group, gather_group, object_group = (*groups, groups[1])[:3]
    ours = reduce_group, gather_group, object_group, world
    collectives: Collectives = kind(*subgroups, *ours, streams=streams)
    _connect(collectives, device, sends_rows=any(sends for sends, *_ in everyones))
    return collectives


_KINDS: dict[tuple[bool, bool], Any] = {
    (True, False): PairwiseCollectives,
    (True, True): TwoHopCollectives,
    (False, False): NativeCollectives,
    (False, True): NativeTwoHopCollectives,
}
"""(whether the backend is gloo, whether shards travel in two hops) -> class."""


def _agreed_hops(wanted: Sequence[int | None], backend: str, world: World) -> int:
    """Returns in how many hops shards travel. Warns if that is not what was asked for."""
    if len(set(wanted)) > 1:
        raise ValueError(f"hops must be the same on all ranks, got {list(wanted)}.")
    has_two = world.ranks_a_host > 1
    if wanted[0] == 2 and not has_two and world.rank == 0:
        warnings.warn(
            "hops=2 has no effect here. It needs several hosts, the same number of ranks on each,"
            " at least two, and a host's ranks numbered one after the other. The first rank on each"
            f" rank's host is {', '.join(map(str, world.hosts))}. Leave it out.",
            stacklevel=3,
        )
    return 2 if has_two and (wanted[0] or (2 if backend == "gloo" else 1)) == 2 else 1


def _agreed_world(places: Sequence[RankPlace]) -> World:
    """Returns the ranks of the default group, on their hosts. Warns if node ranks do not count."""
    hosts, wrong = hosts_of(places)
    world = World(dist.get_rank(), dist.get_world_size(), hosts)
    if wrong and world.rank == 0:
        nodes = sorted({node for _, (node, _) in places})
        warnings.warn(
            f"Node ranks {nodes[:9]} are not used: {wrong}. Give each host one of its own. Now"
            " machine and network tell hosts apart.",
            stacklevel=3,
        )
    return world


def _backend_of(device: torch.device) -> str:
    """Name of what serves `device`: the default group may have a backend for each kind of them."""
    world: Any = dist.group.WORLD
    try:
        name: str = private_names.GET_BACKEND.of(world)(torch.device(device.type)).name()
    except RuntimeError as error:
        raise ValueError(
            f"The default process group ('{dist.get_backend_config()}') has no backend for"
            f" parameters on {device}: use process_group_backend='nccl' for CUDA devices, 'gloo'"
            " for CPUs, or name a backend for both in torch.distributed.init_process_group."
        ) from error
    return name


def _host() -> tuple[str, str]:
    """Names this machine, and on Linux the network that this process sees: the same for all there.

    All containers of a machine name it alike.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return booted, os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""


def _process_groups(
    timeout: timedelta | None, backend: str, own: _Said
) -> tuple[list[Any], list[_Said]]:
    """The groups, and what every rank says of itself."""
    default_group, groups = reusable_groups.get(timeout, (None, []))
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (default_group is dist.group.WORLD, own))
    # All or none: making a group is collective, and who reused its own would not come.
    if not all(can_reuse for can_reuse, _ in said):
        groups = [_new_group(timeout, backend) for _ in range(2)]
        if backend != "gloo":
            groups.append(dist.new_group(timeout=timeout, backend="gloo"))
        reusable_groups.clear()
        reusable_groups[timeout] = dist.group.WORLD, groups
    return groups, [one for _, one in said]


def _groups_of_two_hops(timeout: timedelta | None, backend: str, world: World) -> Sequence[Any]:
    """The group of this host's ranks, and that of the ranks with this one's place on their hosts.

    New ones, or those of the fit before, by the same rule as the others. Collective.
    """
    _, groups = reusable_groups[timeout]
    ranks, size = range(world.size), world.ranks_a_host
    layouts = (
        [list(ranks[first : first + size]) for first in ranks[::size]],
        [list(world.with_place(place)) for place in ranks[:size]],
    )
    new_subgroups: Any = dist.new_subgroups_by_enumeration
    made: list[Any] = []
    for layout in layouts if len(groups) == _NUM_GROUPS else ():
        how = {"timeout": timeout, "pg_options": _options_of(timeout, backend)}
        made.append(new_subgroups(layout, **how)[0])
    # Both or none: the next fit takes what is here.
    groups += made
    return groups[_NUM_GROUPS:]


def _new_group(timeout: timedelta | None, backend: str) -> Any:
    return dist.new_group(timeout=timeout, pg_options=_options_of(timeout, backend))


def _options_of(timeout: timedelta | None, backend: str) -> Any:
    """Those of a group in which NCCL's kernels go before those that a device computes with."""
    options: Any = None
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            # Else torch warns that it takes its own.
            setattr(options, private_names.NCCL_TIMEOUT.name, timeout)
    return options


def forget_process_groups() -> None:
    """Drops every reference to our groups, so that torch can end their threads.

    For the end of a job, so that no group outlives `destroy_process_group` until the interpreter
    is taken down. Afterwards nothing can be sent through collectives made before.
    """
    reusable_groups.clear()
    for one in alive:
        one.forget_groups()


def leave_process_groups() -> None:
    """Ends our groups and the default one, so that the next job begins without. May block on NCCL.

    For a process that goes on, in good order, or after its peers have ended.
    """
    forget_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process_groups() -> None:
    """Ends gloo's threads with the training they served, before the interpreter is taken down.

    One that still holds a tensor of Python's then aborts the process (signal 6, "terminate called
    without an active exception"), and Lightning ends NCCL's groups alone. Not after an exception:
    others may never come, and this would wait for them.
    """
    have_sent = bool(alive or reusable_groups)
    forget_process_groups()
    # What Python sets before it prints an exception that nobody caught.
    is_failing = getattr(sys, "last_value", None) is not None
    if have_sent and not is_failing and dist.is_initialized() and _has_only_gloo():
        dist.destroy_process_group()


atexit.register(end_process_groups)


def _has_only_gloo() -> bool:
    kinds = dist.get_backend_config().split(",")
    return all(one.rpartition(":")[2] == "gloo" for one in kinds)


def _connect(collectives: Collectives, device: torch.device, *, sends_rows: bool) -> None:
    """Opens every connection now, in one order, instead of in the midst of the first backward.

    Blocks until they are open. NCCL connects every pair of ranks only if rows are to travel, since
    that takes memory on the device.
    """
    if sends_rows:
        rows = torch.zeros((2, collectives.world.size, 1), dtype=torch.uint8, device=device)
        collectives.launch_all_to_all(rows[0], rows[1], 0).wait()
    collectives.launch_max(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    collectives.launch_all_gather(torch.zeros(collectives.world.size, device=device), 0).wait()
    if collectives.hops == 2:
        # Else the all-gather has used another group.
        collectives.launch_broadcast(torch.zeros(1, device=device), 0).wait()
    collectives.streams.synchronize()
    collectives.ledger.clear()
