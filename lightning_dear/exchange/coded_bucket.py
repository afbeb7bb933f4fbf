"""What encoding and decoding one bucket row by row needs, and how its bytes get to the owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives, Work, shard_of, sum_in_source_order
from lightning_dear.compression import Codec, Fp32
from lightning_dear.compression.codec import field
from lightning_dear.compression.error_feedback import Encoded, Memory
from lightning_dear.exchange.base import Sending, Traffic, largest_of
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.torch_modes import plain_mode, saves_calls


class Reduction:
    """Brings the bytes of one bucket to the shards' owners, where they become the shards' sums.

        all-to-all, decode world_size rows, sum them        any codec
        reduce-scatter, which sums, decode one row          codecs whose bytes add up

    Both send as many bytes. The latter decodes fewer, and is what backends are fastest at: bytes
    are summed as dense gradients are, in fp32.

    Args:
        compressor: That encodes.
        collectives: What moves them.
        outgoing: [world_size, nbytes] uint8, contiguous: row r is for rank r.

    Attributes:
        call: Name of what is launched.
        wires: [n, nbytes] uint8: after `wait`, what is to be decoded; the sum of the n rows of
            numbers that come out is the sum over ranks.
        rows: Which n of a bucket's world_size rows to decode them into.
    """

    def __init__(self, compressor: Codec, collectives: Collectives, outgoing: Tensor) -> None:
        rank, world_size = collectives.world.rank, collectives.world.size
        self._collectives, self._adds_up = collectives, compressor.is_summable
        self.call = "reduce_scatter" if self._adds_up else "all_to_all"
        if self._adds_up:
            self._outgoing = numbers = outgoing.view(torch.float32).view(-1)
            self._received = numbers.new_empty(collectives.scratch_numel(numbers.numel()))
            # The sum takes the place of this rank's own row.
            self._sum = shard_of(numbers, rank, world_size)
            self.rows = slice(rank, rank + 1)
            self.wires = outgoing[self.rows]
        else:
            self._outgoing = outgoing
            self._received = self.wires = torch.empty_like(outgoing)
            self.rows = slice(0, world_size)

    def expect(self, tag: int) -> None:
        """Lets others' bytes arrive from now on; `launch` must follow, of the same number."""
        if self._adds_up:
            self._collectives.expect_reduce_scatter(self._received, tag)
        else:
            self._collectives.expect_messages("reduce_scatter", self._received, tag)

    def launch(self, tag: int) -> Work:
        """Starts sending `outgoing`, which belongs to the collective until `wait`. Does not block.

        Args:
            tag: Of the message; the same on all ranks.
        """
        buffers = self._outgoing, self._received
        if self._adds_up:
            return self._collectives.launch_reduce_scatter(*buffers, self._sum, tag)
        return self._collectives.launch_all_to_all(*buffers, tag)


class HostsReduction(Reduction):
    """Sums within each host, encodes the sums, and exchanges them between hosts.

    Each rank of a host encodes a part. `outgoing` is also the memory of what is gathered later, so
    a bucket may be gathered only when its sends have ended. That holds because no bucket is
    gathered during backward where there is a codec.

    Args:
        collectives: What moves the bytes; it has two hops.
        outgoing: [number of hosts, nbytes] uint8, contiguous: row h is for host h.
        bucket: What is summed, within the host in its scratch.
    """

    def __init__(self, collectives: Collectives, outgoing: Tensor, bucket: Bucket) -> None:
        self._collectives, self._outgoing, self._bucket = collectives, outgoing, bucket
        self.call = "sums_of_host"
        self.wires = torch.empty_like(outgoing)
        self.rows = slice(0, len(outgoing))

    @override
    def expect(self, tag: int) -> None:
        self._collectives.expect_sums_of_host(self._bucket.received, self.wires, tag)

    def launch_sums(
        self, tag: int, encode: Callable[[Tensor], object]
    ) -> tuple[Work, Callable[[], object]]:
        """Starts summing; `encode` is called with the sums, [hosts, elements of a shard] fp32.

        It writes `outgoing`. Does not block. See `Collectives.launch_sums_of_host`.
        """

        def encoded(sums: Tensor) -> Tensor:
            encode(sums)
            return self._outgoing

        place = self._bucket.gradients, self._bucket.received
        return self._collectives.launch_sums_of_host(*place, encoded, self.wires, tag)


class CodedBucket(CompressedBucket):
    """What encoding and decoding one bucket row by row needs, and leaves.

    Args:
        bucket: Its gradients, and its mean, are read and written.
        options: With a codec.
        compressor: What its tensors are configured for: that one, or another.
        traffic: What moves its bytes, and whether it travels as it is all the same.

    Attributes:
        tag: Of the bucket's messages. No two buckets have the same, so it also seeds what the
            compressor draws.
        outgoing: [rows, bytes of a shard] uint8. In the reduce half row r is for rank r, or row h
            for host h. In the gather half row r is what rank r has encoded of its shard. By then
            what was sent has arrived.
        nbytes: Of the whole bucket, encoded.
        reduction: What brings it to the owners.
        is_sent_back: Whether what is gathered is encoded.
        most: Larger numbers are refused, since more than one further step would have to send them.
    """

    compressor: Codec
    configured: Codec
    reduction: Reduction

    def __init__(
        self, bucket: Bucket, options: ExchangeOptions, compressor: Codec, traffic: Traffic
    ) -> None:
        assert isinstance(options.compressor, Codec)
        collectives = traffic.collectives
        # What is never encoded loses nothing, but is to be stepped with the others' momentum.
        has_momentum = compressor.is_identity and options.compressor.brings_momentum
        keeps = options.compressor if has_momentum else compressor
        device, numel = bucket.gradients.device, bucket.gradients.numel()
        world_size = collectives.world.size
        owner = Memory(0, device)
        # In two hops a rank encodes the shards of those that have its place on their hosts.
        self._together, shard = options.ranks_together(collectives), numel // world_size
        places = range(collectives.world.rank % self._together, world_size, self._together)
        encoded = [slice(place * shard, (place + 1) * shard) for place in places]
        worker = keeps.worker_memory(shard * len(places), device)
        if options.encodes_both and not bucket.role.lags:
            # What differences of parameters have not brought is in the next ones.
            owner = compressor.owner_memory(shard, device)
        # What a plan does not encode keeps what it has, as in a dense step.
        used = Fp32() if bucket.number in traffic.uncompressed else compressor
        parts = None if self._together == 1 else encoded
        super().__init__(bucket, used, worker, owner, world_size, parts)
        self._collectives, self._world_size = collectives, world_size
        self.tag = traffic.first_tag + bucket.number
        self._encodes_both = options.encodes_both
        self._keeps_momentum = keeps.brings_momentum
        self._make_room()

    @override
    def _make_room(self) -> None:
        # Once for each codec, not for each step: nothing else changes what follows from it.
        world_size, num_rows = self._world_size, self._world_size // self._together
        self.is_sent_back = self._encodes_both and not self.compressor.is_identity
        row_nbytes = self.compressor.wire_bytes(self.spec.padded_numel // world_size)
        self.nbytes = world_size * row_nbytes
        shape = world_size if self.is_sent_back else num_rows, row_nbytes
        self.outgoing = self.bucket.gradients.new_empty(shape, dtype=torch.uint8)
        if self._together > 1:
            outgoing = self.outgoing[:num_rows]
            self.reduction = HostsReduction(self._collectives, outgoing, self.bucket)
        else:
            self.reduction = Reduction(self.compressor, self._collectives, self.outgoing)
        self.most = 2 * self.compressor.largest if self.compressor.has_feedback else math.inf

    @override
    def detach(self) -> None:
        super().detach()
        del self.outgoing, self.reduction

    # --- the reduce half ------------------------------------------------------------------------

    def own_gradients(self, gradients: Tensor) -> Tensor:
        """Mutates this rank's own, flat, and returns them: as they are added to others'."""
        if self._keeps_momentum:
            # It would keep a nan.
            gradients.index_fill_(0, self._padding, 0.0)
        return gradients

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Adds what was not sent of earlier ones to `rows`, of what is encoded; mutates them."""
        self.worker.compensate(rows, scale)
        # Also where zeros were, since these leave residuals, too.
        rows.view(-1).index_fill_(0, self._worker_padding, 0.0)

    def encode_reduce(self, rows: Tensor, scale: Tensor | None) -> Sending:
        """Encodes what `compensate` has left into `outgoing`."""
        reduction, votes = self.reduction, self.compressor.votes
        outgoing = self.outgoing[: len(rows)]
        encoded = self._encode("reduce", rows, outgoing)
        self.worker.note_sent(rows, outgoing, encoded, scale)
        decode = partial(self._sum, reduction, encoded, scale, votes=votes)
        return Sending(partial(reduction.launch, self.tag), decode)

    def _sum(
        self, reduction: Reduction, encoded: Encoded, scale: Tensor | None, *, votes: bool
    ) -> None:
        mean = self.bucket.mean
        sum_in_source_order(list(self._decode(reduction.wires, reduction.rows, encoded)), mean)
        if votes:
            # Signs have neither the mean's 1/P nor the loss scale.
            mean.mul_(1 / self._world_size)
            if scale is not None:
                mean.mul_(scale)

    # --- the gather half ------------------------------------------------------------------------

    def encode_gather(
        self, is_nan: Tensor | None, look: Callable[[Tensor, float], None]
    ) -> Sending:
        """Encodes this rank's row of `outgoing`, of the mean or the lag; mutates the mean.

        Args:
            is_nan: Whether all that is decoded becomes nan; many codecs cannot send it.
            look: Told what is encoded, and `most`, where there is one.
        """
        # Once the shard has been stepped, nobody needs the mean.
        lags, mean = self.bucket.role.lags, self.bucket.mean
        mean = self.bucket.lag(mean) if lags else mean
        row = mean.view(1, -1).float()
        self.owner.compensate(row, None)
        if self.most < math.inf:
            # Nothing can take this step back: the next one is refused, on all ranks.
            look(row, self.most)
        for part in self._own_unused:
            row[:, part].zero_()
        if lags:
            # An update that is not finite shows on all ranks: codecs send nan, but inf not always.
            largest = largest_of(row)
            if is_nan is not None:
                # Of means that are nan an optimizer that steps by signs makes none.
                largest.masked_fill_(is_nan, math.nan)
            row.add_(largest, alpha=0.0)
        row.view(-1).index_fill_(0, self._own_padding, 0.0)
        own = self.outgoing[self._collectives.world.rank : self._collectives.world.rank + 1]
        encoded = self._encode("gather", row, own)
        self.owner.note_sent(row, own, encoded, None)
        self.owner.keep(self._own_unused)
        # The step is being made, and nothing can take it back.
        self.owner.commit()
        wire = self.outgoing
        launch = partial(self._collectives.launch_all_gather, wire.view(-1), self.tag)
        return Sending(launch, partial(self._write, wire, encoded, self._unused, is_nan))

    def _write(
        self, wire: Tensor, encoded: Encoded, unused: Sequence[slice], is_nan: Tensor | None
    ) -> None:
        """Adds the differences that have arrived, or makes gradients of the means.

        Differences of what no rank has used are not added. What is left of them is sent once it is
        used again.
        """
        # In whatever context somebody reads a parameter.
        with plain_mode(self.bucket.parameters.device.type):
            dtype = encoded.codec.wire_dtype if saves_calls(wire.device) else None
            if dtype is not None and self.bucket.role.lags and not unused:
                # As they are: such codecs send nan, and zeros between parameters.
                numel = self.bucket.parameters.numel() // len(wire)
                self.bucket.follow(field(wire, dtype, 0, numel))
                return
            rows = self._decode(wire, slice(None), encoded)
            if is_nan is not None:
                rows.masked_fill_(is_nan, math.nan)
            if self.bucket.role.lags:
                # Codecs that send signs decode the zeros there to something else.
                differences = rows.view(-1).index_fill_(0, self._padding, 0.0)
                for part in unused:
                    differences[part].zero_()
                self.bucket.follow(differences)
            elif rows.data_ptr() != self.bucket.gradients.data_ptr():
                self.bucket.gradients.copy_(rows.view(-1))

    def flush(self) -> None:
        """Adds to the mean, which is sent as it is, what earlier ones have left."""
        if self.owner.names:
            row = self.bucket.mean.view(1, -1).float()
            self.owner.compensate(row, None)
            self.bucket.mean.copy_(row[0])
            self.owner.note_all_sent(but=self._own_unused)

    # --- both -----------------------------------------------------------------------------------

    def _decode(self, wire: Tensor, part: slice, encoded: Encoded) -> Tensor:
        """Some ranks' rows: in the gradients, or where these are not fp32 new ones."""
        rows = self.bucket.gradients.view(self._world_size, -1)[part]
        if rows.dtype != torch.float32:
            rows = torch.empty_like(rows, dtype=torch.float32)
        encoded.decode(wire, rows)
        return rows

    def _encode(self, half: str, rows: Tensor, wire: Tensor) -> Encoded:
        compressor = self.compressor
        # Of steps that are made: several rounds of one add up at the same places.
        turn = self.counts["gather" if self.is_sent_back else "reduce"]
        self.counts[half] += 1
        seed = None
        if compressor.randomness == "turns":
            seed = self._seed_of(f"turns {self.tag}") + turn
        elif compressor.randomness != "none":
            # Of the count, so that a resumed run goes on.
            key = f"{half} {self.tag} {self.counts[half]}"
            is_private = compressor.randomness == "private"
            seed = self._seed_of(f"{key} {self._collectives.world.rank}" if is_private else key)
        encoded = Encoded(compressor, seed)
        compressor.encode(rows, wire, encoded.generator(rows.device))
        return encoded
