"""The state of all ranks in a checkpoint folder, from which as many ranks go on bit for bit.

The weights of a checkpoint are the anchor. Under `files.LOCAL_KEY` a folder also has

    layout:     what must be the same in the training that goes on: `OptimizerRounds.layout` of each
                optimizer
    weights:    a hash of the anchor, by which a change of the checkpoint's weights is seen
    fragments:  what `Fragment.spread` returns, with stand-ins: for each fragment the outer
                optimizer's state, residuals, and whether an exchange is under way
    ranks:      rank -> what only that rank has: replica, module buffers, inner optimizers' states,
                `OptimizerRounds.progress` of each optimizer, and what the caller adds
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dear.bucket import Chunk, hash_of_bits
from lightning_dear.checkpoint.optimizer_state import ShardedState
from lightning_dear.collectives.work import uncounted
from lightning_dear.local_steps.rounds import OptimizerRounds
from lightning_dear.optimizers.masters import without_masters
from lightning_dear.optimizers.pieces import parameters_of

_SMALL_BYTES = 1024
"""Tensors of at most this size are sent to rank 0, instead of being written by their rank."""

_INNER = "optimizer_states"
"""Key of the inner optimizers' states, in Lightning's checkpoint and in the state of a rank."""

Buffers = Mapping[str, Tensor]
"""Buffers of the module, by name."""

Stood = list[tuple[Tensor, list[Chunk]]]
"""(stand-in, this rank's chunks of the tensor), as in `ShardedState`."""


def keep_ranks_apart(checkpoint: dict[str, Any], rank: int) -> list[ShardedState]:
    """Lets rank 0 alone write the inner optimizers' states, which differ by rank. Local.

    Mutates `checkpoint`. All ranks still write a part of the weights, which are the anchor.

    Returns:
        The states of this rank.
    """
    states: list[ShardedState] = checkpoint.get(_INNER, [])
    if rank and states:
        checkpoint[_INNER] = [ShardedState({}, (), one.parameters) for one in states]
    return states


@torch.no_grad()
def gathered_state(
    parts: Sequence[OptimizerRounds],
    spread: Sequence[ShardedState],
    inner: Sequence[ShardedState],
    buffers: Buffers,
    of_rank: Mapping[str, Any],
) -> tuple[ShardedState, int]:
    """Returns what is saved under `files.LOCAL_KEY`, and its bytes. Collective. Blocks.

    The module must hold the anchor. Tensors are not copied: save them before the next step. Ranks
    tell each other what they have, but send only small tensors.

    Args:
        parts: Counts steps, one for each optimizer.
        spread: What `Fragment.spread` has returned for each fragment.
        inner: This rank's states of the inner optimizers.
        buffers: The module's buffers.
        of_rank: What else this rank has.
    """
    collectives, fragments = parts[0].collectives, [one for part in parts for one in part.fragments]
    world = collectives.world
    # While the module holds the anchor, the replica is in the place of the anchor.
    replica = {name: one for fragment in fragments for name, one in fragment.anchor.items()}
    own = {
        "replica": replica,
        "buffers": {name: one for name, one in buffers.items() if name not in replica},
        # Masters are in the replica. Rank 0's states are those of the checkpoint itself.
        _INNER: [{**one, "state": without_masters(one["state"])} for one in inner if world.rank],
        "progress": [part.progress for part in parts],
        **of_rank,
    }
    chunks: Stood = []
    own = _stood_for(own, chunks)
    with uncounted(collectives):
        said = collectives.all_gather_object((own, sum(one.nbytes for one, _ in chunks)))
    # Rank 0 writes which tensors there are. Each rank names its own to write them.
    ranks = {rank: _stood_for(one, chunks) for rank, (one, _) in enumerate(said) if not world.rank}
    ranks[world.rank] = own
    for state in (*inner, *spread):
        chunks += state.chunks
    local = {
        "layout": _layout_of(parts),
        "weights": _hash_of(parts),
        "fragments": [dict(one) for one in spread],
        "ranks": ranks,
    }
    return ShardedState(local, chunks, ()), sum(nbytes for _, nbytes in said)


@torch.no_grad()
def resume(
    local: Mapping[str, Any], parts: Sequence[OptimizerRounds], buffers: Buffers
) -> Mapping[str, Any] | None:
    """Goes on from what `gathered_state` has returned, read at the same world size. Collective.

    Blocks. The module must hold the checkpoint's weights, and rank 0's inner optimizer states must
    be loaded. Afterwards it holds the replica, and exchanges are under way as they were.

    Returns:
        The state of this rank. None means that the checkpoint's weights were changed, or that the
        fragments are others now: then nothing is done.
    """
    collectives, fragments = parts[0].collectives, [one for part in parts for one in part.fragments]
    fits = local["layout"] == _layout_of(parts) and local["weights"] == _hash_of(parts)
    if not all(collectives.all_gather_object(fits)):
        return None
    own: Mapping[str, Any] = local["ranks"][collectives.world.rank]
    for part, progress in zip(parts, own["progress"], strict=True):
        part.begin(progress)
    for part, state in zip(parts, own[_INNER], strict=False):
        part.load_inner(state)
    for fragment, saved in zip(fragments, local["fragments"], strict=True):
        fragment.write_replica(own["replica"])
        fragment.resume(saved)
    for part in parts:
        part.publish()
    for name, value in own["buffers"].items():
        buffers[name].copy_(value)
    return own


def _layout_of(parts: Sequence[OptimizerRounds]) -> list[Any]:
    return [parts[0].collectives.world.size, *(part.layout for part in parts)]


def _hash_of(parts: Sequence[OptimizerRounds]) -> int:
    """Returns a hash of the bits of all parameters that the optimizers hold."""
    found = 0
    for parameter in parameters_of(*(part.optimizer for part in parts)):
        found = hash_of_bits(parameter, found)
    return found


def _stood_for(value: Any, chunks: Stood) -> Any:
    """Returns the nested `value` with stand-ins in place of its large tensors.

    Args:
        value: Dicts, lists, tensors and others. Not mutated. Its stand-ins stay.
        chunks: Mutated: gets every stand-in, with the whole tensor or, for one that was there
            already, with nothing.
    """
    if isinstance(value, Mapping):
        return {key: _stood_for(one, chunks) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_stood_for(one, chunks) for one in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        chunks.append((value, []))
        return value
    if value.nbytes <= _SMALL_BYTES:
        return value.detach().cpu().clone()
    stand_in = torch.empty_like(value, device="meta")
    chunks.append((stand_in, [Chunk(0, value.detach())]))
    return stand_in
