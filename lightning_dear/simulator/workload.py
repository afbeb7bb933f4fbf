"""A model as a simulation needs it: tensors, when each is read and ready, costs of compressing."""

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
        name: Name for people.
        tensors: Parameters, with known `first_use` and `ready`.
        times: Times of a step without communication. `step_s` is for stepping all parameters; the
            strategy decides how much of that a rank does.
        codecs: Costs of compressing if owners sum gradients and send the sums to all ranks.
        whole_codecs: Costs of compressing if every rank gets every rank's encoded gradients. None
            means that strategies which work this way run without the compressor.
        fixed_step_s: Seconds of the optimizer's step that do not depend on how much is stepped.
        copies_s: Seconds of a step in which DDP copies gradients into its buckets and back, and
            sends rank 0's module buffers. `strategy="dear"` sends buffers while it computes.
        sharding_s: Host seconds in a step of FSDP2 beyond its exchanges, in units of
            `shard_unit_mb`. None means `Network.sharded_tensor_s` for each tensor.
        compressor: Name of the compressor whose costs `codecs` are.
        shard_unit_mb: MiB of a unit, which FSDP2 and ZeRO gather together. A unit is whole modules
            in the order in which forward reads them, until they reach this size. "blocks" means one
            unit for each numbered block in the tensors' names ("net.blocks.3.weight") and one for
            all other tensors.
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
        """Bytes of all parameters."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.tensors)

    @property
    def uncompressed(self) -> "Workload":
        """The same workload without a compressor."""
        return replace(self, codecs=NO_CODEC, whole_codecs=None, compressor="none")

    def sharded_times(self, world_size: int) -> ModelTimes:
        """Return the times as planners need them: `step_s` is for stepping one rank's shard."""
        return replace(self.times, step_s=self.times.step_s / world_size)
