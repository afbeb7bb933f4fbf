"""What travels, read off the collectives, and where it belongs; for laws that trust nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.work import Work
from lightning_dear.compression import Codec
from lightning_dear.engine.step import OptimizerPipeline
from tests.training.linear import Run, summed


class Wire:
    """Copies the bytes of a run's encoded messages from now on.

    Args:
        run: Its collectives are mutated: they tell.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sent: dict[int, Tensor] = {}
        self._gathered: dict[int, Tensor] = {}
        collectives: Any = run.pipeline.collectives
        self._all_to_all = collectives.launch_all_to_all
        self._all_gather = collectives.launch_all_gather
        collectives.launch_all_to_all = self._note_sent
        collectives.launch_all_gather = self._note_gathered

    def _note_sent(self, rows: Tensor, incoming: Tensor, bucket: int) -> Work:
        self._sent[bucket] = rows.clone()
        return self._all_to_all(rows, incoming, bucket)

    def _note_gathered(self, buffer: Tensor, bucket: int) -> Work:
        # Optimizer state and dense halves are no bytes.
        if buffer.dtype == torch.uint8:
            self._gathered[bucket] = buffer
        return self._all_gather(buffer, bucket)

    def take_sent(self) -> dict[int, Tensor]:
        """Bucket number -> [world size, bytes of a row]: what this rank has sent of it to each.

        Since the last call, of one round of messages.
        """
        taken, self._sent = self._sent, {}
        return taken

    def take_gathered(self) -> dict[int, Tensor]:
        """Bucket number -> [world size, bytes of a row]: what each rank has sent of it to all.

        Blocks until it has arrived. To be read before the next step, which reuses the bytes.
        """
        self._run.pipeline.complete_parameters()
        taken, self._gathered = self._gathered, {}
        return {number: flat.view(dist.get_world_size(), -1) for number, flat in taken.items()}

    def take_means(self, codec: Codec) -> list[Tensor]:
        """What all ranks have sent to the owners since the last call, added up. Collective."""
        return [summed(own) for own in self._decoded(codec, self.take_sent())]

    def take_differences(self, codec: Codec) -> list[Tensor]:
        """What the owners have sent to all since the last call. Blocks."""
        return self._decoded(codec, self.take_gathered())

    def _decoded(self, codec: Codec, wires: Mapping[int, Tensor]) -> list[Tensor]:
        assert self._run.part.plan is not None
        flats = {}
        for number, wire in wires.items():
            numel = self._run.part.plan.buckets[number].padded_numel
            flats[number] = torch.empty((len(wire), numel // len(wire)))
            codec.decode(wire.contiguous(), flats[number])
        return by_tensor(self._run.part, list(self._run.model.weights), flats)


def by_tensor(
    part: OptimizerPipeline, parameters: Sequence[Tensor], buckets: Mapping[int, Tensor]
) -> list[Tensor]:
    """What stands in buckets, in the parameters' shapes and order: fp64, 0 where nothing does."""
    whole = [torch.zeros(one.shape, dtype=torch.float64) for one in parameters]
    for number, at, inside, outside in _pieces(part, parameters):
        if number in buckets:
            whole[at].view(-1)[inside] = buckets[number].reshape(-1)[outside].double()
    return whole


def in_rows(
    part: OptimizerPipeline, parameters: Sequence[Tensor], whole: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Bucket number -> [world size, elements of a shard] fp64: what stands in whole tensors."""
    assert part.plan is not None
    world_size = dist.get_world_size()
    rows = {
        number: torch.zeros((world_size, spec.padded_numel // world_size), dtype=torch.float64)
        for number, spec in enumerate(part.plan.buckets)
    }
    for number, at, inside, outside in _pieces(part, parameters):
        rows[number].view(-1)[outside] = whole[at].detach().reshape(-1)[inside].double()
    return rows


def own_norm(
    part: OptimizerPipeline, parameters: Sequence[Tensor], whole: Sequence[Tensor]
) -> float:
    """2-norm of what of whole tensors belongs to this rank's shards."""
    rows = in_rows(part, parameters, whole).values()
    return float(torch.cat([own[dist.get_rank()] for own in rows]).norm())


def _pieces(
    part: OptimizerPipeline, parameters: Sequence[Tensor]
) -> Iterator[tuple[int, int, slice, slice]]:
    """(bucket number, place among `parameters`, where in that one, where in the bucket)."""
    assert part.plan is not None
    places = {id(parameter): at for at, parameter in enumerate(parameters)}
    for number, spec in enumerate(part.plan.buckets):
        for piece in spec.slices:
            inside = slice(piece.start, piece.stop)
            outside = slice(piece.offset, piece.offset + piece.numel)
            yield number, places[id(part.parameters[piece.tensor])], inside, outside
