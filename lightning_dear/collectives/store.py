"""Where ranks meet outside the engine's groups: the key-value store, and the default group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from lightning_dear.collectives.work import T


def default_store() -> Any | None:
    """The key-value store under the default process group; None if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    # A client of its own, made below, has no prefixes, and both must find the same keys.
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def new_store_client() -> Any | None:
    """A connection of its own to that store, for another thread; None if it is not a TCP store."""
    store, distributed = default_store(), cast(Any, dist)
    if not isinstance(store, distributed.TCPStore):
        return None
    timeout = timedelta(seconds=10)
    return distributed.TCPStore(store.host, store.port, is_master=False, timeout=timeout)


def from_all_ranks(value: T) -> list[T]:
    """Every rank's picklable `value`, in rank order, over the default group. Collective, blocks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
