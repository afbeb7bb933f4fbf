"""How ranks meet outside the engine's groups: the key-value store, and the default group."""

import os
import time
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import torch.distributed as dist

from lightning_dear import private_names
from lightning_dear.collectives.work import T


def default_store() -> Any | None:
    """Returns the key-value store of the default process group, without the group's key prefixes.

    None means that there is no default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    c10d: Any = dist.distributed_c10d
    store = private_names.DEFAULT_STORE.of(c10d)()
    # The clients that `new_store_client` makes have no prefix, and all clients must find the same
    # keys.
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def new_store_client(timeout_s: float = 10.0) -> Any | None:
    """Opens a new connection to the store of the default group, for use by another thread.

    Args:
        timeout_s: Seconds that connecting, and later each blocking call of the client, may take.

    Returns:
        The client. None means that there is no default group, or that its store is no TCP store.

    Raises:
        RuntimeError: If connecting takes longer.
    """
    store, distributed = default_store(), cast(Any, dist)
    if not isinstance(store, distributed.TCPStore):
        return None
    timeout = timedelta(seconds=timeout_s)
    return distributed.TCPStore(store.host, store.port, is_master=False, timeout=timeout)


_ATTEMPT = "lightning_dear/attempt"


def attempt_store(timeout: timedelta) -> Any | None:
    """Returns torchrun's store, with a key prefix that no earlier attempt has used.

    Collective, blocks, unless None is returned. An attempt is one start of all ranks by torchrun.

    torchrun keeps one store for all its restarts, in which a rank would find the addresses of ranks
    that are dead. The count of restarts cannot name an attempt, since it may differ from host to
    host. So rank 0 draws a random name and publishes it. Another rank accepts a name once rank 0
    has answered it under that name, since the published name may at first be that of an earlier
    attempt.

    Args:
        timeout: How long ranks wait for each other.

    Returns:
        The store. None means that torchrun has no such store, or that the default process group
        exists already.

    Raises:
        RuntimeError: If another rank does not answer within `timeout`.
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
            # Blocks until rank `other` has written under the new name, which no rank of an earlier
            # attempt can have read.
            store.set(f"{own}/answer/{other}", store.get(f"{own}/{other}"))
    while not answered:
        if time.monotonic() > end:
            raise RuntimeError(f"Rank 0 did not answer rank {rank} in time. Read rank 0's output.")
        time.sleep(0.05)
        # At first this may be the name of an earlier attempt, whose rank 0 does not answer.
        name = store.get(_ATTEMPT).decode()
        store.set(f"{name}/{rank}", own)
        answer = f"{name}/answer/{rank}"
        answered = store.check([answer]) and store.get(answer).decode() == own
    return distributed.PrefixStore(name, store)


def from_all_ranks(value: T) -> list[T]:
    """Returns every rank's picklable `value`, in rank order. Collective, blocks.

    Uses the default process group. Without one, or with one rank, returns [value] at once.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
