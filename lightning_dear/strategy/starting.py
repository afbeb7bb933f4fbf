"""Checks of how ranks were started, and a word to the user while ranks of other nodes do not come.

`check_start` runs when a Trainer or Fabric is made, before any process is started. Without it,
mistakes in a job's size end in a wait or in an error about something else.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import lightning, torchelastic
from lightning.fabric.utilities import rank_zero_warn
from torch import device

log = logging.getLogger(__name__)

NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "MASTER_PORT")
"""Variables that a user or a launcher sets on each node. Without all of them other nodes cannot
find this one: Lightning then draws its port."""

LATE_S = 20.0
"""A node that has waited so many seconds for other nodes says so."""

MANY_RANKS = 8
"""Ranks on each core of a CPU above which rank 0 warns."""

_NUM_NAMED = 4


def check_start(environment: ClusterEnvironment, devices: Sequence[device], num_nodes: int) -> None:
    """Refuses a job whose ranks cannot meet, and warns of far too many processes. Local.

    Args:
        environment: Knows which ranks a launcher has started, if one has.
        devices: Devices of this node, one for each rank.
        num_nodes: Number of nodes.

    Raises:
        ValueError: If a launcher has started another number of ranks, or if nothing says which of
            several nodes this is.
    """
    if environment.creates_processes_externally:
        _check_counts(environment, len(devices), num_nodes)
        return
    is_found = not set(NODE_VARIABLES).isdisjoint(os.environ)
    if num_nodes > 1 and type(environment) is lightning.LightningEnvironment and not is_found:
        raise ValueError(
            f"The job has {num_nodes} nodes, but nothing says that this is one of them. Start it"
            " with torchrun or srun (docs/clusters.md). Or set NODE_RANK (0, 1, ...), MASTER_ADDR"
            " (address of node 0) and MASTER_PORT (a free port there) on each node, and start the"
            " same command there. To use this machine alone, set num_nodes=1 (in dear-train"
            " cluster=local). dear-plan predicts larger clusters."
        )
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if devices[0].type == "cpu" and len(devices) > MANY_RANKS * num_cores:
        rank_zero_warn(
            f"devices={len(devices)} starts {len(devices)} processes on {num_cores} CPU core(s)."
            " They take turns, and each needs hundreds of MB. Press Ctrl-C and set devices to at"
            f" most {num_cores}. dear-plan predicts larger clusters without starting processes."
        )


def max_restarts() -> int:
    """Returns how often torchrun starts its ranks again (`--max-restarts`). 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def check_elastic(environment: ClusterEnvironment) -> None:
    """Refuses `elastic=True` if nothing would start ranks again. Local.

    Raises:
        ValueError: If torchrun has not started this rank, or makes no restarts.
    """
    if not isinstance(environment, torchelastic.TorchElasticEnvironment) or max_restarts() == 0:
        raise ValueError(
            "elastic=True needs a launcher that starts ranks again. Use torchrun with"
            " --max-restarts=3 and a range of nodes, such as --nnodes=1:4, or leave elastic out."
        )


def warn_of_restarts_from_step_0(trainer: Any) -> None:
    """Warns if torchrun may start the job again and `Trainer.fit` got no `ckpt_path`. Local."""
    frame = sys._getframe() if max_restarts() else None
    # Lightning keeps the argument nowhere else.
    while frame is not None and frame.f_locals.get("self") is not trainer:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("ckpt_path", "") is None:
        rank_zero_warn(
            "torchrun starts this job again after a failure (--max-restarts), but fit has no"
            " ckpt_path, so that it would begin anew. Pass trainer.fit(..., ckpt_path='last'),"
            " unless the script finds the checkpoint itself."
        )


def _check_counts(environment: ClusterEnvironment, num_local: int, num_nodes: int) -> None:
    """Raises if a launcher has started other ranks than `num_local` on each of the nodes."""
    expected, here, world = num_local * num_nodes, environment.local_rank() + 1, None
    what = f"{type(environment).__name__} says that this is rank {here - 1} of its node"
    if isinstance(environment, torchelastic.TorchElasticEnvironment):
        here, world = int(os.environ.get("LOCAL_WORLD_SIZE", here)), environment.world_size()
        what = f"torchrun has started {world} rank(s), {here} of them on this node"
    if here <= num_local and world in (None, expected):
        return
    raise ValueError(
        f"{what}, but devices={num_local} and num_nodes={num_nodes} are for {expected} rank(s)."
        " Set devices to the number of ranks on a node (torchrun's --nproc-per-node) and num_nodes"
        " to the number of nodes (--nnodes)."
    )


@contextmanager
def late_nodes_named(
    environment: ClusterEnvironment, num_local: int, num_nodes: int
) -> Iterator[None]:
    """Warns if the block, in which all ranks meet, takes more than `LATE_S`. Local.

    Says which nodes may be missing and how to start them. Does nothing with one node. Otherwise
    local rank 0 of each node warns, from a thread.

    Args:
        environment: Knows this rank, and where ranks meet.
        num_local: Number of ranks on each node.
        num_nodes: Number of nodes.
    """
    if num_nodes == 1 or environment.local_rank() != 0:
        yield
        return
    timer = Timer(LATE_S, lambda: log.warning(_who_is_late(environment, num_local, num_nodes)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _who_is_late(environment: ClusterEnvironment, num_local: int, num_nodes: int) -> str:
    own, address, port = environment.node_rank(), environment.main_address, environment.main_port
    others = [node for node in range(num_nodes) if node != own]
    first = ", ".join(f"node {node} (rank {node * num_local})" for node in others[:_NUM_NAMED])
    told = "ADDRESS_OF_NODE_0" if address.startswith(("127.", "localhost")) else address
    return (
        f"Node {own} (rank {own * num_local}) has waited {LATE_S:g} s at {address}:{port} for"
        f" {first}{', ...' if len(others) > _NUM_NAMED else ''}. Start the same command there, with"
        f" NODE_RANK={others[0]} MASTER_ADDR={told} MASTER_PORT={port} before it, or start all"
        " nodes with torchrun or srun (docs/clusters.md). If it runs there already, check that it"
        " has the same address and port, and that no firewall closes that port of node 0."
    )
