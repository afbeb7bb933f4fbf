"""A backend that nobody has: its waits block the host, and it matches what is sent by its order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.world import World
from tests.distributed.strict import Strict

Launch = tuple[str, str, int | None, str]
"""(function, group, elements that each rank gives, their type)."""


class OrderedCollectives(NativeCollectives):
    """As NCCL's, but a wait blocks the host until the data is here, as gloo's do. No streams.

    Over new groups of gloo's. Making one is collective.
    """

    wait_blocks_host = True

    def __init__(self) -> None:
        groups = [dist.new_group() for _ in range(3)]
        self.noted = OrderedCalls(dict(zip(groups, ("reduce", "gather", "objects"), strict=True)))
        world = World(dist.get_rank(), dist.get_world_size())
        super().__init__(*groups, world, Strict(self.noted))

    def check_order(self) -> None:
        """Fails unless all ranks have launched the same so far. Collective."""
        everyones: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyones, self.noted.launched)
        for number, launches in enumerate(zip_longest(*everyones)):
            assert len(set(launches)) == 1, f"launch {number} is, by rank: {launches}"


class OrderedCalls:
    """torch.distributed over gloo, but for messages with tags; notes what is launched.

    Args:
        groups: What each of them is called.

    Attributes:
        launched: By this rank, over all groups.
    """

    def __init__(self, groups: dict[Any, str]) -> None:
        self._groups = groups
        self.launched: list[Launch] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("isend", "irecv", "send", "recv", "batch_isend_irecv"):
            raise AssertionError(f"{name}: there are no messages with tags")
        return partial(self._launch, name, getattr(dist, name))

    def _launch(self, name: str, call: Callable[..., Any], *, group: Any, **given: Any) -> Any:
        # Of rows with sizes, and of objects, ranks may have other numbers.
        is_sized = given.get("input_split_sizes") is not None
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        numel = sum(one.numel() for one in tensors) if tensors and not is_sized else None
        dtypes = {str(one.dtype) for one in tensors}
        self.launched.append((name, self._groups[group], numel, "".join(dtypes)))
        return call(group=group, **given)


def new_ordered(*_: Any, **__: Any) -> OrderedCollectives:
    """To be patched in for `new_collectives`."""
    return OrderedCollectives()
