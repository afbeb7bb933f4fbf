"""An optimizer's state dict whose tensors stay where they are: each rank holds its own pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from lightning_dear.checkpoint.whole_state import PerElement, Scalar, describe, pack
from lightning_dear.collectives.work import Collectives
from lightning_dear.optimizers.sharded import OptimizerShards


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of a tensor, in storage order.

    Attributes:
        start: Number of the first one.
        values: The elements; of any shape, without gaps.
    """

    start: int
    values: Tensor


class ShardedState(dict[str, Any]):
    """`optimizer.state_dict()` in which tensors on the meta device stand for sharded ones.

    It can be looked at like the ordinary one, but only `folder.save` can write it.

    Args:
        packed: The state dict.
        chunks: (stand-in, this rank's chunks of it), for every stand-in in `packed`.
        parameters: The optimizer's, which all ranks hold alike.
    """

    def __init__(
        self,
        packed: Mapping[str, Any],
        chunks: Iterable[tuple[Tensor, Sequence[Chunk]]],
        parameters: Sequence[Parameter],
    ) -> None:
        super().__init__(packed)
        self.chunks = tuple(chunks)
        self.parameters = parameters

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "This optimizer state is sharded and cannot be pickled or copied: save it with"
            " trainer.save_checkpoint, or leave out save_distributed_checkpoint=True."
        )


@torch.no_grad()
def sharded_state(
    sharded: OptimizerShards, parameters: Sequence[Parameter], collectives: Collectives
) -> ShardedState:
    """The optimizer's state as it lies. Collective, blocks; moves descriptions, no state.

    The chunks are views of the state that the optimizer works on: save before the next step.

    Args:
        sharded: With its state adopted.
        parameters: The engine's list, by `Piece.tensor_index`.
        collectives: Of the pipeline.
    """
    described = describe(sharded, collectives)
    chunks: dict[tuple[int, str], list[Chunk]] = defaultdict(list)
    for piece in sharded.pieces:
        for key, value in sharded.state_of(piece).items():
            if isinstance(described[piece.tensor_index].get(key), PerElement):
                chunks[piece.tensor_index, key].append(Chunk(piece.start, value))
    state: dict[Tensor, dict[str, Any]] = {}
    stand_ins: list[tuple[Tensor, Sequence[Chunk]]] = []
    for index, entries in described.items():
        own = state[parameters[index]] = {}
        for key, value in entries.items():
            if isinstance(value, PerElement):
                own[key] = torch.empty_like(parameters[index], dtype=value.dtype, device="meta")
                stand_ins.append((own[key], chunks[index, key]))
            else:
                own[key] = value.on(sharded.device) if isinstance(value, Scalar) else value
    return ShardedState(pack(sharded.optimizer, state), stand_ins, parameters)
