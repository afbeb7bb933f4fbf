"""Where ranks meet outside the engine's groups: the key-value store, and the default group."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import torch.distributed as dist

from lightning_dear import private_names
from lightning_dear.collectives.work import T


def default_store() -> Any | None:
    """The key-value store under the default process group; None if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    c10d: Any = dist.distributed_c10d
    store = private_names.DEFAULT_STORE.of(c10d)()
    # A client of its own, made below, has no prefixes, and both must find the same keys.
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def new_store_client(timeout_s: float = 10.0) -> Any | None:
    """A connection of its own to that store, for another thread; None if it is not a TCP store.

    Raises:
        RuntimeError: If it cannot be made within `timeout_s` seconds.
    """
    store, distributed = default_store(), cast(Any, dist)
    if not isinstance(store, distributed.TCPStore):
        return None
    timeout = timedelta(seconds=timeout_s)
    return distributed.TCPStore(store.host, store.port, is_master=False, timeout=timeout)


_ATTEMPT = "lightning_dear/attempt"


def attempt_store(timeout: timedelta) -> Any | None:
    """The store of torchrun, under keys that no attempt before this one has used.

    It keeps one store for all its restarts, in which a rank would find the addresses of ranks that
    are dead. Its number of the restart is no name for an attempt, since it may differ from host to
    host. So rank 0 chooses a name, and another rank takes it once it was answered. All ranks call;
    blocks.

    Args:
        timeout: How long ranks wait for each other.

    Returns:
        None where there is no such store, or where the default process group exists already.

    Raises:
        RuntimeError: If not all ranks come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) or dist.is_initialized():
        return None
    distributed = cast(Any, dist)
    store, rank, world_size = next(distributed.rendezvous("env://", timeout=timeout))
    own, end = uuid4().hex, time.monotonic() + timeout.total_seconds()
    name, answered = own, rank == 0
    if rank == 0:
        store.set(_ATTEMPT, own)
        for other in range(1, world_size):
            # Whoever has written this has read the new name, so that it is no rank of the past.
            store.set(f"{own}/answer/{other}", store.get(f"{own}/{other}"))
    while not answered:
        if time.monotonic() > end:
            raise RuntimeError(f"Rank 0 did not answer rank {rank} in time: see what it printed.")
        time.sleep(0.05)
        # At first perhaps that of an attempt that is over: nobody answers there.
        name = store.get(_ATTEMPT).decode()
        store.set(f"{name}/{rank}", own)
        answer = f"{name}/answer/{rank}"
        answered = store.check([answer]) and store.get(answer).decode() == own
    return distributed.PrefixStore(name, store)


def from_all_ranks(value: T) -> list[T]:
    """Every rank's picklable `value`, in rank order, over the default group. Collective, blocks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
