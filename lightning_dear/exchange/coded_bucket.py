"""Encodes and decodes one bucket row by row, and sends its bytes to the owners of the shards."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.shards import shard_of, sum_in_source_order
from lightning_dear.collectives.work import Begun, Collectives, Encode, Work
from lightning_dear.compression import Codec, Fp32, codec
from lightning_dear.compression.error_feedback import Encoded, Memory
from lightning_dear.exchange.base import Sending, Traffic, largest_of
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.torch_modes import plain_mode, saves_calls


class Reduction:
    """Sends the encoded gradients of one bucket to the owners of the shards, and sums them there.

        all-to-all, then decode world_size rows and sum them       all other codecs
        reduce-scatter, which sums, then decode one row            codecs whose bytes add up

    Both ways send the same number of bytes. The reduce-scatter decodes fewer rows, and backends are
    faster at it: the bytes are fp32 values, which are summed like uncompressed gradients.

    Args:
        compressor: Codec that encodes the rows.
        collectives: Launches the messages.
        outgoing: [world_size, nbytes] uint8, contiguous: row r goes to rank r. In a reduce-scatter
            the sum overwrites this rank's own row.

    Attributes:
        wires: [n, nbytes] uint8: the rows to decode after `wait`. The sum of the n decoded rows is
            the sum over ranks.
        rows: Which n rows `wires` is decoded into, of the bucket's gradients viewed as
            [world_size, -1].
    """

    def __init__(self, compressor: Codec, collectives: Collectives, outgoing: Tensor) -> None:
        rank, world_size = collectives.world.rank, collectives.world.size
        self._collectives, self._adds_up = collectives, compressor.is_summable
        if self._adds_up:
            self._outgoing = numbers = outgoing.view(torch.float32).view(-1)
            self._received = numbers.new_empty(collectives.scratch_numel(numbers.numel()))
            # The sum overwrites this rank's own row.
            self._sum = shard_of(numbers, rank, world_size)
            self.rows = slice(rank, rank + 1)
            self.wires = outgoing[self.rows]
        else:
            self._outgoing = outgoing
            self._received = self.wires = torch.empty_like(outgoing)
            self.rows = slice(0, world_size)

    def expect(self, tag: int) -> None:
        """Posts the receives (not on NCCL). `launch` must follow, with the same tag."""
        if self._adds_up:
            self._collectives.expect_reduce_scatter(self._received, tag)
        else:
            self._collectives.expect_messages("reduce_scatter", self._received, tag)

    def launch(self, tag: int) -> Work:
        """Launches the message. Does not block. After the work's `wait`, `wires` may be decoded.

        `outgoing` must not be mutated before `wait`.

        Args:
            tag: Tag of the message, equal on all ranks.
        """
        buffers = self._outgoing, self._received
        if self._adds_up:
            return self._collectives.launch_reduce_scatter(*buffers, self._sum, tag)
        return self._collectives.launch_all_to_all(*buffers, tag)


class HostsReduction(Reduction):
    """Sums within each host, encodes the sums, and sends the bytes between hosts.

    Each rank of a host encodes a part of the sums: the shards of the ranks with its place on their
    hosts. The gather half uses the memory of `outgoing`, too, so that a bucket may be gathered only
    when the sends of its reduce half have ended. That holds because with a codec no bucket is
    gathered during backward.

    Args:
        collectives: Launches the messages; it must have two hops.
        outgoing: [number of hosts, nbytes] uint8, contiguous: row h goes to host h.
        bucket: Bucket whose gradients are summed, with its scratch.
    """

    def __init__(self, collectives: Collectives, outgoing: Tensor, bucket: Bucket) -> None:
        self._collectives, self._bucket = collectives, bucket
        self.wires = torch.empty_like(outgoing)
        self.rows = slice(0, len(outgoing))

    @override
    def expect(self, tag: int) -> None:
        self._collectives.expect_sums_of_host(self._bucket.received, self.wires, tag)

    def launch_sums(self, tag: int, encode: Encode) -> Begun:
        """Starts to sum within the host. Does not block. See `Collectives.launch_sums_of_host`.

        Args:
            tag: Tag of the messages, equal on all ranks.
            encode: Called with the sums, [hosts, elements of a shard] fp32. Returns `outgoing`,
                which it has filled.

        Returns:
            The work of both hops, and a function that blocks (the host, or on NCCL the stream)
            until `encode` has run.
        """
        place = self._bucket.gradients, self._bucket.received
        return self._collectives.launch_sums_of_host(*place, encode, self.wires, tag)


class CodedBucket(CompressedBucket):
    """One bucket that is encoded row by row, with what it keeps between steps.

    Args:
        bucket: Bucket whose gradients and mean are read and mutated.
        options: Options whose compressor is a codec.
        compressor: Codec of the bucket's tensors: `options.compressor`, or that of one of its
            groups.
        traffic: The collectives, and whether the plan leaves this bucket uncompressed.

    Attributes:
        tag: Tag of the bucket's messages. It is unique over all optimizers' buckets, so that it
            also seeds the random numbers of the codec.
        outgoing: [rows, bytes of a shard] uint8: the encoded bytes. In the reduce half row r goes
            to rank r (in two hops row h to host h). In the gather half the same memory is used
            again: after that half's `wait`, row r is the shard that rank r has encoded.
        nbytes: Bytes of the whole bucket, encoded.
        reduction: Sends `outgoing` to the owners in the reduce half.
        is_sent_back: Whether the gather half is encoded, too.
        most: Largest magnitude that may be sent without a loss scale; inf means no limit. A larger
            one counts as inf in `take_found_inf`, because the residual of a clipped value would
            take more than one further step to send.
    """

    compressor: Codec
    configured: Codec
    reduction: Reduction

    def __init__(
        self, bucket: Bucket, options: ExchangeOptions, compressor: Codec, traffic: Traffic
    ) -> None:
        assert isinstance(options.compressor, Codec)
        collectives = traffic.collectives
        # A bucket that a group of `Fp32` keeps uncompressed needs no residual. It needs momentum if
        # the strategy's compressor brings that, because the optimizer then has none.
        has_momentum = compressor.is_identity and options.compressor.brings_momentum
        keeps = options.compressor if has_momentum else compressor
        device, numel = bucket.gradients.device, bucket.gradients.numel()
        world_size = collectives.world.size
        owner = Memory(0, device)
        # In two hops a rank encodes the shards of the ranks with its place on their hosts.
        self._together, shard = options.ranks_together(collectives), numel // world_size
        places = range(collectives.world.rank % self._together, world_size, self._together)
        encoded = [slice(place * shard, (place + 1) * shard) for place in places]
        worker = keeps.worker_memory(shard * len(places), device)
        if options.encodes_both and not bucket.role.lags:
            # The owner of a shard that lags keeps no residual: what one encoded difference of
            # parameters has left out is part of the next difference.
            owner = compressor.owner_memory(shard, device)
        # A bucket that the plan leaves uncompressed has memories, too, whose residuals it sends, as
        # in a step without compression.
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
        # Once for each codec, and not in each step, since nothing else changes these buffers.
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
        """Returns this rank's flat gradients, prepared for the sum over ranks.

        If the memory has momentum, sets the padding of `gradients` to 0, in place. Otherwise
        returns them as they are.
        """
        if self._keeps_momentum:
            # A nan in the padding would stay in the momentum for ever.
            gradients.index_fill_(0, self._padding, 0.0)
        return gradients

    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        """Adds the residual, or momentum, to `rows`, in place; see `Memory.compensate`.

        Args:
            rows: [R, n] fp32: all that this rank encodes, multiplied by the loss scale. The padding
                becomes 0.
            scale: Loss scale. None means 1.
        """
        self.worker.compensate(rows, scale)
        # The padding becomes 0 again: encoding its zeros may have left residuals, just added.
        rows.view(-1).index_fill_(0, self._worker_padding, 0.0)

    def encode_reduce(self, rows: Tensor, scale: Tensor | None) -> Sending:
        """Encodes `rows`, as `compensate` has left them, into `outgoing`. Does not block.

        The residual of `rows` becomes pending, until `commit` or `discard`.
        """
        reduction, votes = self.reduction, self.compressor.votes
        outgoing = self.outgoing[: len(rows)]
        encoded = self._encode("reduce", rows, outgoing)
        self.worker.note_sent(rows, outgoing, encoded, scale)
        decode = partial(self._sum, reduction, encoded, scale, votes=votes)
        return Sending(partial(reduction.launch, self.tag), decode)

    def _sum(
        self, reduction: Reduction, encoded: Encoded, scale: Tensor | None, *, votes: bool
    ) -> None:
        """Decodes the messages in `reduction.wires`, and writes their sum into the mean."""
        mean = self.bucket.mean
        sum_in_source_order(list(self._decode(reduction.wires, reduction.rows, encoded)), mean)
        if votes:
            # Encoding to signs has dropped the factor 1/world_size and the loss scale.
            mean.mul_(1 / self._world_size)
            if scale is not None:
                mean.mul_(scale)

    # --- the gather half ------------------------------------------------------------------------

    def encode_gather(
        self, is_nan: Tensor | None, look: Callable[[Tensor, float], None]
    ) -> Sending:
        """Encodes this rank's shard of the mean into its row of `outgoing`. Does not block.

        If parameters are gathered, encodes the lag instead: the stepped shard minus the replica.
        The lag is written into the memory of the mean, which is not needed after the shard was
        stepped. The owner's residual is committed at once.

        Args:
            is_nan: Bool tensor: True makes all values nan that any rank decodes, because many
                codecs cannot send nan. None means False.
            look: If `most` is finite, called with the values to encode and `most`, to look for
                larger values. What it finds makes the next step refused.
        """
        lags, mean = self.bucket.role.lags, self.bucket.mean
        mean = self.bucket.lag(mean) if lags else mean
        row = mean.view(1, -1).float()
        self.owner.compensate(row, None)
        if self.most < math.inf:
            # This step is being made and cannot be refused any more. If a value is larger, the next
            # `take_found_inf` tells, and the next step is refused, on all ranks.
            look(row, self.most)
        for part in self._own_unused:
            row[:, part].zero_()
        if lags:
            # All ranks must see an update that is not finite. Codecs that send differences can send
            # nan, but not always inf: adding 0 times the largest value turns inf into nan.
            largest = largest_of(row)
            if is_nan is not None:
                # An optimizer that steps by signs makes a finite update even if means are nan.
                largest.masked_fill_(is_nan, math.nan)
            row.add_(largest, alpha=0.0)
        row.view(-1).index_fill_(0, self._own_padding, 0.0)
        own = self.outgoing[self._collectives.world.rank : self._collectives.world.rank + 1]
        encoded = self._encode("gather", row, own)
        self.owner.note_sent(row, own, encoded, None)
        self.owner.keep(self._own_unused)
        # Committed at once, since the step is being made and cannot be undone.
        self.owner.commit()
        wire = self.outgoing
        launch = partial(self._collectives.launch_all_gather, wire.view(-1), self.tag)
        return Sending(launch, partial(self._write, wire, encoded, self._unused, is_nan))

    def _write(
        self, wire: Tensor, encoded: Encoded, unused: Sequence[slice], is_nan: Tensor | None
    ) -> None:
        """Decodes the gather half: adds the differences to the parameters, or writes the mean.

        The mean goes into `bucket.gradients`. The difference of a parameter that no rank has used
        is not added. It is part of the difference that is sent when the parameter is used again.
        """
        # The thread that waits may be inside a context of the user's, such as autocast.
        with plain_mode(self.bucket.parameters.device.type):
            dtype = encoded.codec.wire_dtype if saves_calls(wire.device) else None
            if dtype is not None and self.bucket.role.lags and not unused:
                # The bytes are the differences themselves. Nothing is left to do for `is_nan` and
                # the padding: such codecs send nan, and 0 in the padding.
                numel = self.bucket.parameters.numel() // len(wire)
                self.bucket.follow(codec.field(wire, dtype, 0, numel))
                return
            rows = self._decode(wire, slice(None), encoded)
            if is_nan is not None:
                rows.masked_fill_(is_nan, math.nan)
            if self.bucket.role.lags:
                # Codecs that send signs decode the zeros of the padding to other values.
                differences = rows.view(-1).index_fill_(0, self._padding, 0.0)
                for part in unused:
                    differences[part].zero_()
                self.bucket.follow(differences)
            elif rows.data_ptr() != self.bucket.gradients.data_ptr():
                self.bucket.gradients.copy_(rows.view(-1))

    def flush(self) -> None:
        """Adds the owner's residual to the mean, which is then gathered uncompressed.

        The residual becomes 0 (with a rate below 1 it shrinks), except for unused parameters. Does
        nothing if the owner keeps no residual.
        """
        if self.owner.names:
            row = self.bucket.mean.view(1, -1).float()
            self.owner.compensate(row, None)
            self.bucket.mean.copy_(row[0])
            self.owner.note_all_sent(but=self._own_unused)

    # --- both -----------------------------------------------------------------------------------

    def _decode(self, wire: Tensor, part: slice, encoded: Encoded) -> Tensor:
        """Decodes `wire` into rows `part` of the gradients' memory, and returns these rows.

        If gradients are not fp32, the rows are new fp32 tensors, and the gradients do not change.
        """
        rows = self.bucket.gradients.view(self._world_size, -1)[part]
        if rows.dtype != torch.float32:
            rows = torch.empty_like(rows, dtype=torch.float32)
        encoded.decode(wire, rows)
        return rows

    def _encode(self, half: str, rows: Tensor, wire: Tensor) -> Encoded:
        """Encodes `rows` into `wire`. Returns how, for decoding. Counts up `counts[half]`."""
        compressor = self.compressor
        # The gather half is encoded once a step, so that its count is the same in all rounds of a
        # step. All rounds then draw the same places, at which their values add up.
        turn = self.counts["gather" if self.is_sent_back else "reduce"]
        self.counts[half] += 1
        seed = None
        if compressor.randomness == "turns":
            seed = self._seed_of(f"turns {self.tag}") + turn
        elif compressor.randomness != "none":
            # Seeded by the count, which checkpoints keep, so that a resumed run draws the same.
            key = f"{half} {self.tag} {self.counts[half]}"
            is_private = compressor.randomness == "private"
            seed = self._seed_of(f"{key} {self._collectives.world.rank}" if is_private else key)
        encoded = Encoded(compressor, seed)
        compressor.encode(rows, wire, encoded.generator(rows.device))
        return encoded
