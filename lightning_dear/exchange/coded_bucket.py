"""A bucket's bytes, and what this rank keeps of it between steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec, Fp32
from lightning_dear.compression.memory import Memory, owner_memory, worker_memory
from lightning_dear.exchange.compressed_bucket import CompressedBucket, zero_or_nan
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.reduction import Reduction, new_reduction


@dataclass(frozen=True)
class Encoded:
    """How bytes on their way were encoded, for whoever decodes them.

    Attributes:
        codec: By which; another one may be in use when they arrive.
        key: In which state its generator was.
        unused: Parts of the bucket that no rank has used in the step of these bytes; equal on all
            ranks.
    """

    codec: Codec
    key: str
    unused: Sequence[slice] = ()


class CodedBucket(CompressedBucket):
    """What encoding and decoding one bucket row by row needs, and leaves.

    Args:
        bucket: Its gradients, and its mean, are read and written.
        options: With a codec.
        codec: What its tensors are configured for: that one, or another.
        collectives: What moves its bytes.
        first_number: See `DenseExchange`; no two buckets draw the same random numbers.
        is_encoded: Whether that encodes them, rather than let them travel as they are.

    Attributes:
        outgoing: [world_size, bytes of a shard] uint8, what this rank sends to each.
        reduction: What brings it to the owners; None: gradients travel as they are.
        gathered: As large, what each has encoded of its shard: `outgoing` itself, whose sends have
            ended by then.
    """

    codec: Codec
    configured: Codec
    reduction: Reduction | None

    def __init__(
        self,
        bucket: Bucket,
        options: ExchangeOptions,
        codec: Codec,
        collectives: Collectives,
        first_number: int = 0,
        *,
        is_encoded: bool = True,
    ) -> None:
        assert isinstance(options.codec, Codec)
        # What is never encoded loses nothing, but is to be stepped with the others' momentum.
        has_momentum = codec.is_identity and options.codec.brings_momentum
        keeps = options.codec if has_momentum else codec
        device, numel = bucket.gradients.device, bucket.gradients.numel()
        world_size = collectives.world_size
        worker = owner = Memory(0, device)
        if options.encodes("reduce"):
            worker = worker_memory(keeps, numel, device)
        if options.encodes("gather") and not bucket.lags:
            # What differences of parameters have not brought is in the next ones.
            owner = owner_memory(codec, numel // world_size, device)
        # What a plan does not encode keeps what it has, as in a dense step.
        super().__init__(bucket, codec if is_encoded else Fp32(), worker, owner, world_size)
        self._collectives = collectives
        self._rank, self._world_size = collectives.rank, world_size
        self._stream = first_number + bucket.number
        self._encodes_reduce = options.encodes("reduce")
        self._clip_norm = keeps.clip_norm
        self._make_room()

    @override
    def _make_room(self) -> None:
        num_bytes = self.codec.wire_bytes(self.spec.padded_numel // self._world_size)
        shape = self._world_size, num_bytes
        self.outgoing = self.bucket.gradients.new_empty(shape, dtype=torch.uint8)
        self.reduction = None
        if self._encodes_reduce:
            self.reduction = new_reduction(self.codec, self._collectives, self.outgoing)

    @property
    def gathered(self) -> Tensor:
        """See the class."""
        return self.outgoing

    @override
    def detach(self) -> None:
        super().detach()
        del self.outgoing, self.reduction

    # --- fp32 rows of what may be in another dtype ----------------------------------------------

    def read(self, flat: Tensor, num_rows: int | None = None) -> Tensor:
        """`flat` as fp32 rows, one for each rank; a view where it is fp32 itself."""
        return flat.view(num_rows or self._world_size, -1).float()

    def rows(self, part: slice) -> Tensor:
        """Rows to decode some ranks' into: the gradients, or where these are not fp32 new ones."""
        rows = self.bucket.gradients.view(self._world_size, -1)[part]
        return rows if rows.dtype == torch.float32 else torch.empty_like(rows, dtype=torch.float32)

    def write(self, rows: Tensor, encoded: Encoded) -> None:
        """Takes over what was decoded into `rows`: adds differences, or makes means gradients.

        Differences of what no rank has used are not added. What is left of them is sent once it is
        used again.
        """
        if self.bucket.lags:
            # Codecs that send signs decode the zeros there to something else.
            differences = rows.view(-1).index_fill_(0, self._padding, 0.0)
            for part in encoded.unused:
                differences[part].zero_()
            self.bucket.follow(differences)
        elif rows.data_ptr() != self.bucket.gradients.data_ptr():
            self.bucket.gradients.copy_(rows.view(-1))

    # --- encoding and decoding ------------------------------------------------------------------

    def compensated(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, mutated: with what was not sent of earlier ones."""
        # First, since momentum would keep a nan; and once more, since zeros leave residuals too.
        rows = self.read(self.clear_padding())
        if self._clip_norm is not None:
            self._clip(rows.view(-1), self._clip_norm, scale)
        self.worker.compensate(rows, scale)
        rows.view(-1).index_fill_(0, self._padding, 0.0)
        return rows

    def _clip(self, flat: Tensor, clip_norm: float, scale: Tensor | None) -> None:
        """Scales each tensor's gradient, this rank's own, to a 2-norm of at most `clip_norm`."""
        own = [flat[part.offset : part.offset + part.numel] for part in self.spec.slices]
        # They come multiplied by 1 / world_size and by the loss scale.
        norms = torch.stack([torch.linalg.vector_norm(one) for one in own]) * self._world_size
        limit = clip_norm if scale is None else clip_norm * scale
        factors = (limit / norms.clamp_(min=torch.finfo(norms.dtype).tiny)).clamp_(max=1.0)
        torch._foreach_mul_(own, list(factors.unbind()))

    def clear_padding(self) -> Tensor:
        """The bucket's gradients, where nothing is left of what was decoded into them."""
        self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.bucket.gradients

    def encode_reduce(self, rows: Tensor, scale: Tensor | None) -> Encoded:
        """Encodes what `compensated` has returned into `outgoing`."""
        encoded = self._next("reduce")
        self.codec.encode(rows, self.outgoing, self._generator(encoded))
        self.worker.note_sent(rows, self.codec, self.outgoing, self._generator(encoded), scale)
        return encoded

    def encode_gather(self) -> Encoded:
        """Encodes this rank's row of `gathered`; mutates the mean."""
        encoded = self._next("gather")
        # Once the shard has been stepped, nobody needs the mean.
        row = self._lag() if self.bucket.lags else self._compensated_mean()
        own = self.gathered[self._rank : self._rank + 1]
        self.codec.encode(row, own, self._generator(encoded))
        self.owner.note_sent(row, self.codec, own, self._generator(encoded), None)
        self.owner.keep(self._own_unused)
        # The step is being made, and nothing can take it back.
        self.owner.commit()
        return encoded

    def _lag(self) -> Tensor:
        row = self.read(self.bucket.lag(self.bucket.mean), 1)
        for part in self._own_unused:
            row[:, part].zero_()
        # An update that is not finite shows on all ranks: codecs send nan, but inf not always.
        row.add_(zero_or_nan(row))
        row.view(-1).index_fill_(0, self._own_padding, 0.0)
        return row

    def _compensated_mean(self) -> Tensor:
        row = self.read(self.bucket.mean, 1)
        self.owner.compensate(row, None)
        row.view(-1).index_fill_(0, self._own_padding, 0.0)
        for part in self._own_unused:
            row[:, part].zero_()
        return row

    def flush(self) -> None:
        """Adds to the mean, which is sent as it is, what earlier ones have left."""
        if self.owner.names:
            row = self.read(self.bucket.mean, 1)
            self.owner.compensate(row, None)
            self.bucket.mean.copy_(row[0])
            self.owner.note_all_sent(but=self._own_unused)

    def decode(self, wire: Tensor, rows: Tensor, encoded: Encoded) -> None:
        """Decodes what `encode_reduce` or `encode_gather` has encoded, here and elsewhere."""
        encoded.codec.decode(wire, rows, self._generator(encoded))

    def _next(self, half: str) -> Encoded:
        self.counts[half] += 1
        key = self._seeded(f"{half} {self._stream} {self.counts[half]}")
        # What others have used is known once gradients have arrived.
        return Encoded(self.codec, key, self._unused if half == "gather" else ())

    def _generator(self, encoded: Encoded) -> Generator | None:
        """A generator in a state that depends on the key alone, so that a resumed run goes on."""
        key = encoded.key
        if encoded.codec.randomness == "none":
            return None
        if encoded.codec.randomness == "private":
            key = f"{key} {self._rank}"
        # Not `hash`, which Python salts anew in each process: ranks and resumed runs would differ.
        digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
        return Generator(self.bucket.gradients.device).manual_seed(int.from_bytes(digest, "big"))
