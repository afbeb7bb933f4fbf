"""What is trained, as a simulation sees it: tensors, when each is due, what compressing costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_dear.planning import CodecCosts, ModelTimes, TensorSpec
from lightning_dear.planning.measured import NO_CODEC

BLOCKS: Final = "blocks"


@dataclass(frozen=True)
class Workload:
    """A model, as one rank trains it.

    Attributes:
        name: For people.
        tensors: Its parameters, of which `first_use` and `ready` are known.
        times: Of a step without communication. `step_s` is that of stepping all parameters: how
            much of it a rank does is the strategy's.
        codecs: What compressing costs, where owners sum gradients and spread what comes of it.
        whole_codecs: What it costs where all ranks get all ranks' bytes. None: strategies that work
            so go without.
        fixed_step_s: Seconds of the optimizer's step that are the same however little is stepped.
        copies_s: Seconds of a step in which DDP copies gradients into its buckets and back, and
            sends rank 0's module buffers to all ranks; ours travel meanwhile.
        sharding_s: Seconds of a step that FSDP2 takes of the host beyond exchanges, in units of
            `shard_unit_mb`; None: by the number of tensors, see `Network.sharded_tensor_s`.
        compressor: The name of what `codecs` are the costs of.
        shard_unit_mb: MiB that FSDP2 and ZeRO gather together: whole modules, in the order in which
            forward reads them, up to the one that reaches so much. "blocks": the tensors of each of
            the model's blocks, which are numbered in their names ("net.blocks.3.weight"), and all
            others together.
    """

    name: str
    tensors: Sequence[TensorSpec]
    times: ModelTimes
    codecs: CodecCosts = NO_CODEC
    compressor: str = "none"
    fixed_step_s: float = 0.0
    copies_s: float = 0.0
    sharding_s: float | None = None
    whole_codecs: CodecCosts | None = None
    shard_unit_mb: float | Literal["blocks"] = 25.0

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.tensors)

    @property
    def uncompressed(self) -> Workload:
        """The same without a compressor."""
        return replace(self, codecs=NO_CODEC, whole_codecs=None, compressor="none")

    def sharded_times(self, world_size: int) -> ModelTimes:
        """Its times as planners take them: `step_s` is that of one rank's share."""
        return replace(self.times, step_s=self.times.step_s / world_size)
