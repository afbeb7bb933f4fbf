"""What the engine asks of an exchange, and what all exchanges that encode have in common.

What must be known before a step may count, and what this rank keeps of a bucket between steps.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.compression import Compressor
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.exchange.sparse.figures import Tally
from lightning_dear.telemetry.device_work import as_device_work
from lightning_dear.torch_modes import saves_calls

LossScale = Callable[[], "Tensor | None"]
"""What gradients are multiplied by at present, as a tensor of one element; None: by nothing."""

NO_SEED = -1
"""In the place of a seed, which is never negative: where training began without one."""


class GradientsNotFinite(RuntimeError):
    """A rank's gradients have nan or inf in them; all ranks raise it before weights change."""


class CompressedBucket(ABC):
    """What has to be kept, and given back, of one bucket, whatever it is encoded to.

    Args:
        bucket: Its mean is read and written.
        codec: What encodes it.
        worker: What is kept of this rank's own gradients, for the whole bucket.
        owner: What is kept of the mean, for this rank's shard.
        world_size: Number of ranks.

    Attributes:
        bucket: See above.
        number: The bucket's.
        spec: What lies where in it.
        own: Where this rank's shard lies in it.
        worker: See above.
        owner: See above.
        codec: In use at present.
        configured: Of this bucket, unless a schedule says otherwise.
        counts: Half -> how often it has been encoded; equal on all ranks, not for all buckets.
        seed: Of all that is drawn at random, equal on all ranks; or `NO_SEED`.
        factors: Tensor number -> what all ranks alike keep of it besides; to be read or overwritten
            between steps.
        tally: Of the bucket's last sparse step; None where there are none.
    """

    tally: Tally | None = None

    def __init__(
        self, bucket: Bucket, codec: Compressor, worker: Memory, owner: Memory, world_size: int
    ) -> None:
        self.bucket = bucket
        self.configured = self.codec = codec
        self.number, self.spec, self.own = bucket.number, bucket.spec, bucket.own
        self.worker, self.owner = worker, owner
        self.counts = {"reduce": 0, "gather": 0}
        self.seed = NO_SEED
        self.factors: dict[int, Tensor] = {}
        # Who owns what nobody uses gives it back to those that have sent it, each its share.
        self._num_owners = world_size if bucket.is_all_reduced else 1
        self._unused: tuple[slice, ...] = ()
        self._own_unused: tuple[slice, ...] = ()
        self._padding, self._own_padding = self._find_padding()

    def _find_padding(self) -> tuple[Tensor, Tensor]:
        """Places of elements that belong to no parameter, in the bucket and in this rank's shard.

        Decoding, and marking what is not finite, leave numbers there that nothing overwrites.
        """
        # On the CPU, since `nonzero` on a device makes the host wait.
        is_padding = torch.ones(self.spec.padded_numel, dtype=torch.bool)
        for part in self.spec.slices:
            is_padding[part.offset : part.offset + part.numel] = False
        whole, own = is_padding.nonzero()[:, 0], is_padding[self.own].nonzero()[:, 0]
        device = self.bucket.mean.device
        return whole.to(device), own.to(device)

    def use(self, codec: Compressor) -> None:
        """Encodes with `codec` from the next reduction on. What is on its way keeps its bytes."""
        if codec != self.codec:
            # New buffers: bytes on their way are still decoded from the old ones.
            self.codec = codec
            self._make_room()

    def start_anew(self, seed: int | None) -> None:
        """What is counted, and factors, as before the first step; memories stay as they are.

        Args:
            seed: Of what is drawn from now on; None: the one there is.
        """
        self.counts.update(dict.fromkeys(self.counts, 0))
        if seed is not None:
            self.seed = seed

    def _seed_of(self, key: str) -> int:
        """Of a generator: another one for every `key` and under every seed, equal on all ranks."""
        # Without a seed, as earlier versions had it.
        seeded = key if self.seed == NO_SEED else f"{self.seed} {key}"
        # Not `hash`, which Python salts anew in each process: ranks and resumed runs would differ.
        return int.from_bytes(hashlib.blake2b(seeded.encode(), digest_size=7).digest(), "big")

    @abstractmethod
    def _make_room(self) -> None:
        """Makes buffers for what `codec` sends, new ones."""

    @property
    def steering(self) -> Tensor | None:
        """[n] fp64: by what this rank selects numbers in this bucket; None where by nothing."""
        return None

    def steer(self, steering: Tensor) -> None:
        """Selects by that from now on, if it is of a bucket like this one. Between steps."""
        return

    @property
    def rate(self) -> float:
        """Of both memories, where they keep anything: one codec says how."""
        return (self.worker if self.worker.names else self.owner).rate

    @property
    def residual_norms(self) -> list[Tensor]:
        """2-norms of what is still to be sent, of this rank's gradients and of its shard's mean.

        Of all of it, whatever the memories' rates: so codecs can be compared.
        """
        pairs = (self.worker, self._padding), (self.owner, self._own_padding)
        return [
            torch.linalg.vector_norm(memory.kept["residual"].index_fill(0, padding, 0.0))
            / memory.rate
            for memory, padding in pairs
            if "residual" in memory.names
        ]

    def commit(self) -> None:
        """Keeps what encoding has left over: the step was made."""
        self.worker.commit()

    def discard(self) -> None:
        """Forgets it: the gradients are void."""
        self.worker.discard()

    def detach(self) -> None:
        """Lets go of the bucket's buffers; what is kept between steps stays."""
        # Who reads residuals after training holds this object, but is not to hold flat buffers.
        del self.bucket, self._padding

    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """Parameters that no rank has used will not be stepped: no gradient of theirs is sent.

        Args:
            used: By tensor number.
            scale: What the mean is multiplied by.
            keeps: Whether residuals that have come from other ranks are kept, rather than lost.
        """
        self._unused = tuple(
            slice(piece.offset, piece.offset + piece.numel)
            for piece in self.spec.slices
            if not used[piece.tensor]
        )
        own, own_unused = self.own, []
        for part in self._unused:
            begin, end = max(part.start, own.start), min(part.stop, own.stop)
            if begin >= end:
                continue
            own_unused.append(slice(begin - own.start, end - own.start))
            if keeps:
                # Its residual gets it back, without the loss scale.
                mean = self.bucket.mean[own_unused[-1]]
                share = mean / self._num_owners
                self.worker.add(slice(begin, end), share if scale is None else share / scale)
                mean.zero_()
        self._own_unused = tuple(own_unused)


class Exchange(ABC):
    """Moves buckets: gradients to their owners, and back what these make of them.

    Args:
        collectives: What moves the bytes.
        first_number: The number that bucket 0 has among all that travel at once, those of several
            optimizers included.

    Attributes:
        collectives: See above.
        first_number: See above.
        coded: What encoding keeps of each bucket, in the order of the buckets; of none if nothing
            is encoded.
    """

    def __init__(self, collectives: Collectives, first_number: int = 0) -> None:
        self.collectives, self.first_number = collectives, first_number
        self.coded: Sequence[CompressedBucket] = ()

    def number_of(self, bucket: Bucket) -> int:
        """The bucket's among all that travel at once."""
        return self.first_number + bucket.number

    # --- the two halves ---------------------------------------------------------------------------

    @abstractmethod
    def expect_reduce(self, bucket: Bucket) -> None:
        """Lets others' gradients arrive from now on; `launch_reduce` must follow."""

    @abstractmethod
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Starts summing the bucket's gradients; after `wait`, its `mean` is there."""

    @abstractmethod
    def expect_gather(self, bucket: Bucket) -> None:
        """Lets what is gathered arrive, where nobody may read it before `launch_gather`."""

    @abstractmethod
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Does what has to be done here and now; what is returned starts the gather, later.

        After its `wait`, the bucket's parameters have the new values, or its gradients the mean.
        """

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts to gather what completes `bucket`. Does not block."""
        return self.prepare_gather(bucket)()

    @abstractmethod
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        """Starts filling the bucket's gradients from every rank's mean, in place."""

    def sync(self, bucket: Bucket) -> Work:
        """Starts gathering stepped shards that replicas are behind of. All ranks call."""
        return Work.done()

    # --- what only some have to do, and then between the halves -----------------------------------

    def take_found_inf(self) -> Tensor | bool:
        """Whether a gradient that was reduced since the last call was nan or inf. Local."""
        return False

    def hear_found_inf(self, found: Tensor) -> None:
        """Told whether any rank found one."""
        # Where gradients travel as they are, it shows in the mean.
        return

    def look_again(self) -> None:
        """As the two above, of means that a hook may have changed. All ranks call; may block."""
        return

    @property
    def voting(self) -> AbstractSet[int]:
        """Numbers of the buckets in which every rank has a vote, and none can abstain."""
        return frozenset()

    def refuse_votes(self, names: Sequence[str]) -> None:
        """Told, as all ranks are, of parameters in them that not every rank has a gradient for."""
        return

    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        """Adds to the bucket's mean what earlier rounds of the step have brought.

        Args:
            bucket: Reduced once more.
            earlier: Its mean before; None: no rank had a gradient then.
            is_empty: Whether no rank had a gradient for this round.
        """
        if earlier is not None:
            bucket.mean.add_(earlier)

    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        """Told which parameters will be stepped; `keeps`: see `CompressedBucket`."""
        return

    # --- around a step ----------------------------------------------------------------------------

    @property
    def compression_ratio(self) -> float:
        """Bytes of both halves as they are, over those that travel."""
        return 1.0

    def use(self, codec: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec from now on, or from the next `commit` or `discard` on.

        Args:
            codec: Which one.
            is_idle: Whether nothing has been reduced, or is about to arrive, since the last of
                those.

        Raises:
            ValueError: Where nothing is encoded.
        """
        raise ValueError(
            f"Nothing encodes, so that {codec.name} cannot replace it: set compressor=."
        )

    def check(self) -> None:
        """Raises `RuntimeError` if the step cannot be made with what was reduced."""
        return

    def commit(self) -> None:
        """Told that the step was made of what was reduced."""
        return

    def discard(self) -> None:
        """Told that what was reduced since the last step is void."""
        return


@dataclass(frozen=True)
class Traffic:
    """What an exchange that encodes moves.

    Attributes:
        dense: Moves what is not encoded, by the same collectives.
        flat: All of the plan's buckets.
        uncompressed: Numbers of those that travel as they are all the same.
        loss_scale: Asked at each encoding.
    """

    dense: Exchange
    flat: FlatBuffers
    uncompressed: Collection[int]
    loss_scale: LossScale


@dataclass(frozen=True)
class Sending:
    """What is to be done once a bucket is encoded.

    Attributes:
        launch: Starts sending it. Does not block.
        decode: What an accelerator does of what has arrived; None: nothing.
    """

    launch: Callable[[], Work]
    decode: Callable[[], None] | None = None


class CompressedExchange(Exchange):
    """Looks at gradients before they are encoded, and keeps residuals only if a step was made.

    Args:
        traffic: What is moved.
        codec: What encodes.
    """

    def __init__(self, traffic: Traffic, codec: Compressor) -> None:
        super().__init__(traffic.dense.collectives, traffic.dense.first_number)
        self._dense, self._codec = traffic.dense, codec
        self._loss_scale = traffic.loss_scale
        # Largest number that may be sent -> largest ones that were to be, of each bucket.
        self._found: dict[float, list[Tensor]] = {}
        self._refusal: RuntimeError | None = None
        self._is_nan: Tensor | None = None
        self._next: Compressor | None = None

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Encodes the bucket's gradients and starts sending that. Does not block."""
        return self._prepare(partial(self._encode, bucket, self._loss_scale()))()

    @abstractmethod
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's gradients, which come multiplied by `scale`."""

    def _prepare(self, encode: Callable[[], Sending]) -> Callable[[], Work]:
        """Encodes here and now; what is returned starts sending that, and lets it be decoded."""
        return partial(self._launch, as_device_work(encode))

    def _launch(self, sending: Sending) -> Work:
        work = sending.launch()
        if sending.decode is None:
            return work
        # Whoever waits for it decodes.
        return Work(work.wait, partial(as_device_work, sending.decode))

    # --- what is not encoded ----------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        self._dense.expect_gather(bucket)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        return self._dense.prepare_gather(bucket)

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        return self._dense.launch_gather_gradients(bucket)

    # --- gradients that are not finite ------------------------------------------------------------

    def _look_for_inf(self, rows: Tensor, largest: float = math.inf) -> None:
        most = min(largest, torch.finfo(rows.dtype).max)
        self._found.setdefault(most, []).append(largest_of(rows))

    @override
    def take_found_inf(self) -> Tensor | bool:
        found, self._found = self._found, {}
        are_small = [torch.stack(ones) <= most for most, ones in found.items()]
        return ~torch.cat(are_small).all() if are_small else False

    @override
    def hear_found_inf(self, found: Tensor) -> None:
        """Makes all means nan, so that a loss scale backs off; `check` refuses the step without.

        Where the host would have to wait for that, what is decoded becomes nan instead.
        """
        is_host = found.is_cpu and self.collectives.streams.current() is None
        if self.collectives.reads_flags_freely and is_host:
            if not found:
                return
            self._refusal = GradientsNotFinite(
                "A rank's gradients have nan or inf in them, which"
                f" compressor={self._codec.name!r} cannot send, or would keep."
                f"{self._codec.overflows} No weight has"
                " changed, and no residual. Find the operation with Trainer(detect_anomaly=True),"
                " or the hook that changes gradients; lower the learning rate or clip gradients, or"
                " use precision='16-mixed', which leaves such steps out."
            )
        else:
            is_nan = found.bool()
            self._is_nan = is_nan if self._is_nan is None else self._is_nan | is_nan
        one_or_nan = torch.where(found.view(()).bool(), math.nan, 1.0)
        torch._foreach_mul_([coded.bucket.mean for coded in self.coded], one_or_nan)

    @override
    def look_again(self) -> None:
        for coded in self.coded:
            self._look_for_inf(coded.bucket.mean)
        flag = torch.zeros(1, dtype=torch.uint8, device=self.coded[0].bucket.mean.device)
        flag[0] = self.take_found_inf()
        self.collectives.launch_any(flag).wait()
        self.hear_found_inf(flag)

    @override
    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    @override
    def use(self, codec: Compressor, *, is_idle: bool = True) -> None:
        """Encodes with another codec, from the next reduction on. All ranks, all alike.

        It must need of what is kept between steps what the first codec has, or be `Fp32`. Buckets
        with another codec than the first keep theirs, but for `Fp32`.
        """
        self._next = None if is_idle else codec
        for coded in self.coded if is_idle else ():
            follows = coded.configured == self._codec or codec.is_identity
            coded.use(codec if follows else coded.configured)

    # --- around a step --------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        scale = None if all(used) else self._loss_scale()
        for coded in self.coded:
            coded.note_used(used, scale, keeps=keeps)

    @override
    def commit(self) -> None:
        for coded in self.coded:
            coded.commit()
        self._begin_anew()

    @override
    def discard(self) -> None:
        for coded in self.coded:
            coded.discard()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._refusal = self._is_nan = None
        if self._next is not None:
            self.use(self._next)


def largest_of(numbers: Tensor) -> Tensor:
    """The largest absolute value, or nan if there is one; a tensor: a device is not waited for."""
    if not saves_calls(numbers.device):
        low, high = numbers.aminmax()
        return torch.maximum(low.abs_(), high.abs_())
    return torch.linalg.vector_norm(numbers, math.inf)  # type: ignore[no-any-return]
