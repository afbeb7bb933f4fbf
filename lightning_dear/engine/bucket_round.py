"""A round: buckets are filled, sent to their owners and summed, and ranks exchange flags and notes.

    fill buckets (in backward, or any other writer) -> launch them in one order on all ranks
        -> launch the message of flags and notes -> wait -> every owner has the means of its shards

A round knows nothing of autograd, `.grad`, or optimizers. It takes any buckets of a plan, at any
world size. A training step runs rounds over all buckets, which `GradientCollector` fills. A note is
a few bytes of each rank that travel with the flags (class `Note`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.background import Background
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.exchange import Exchange

UNUSED, USED, LATE = 0, 1, 2
"""A rank's flag for a parameter in one round, one byte. The maximum over ranks counts. UNUSED means
that this rank has no gradient, or other value, for the parameter. USED means that it lies in its
bucket; it may be 0. LATE means that a gradient came after its bucket was launched, so that one more
round is needed."""


@dataclass(frozen=True)
class Weight:
    """Weight of this rank's gradients in the mean over ranks.

    A `BucketRound` has a weight. Equal weights give DistributedDataParallel's mean. Other weights
    make a weighted mean, such as by each rank's number of samples. All ranks must agree on the
    total before gradients are written into buckets.

    Attributes:
        own: This rank's weight, at least 0. 0 means that this rank's gradients do not count, as on
            a rank without a batch.
        total: Sum of all ranks' weights, the same on all ranks.
    """

    own: float
    total: float

    @cached_property
    def scale(self) -> float:
        """Factor that the writer of a bucket multiplies this rank's gradients by, `own / total`.

        With equal weights it is 1 / world size, as under DistributedDataParallel. 0 if `own` is 0.
        """
        return self.own / self.total if self.own else 0.0


class Note(Protocol):
    """A few bytes of each rank, of which all ranks get the maximum over ranks, byte by byte.

    A note tells other ranks something that is no gradient, without a message of its own. For
    example, `SharedOptions` compares learning rates, and `Signal` carries a wish to stop. `Notes`
    calls `say` (if `num_bytes` is not 0) and then `hear` once in each round.
    """

    @property
    def num_bytes(self) -> int:
        """Number of bytes, the same on all ranks and in all rounds. 0 means that none are sent."""
        ...

    def say(self, device: torch.device) -> Tensor:
        """Returns this rank's bytes for this round: [num_bytes] uint8 on `device`."""
        ...

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool) -> None:
        """Receives the maximum over ranks of each byte, equal on all ranks. May raise.

        Args:
            maxima: The maxima, [num_bytes]. In the first round on NCCL all are 0, whatever ranks
                have sent, since there is no round before.
            is_of_round_before: True on NCCL: the maxima are those of the round before. False on
                gloo: they are those of this round.
        """
        ...


class Signal:
    """Note of one byte: a number from which all ranks take the maximum in each round.

    A strategy sends a rank's wish to stop in it. 0 means that a rank has no wish.

    Attributes:
        ask: Called in each round; returns this rank's number, from 0 to 255. At first it returns 0;
            to be assigned to.
        heard: Maximum over ranks that the last round has brought. On NCCL that is the maximum of
            the round before it. None means that no round has ended since `heard` was last set to
            None; to be assigned to.
        on_heard: Called with that maximum, unless it is 0. At first it does nothing; to be assigned
            to.
    """

    num_bytes = 1

    def __init__(self) -> None:
        # `int()` returns 0.
        self.ask: Callable[[], int] = int
        self.heard: int | None = None
        self.on_heard: Callable[[int], object] = int

    def say(self, device: torch.device) -> Tensor:
        """Returns what `ask` returns; see `Note`."""
        return torch.full((1,), self.ask(), dtype=torch.uint8, device=device)

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Stores the maximum in `heard`, and calls `on_heard` unless it is 0; see `Note`."""
        (self.heard,) = maxima
        if self.heard:
            self.on_heard(self.heard)


class Notes:
    """All notes that travel with the rounds of one optimizer. One object serves all its plans.

    A note is a few bytes of each rank (class `Note`). `BucketRound` calls this object. At the end
    of each round each note gets the maximum over ranks of its bytes. On NCCL it gets the maximum of
    the round before, which has arrived by then: to read this round's bytes would block the host.

    Args:
        notes: The notes, in an order that is the same on all ranks.
    """

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = notes
        # On NCCL: returns the maxima of the round before. None before the first round has ended.
        self._earlier: Callable[[], list[int]] | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all notes together."""
        return sum(note.num_bytes for note in self._notes)

    def write(self, room: Tensor) -> None:
        """Gets this rank's bytes from each note that sends any, and writes them into `room`.

        Args:
            room: Overwritten, [num_bytes] uint8.
        """
        parts = torch.split(room, [note.num_bytes for note in self._notes])
        for note, part in zip(self._notes, parts, strict=True):
            if note.num_bytes:
                part.copy_(note.say(room.device))

    def hear(self, room: Tensor, collectives: Collectives) -> None:
        """Gives each note the maximum over ranks of its bytes.

        On NCCL these are the maxima of the round before; in the first round all are 0.

        Args:
            room: The maxima of this round, [num_bytes] uint8.
            collectives: Tells whether the backend is NCCL, and reads `room` for the next round.

        Raises:
            Exception: What a note raises, on all ranks.
        """
        # On NCCL `finish` has made only the device wait: to read now would block the host.
        if is_of_round_before := not collectives.wait_blocks_host:
            earlier, self._earlier = self._earlier, collectives.streams.read_later(room)
            maxima = [0] * len(room) if earlier is None else earlier()
        else:
            maxima = room.tolist()
        for note in self._notes:
            own, maxima = maxima[: note.num_bytes], maxima[note.num_bytes :]
            note.hear(own, is_of_round_before=is_of_round_before)


class BucketRound:
    """Reduces buckets over ranks, one round at a time, without autograd or an optimizer.

    To be used wherever ranks average values that lie in buckets: gradients, or differences of
    weights. In each round every rank

    1. may call `expect`, so that messages of faster ranks can arrive early,
    2. writes its values, times `weight.scale`, into `Bucket.gradients` of the round's buckets, and
       zeros where it has none,
    3. calls `mark_full` and `launch_full` as buckets become full, and `launch_all` at the end,
    4. calls `finish`. Then `Bucket.mean` of each bucket holds the weighted mean: of this rank's
       shard, or of the whole bucket if it is all-reduced. `used` says which parameters any rank
       had values for.

    After the last round of a step every rank calls `Exchange.note_used`, which completes what a
    compressor keeps, and `Exchange.check`, which raises if values were not finite. Then the means
    may be used. Afterwards `end_step` keeps the residuals that encoding has left. `drop` instead
    forgets the means, and restores the residuals of before. The round neither reads values from
    parameters nor writes means to them. A step usually has one round. It has another one for late
    gradients (LATE), or if a backward follows after the means were reduced. The means of all rounds
    add up (`set_means_aside`). All ranks must launch the same buckets, and
    call `finish`, `end_step` and `drop` equally often.

    To make a round, `bucket.allocate` makes the buffers of a plan, and `exchange.new_exchange` an
    exchange over them. `PlanLifecycle` does so for training, tests/engine/test_bucket_round.py
    without a module.

    Args:
        flat: The buckets of a plan, and where each parameter lies in them.
        order: Bucket numbers of the round, in the order in which all ranks launch them.
        exchange: Launches the messages of a bucket, and encodes them.
        names: Names of the parameters, for messages.
        notes: A few bytes of each rank that travel with the flags, see `Note`. None means no notes.
        waiting: Reason -> context that is entered around the wait for the means.

    Attributes:
        launched: Bucket number -> its work, for the buckets launched in the present round, in the
            order of the launches.
        used: For each parameter whether any rank had a gradient for it since `begin_step`. Known
            once `finish` has returned.
        late: Indices of the parameters that were LATE on a rank in the last round of this step.
        has_means: Whether buckets hold means of this step, to which another round adds.
        weight: Weight of this rank's gradients, equal on all ranks at first; to be assigned to
            between steps, and again after a new plan.
        written_on: CUDA streams on which buckets of this round are written. Launches wait for them.
            The writer adds each stream. On a CPU it holds only None.
        watched: Bucket numbers that a thread waits for, see `watch`. Empty until `watch` is called
            in a step.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        order: Sequence[int],
        exchange: Exchange,
        names: Sequence[str],
        notes: Notes | None,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._order, self._exchange, self._names = order, exchange, names
        self._buckets = {number: flat.buckets[number] for number in order}
        self._placements = flat.placements
        self._collectives = exchange.collectives
        self._notes, self._waiting = notes or Notes(()), waiting
        self.weight = Weight(1.0, exchange.collectives.world.size)
        self.written_on: set[Any] = set()
        self._waiter = Background("dear-early-steps")
        self.begin_step()

    # --- from step to step ----------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step without gradients: forgets flags, means and `watched`. Local.

        Every launched bucket must have been waited for, since its work is forgotten.
        """
        self.used = [False] * len(self._placements)
        self.late: Sequence[int] = ()
        self.watched: frozenset[int] = frozenset()
        self.has_means = False
        self._earlier: dict[int, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        self.launched: dict[int, Work] = {}
        self._full: set[int] = set()
        self.written_on.clear()

    def end_step(self) -> None:
        """Ends a step that has used the means, and begins another one. Local.

        Compressors keep the residuals that encoding has left in this step.
        """
        self._exchange.commit()
        self.begin_step()

    def drop(self) -> None:
        """Ends a step that has not used its means, if there are any, and begins another one. Local.

        Compressors go back to the residuals that they had before this step.
        """
        self._exchange.discard()
        self.begin_step()

    @property
    def has_begun(self) -> bool:
        """Whether a bucket was launched in this round, or buckets hold means of this step."""
        return self.has_means or bool(self.launched)

    def release(self) -> None:
        """Ends the thread of `watch`. Blocks until the buckets that it waits for have arrived."""
        self._waiter.finish()

    # --- launching ------------------------------------------------------------------------------

    def expect(self) -> None:
        """On gloo, posts the receives of all buckets that are not launched yet. Does not block.

        Other ranks' messages then arrive without delay. All these buckets must be launched later.
        """
        for number in self._order:
            if number not in self.launched:
                self._exchange.expect_reduce(self._buckets[number])

    def watch(self, numbers: Collection[int]) -> None:
        """Lets a thread wait for these buckets, once they are launched.

        Without that, `is_on_host` is False for a bucket until `wait_for` has been called. To be
        called before they are launched. Holds until the step ends.

        Args:
            numbers: Bucket numbers.
        """
        self.watched = frozenset(numbers)

    def mark_full(self, number: int) -> None:
        """Marks bucket `number` as full, which launches nothing: `launch_full` does that.

        To be called when the bucket holds all of this rank's gradients, times `weight.scale`.
        """
        self._full.add(number)

    def launch_full(self) -> None:
        """Launches full buckets, in the round's order, up to the first that is not full.

        A full bucket behind that one is launched later. Does not block.
        """
        while len(self.launched) < len(self._order):
            number = self._order[len(self.launched)]
            if number not in self._full:
                return
            self._launch(self._buckets[number])

    def launch_all(self) -> None:
        """Launches all buckets that were not launched yet. Does not block.

        In them, elements without a gradient must be 0, since they are summed over ranks.
        """
        self._full.update(self._order)
        self.launch_full()

    def _launch(self, bucket: Bucket) -> None:
        # NCCL waits for the stream that launches, but not for other streams that wrote the bucket.
        self._collectives.streams.follow(self.written_on)
        if not self.weight.own:
            # This rank's gradients do not count. Multiplied by 0, inf would have become nan.
            bucket.gradients.zero_()
        work = self.launched[bucket.number] = self._exchange.launch_reduce(bucket)
        if bucket.number in self.watched:
            work.await_in(self._waiter.submit)

    # --- how far a bucket is --------------------------------------------------------------------

    def has_launched(self, number: int) -> bool:
        """Whether bucket `number` was launched in this round.

        From then on until `finish` its gradients must not be written.
        """
        return number in self.launched

    def is_on_host(self, number: int) -> bool:
        """Whether bucket `number` was launched, and waiting for it is known not to block the host.

        False if that is not known: the bucket is not watched (`watch`) and was not waited for.
        """
        return number in self.launched and self.launched[number].is_on_host

    def has_arrived(self, number: int) -> bool:
        """Whether the mean of bucket `number` may be read: its work was waited for in this round.

        False after `finish`, which begins the next round: see `has_means`.
        """
        return number in self.launched and self.launched[number].is_done

    def wait_for(self, number: int) -> None:
        """Blocks until the mean of bucket `number` may be read. It must have been launched."""
        self.launched[number].wait()

    # --- ending a round -------------------------------------------------------------------------

    def set_means_aside(self) -> None:
        """Copies the means of this step's earlier rounds. `finish` adds them to the next means.

        To be called before buckets are filled again, which overwrites the means. Does nothing in
        the first round of a step, or if no rank had a gradient so far.
        """
        if self.has_means and any(self.used):
            self._earlier = {n: bucket.mean.clone() for n, bucket in self._buckets.items()}

    def finish(self, says: Sequence[int]) -> bool:
        """Ends the round: ranks exchange flags and notes, and all means of the round arrive.

        Collective, blocks. To be called after `launch_all`.

        Args:
            says: This rank's flag for each parameter: UNUSED, USED or LATE.

        Returns:
            Whether a parameter is LATE on any rank, so that all ranks need another round. On NCCL
            `GradientCollector` has refused late gradients of a backward before.

        Raises:
            ValueError: What a note raises, on all ranks, such as for different learning rates.
            RuntimeError: What the backend raises.
        """
        absent = self._absent_votes(says)
        with self._waiting("gradients"):
            flags, found = self._flags([*says, *absent.values()])
            for work in (*self.launched.values(), self._collectives.launch_max(flags)):
                work.wait()
        agreed = self._hear(says, absent, flags, found)
        self._add_earlier(is_empty=not any(agreed))
        self.late = [index for index, flag in enumerate(agreed) if flag == LATE]
        self.used = [
            # Without a gradient buffer (world size 1) the step uses `.grad` as it is now, which a
            # hook may have cleared since an earlier round.
            flag != UNUSED or (used and placement.gradient is not None)
            for used, flag, placement in zip(self.used, agreed, self._placements, strict=True)
        ]
        self.has_means = True
        # Streams of forward and backward wait for this one, before they reuse gradients' memory.
        self._collectives.streams.lead_readers()
        self._begin()
        return bool(self.late)

    def _add_earlier(self, *, is_empty: bool) -> None:
        if self.has_means:
            for number, bucket in self._buckets.items():
                earlier = self._earlier.pop(number, None)
                self._exchange.add_earlier(bucket, earlier, is_empty=is_empty)

    def _absent_votes(self, says: Sequence[int]) -> dict[int, int]:
        """Returns: index of a parameter that ranks vote on -> whether this rank has no gradient.

        Ranks vote if the compressor takes the majority of their signs. A rank without a gradient
        cannot abstain: zeros in its bucket would be votes, too. So `_refuse_votes` refuses the step
        if only some ranks have a gradient. Empty if the compressor does not vote.

        Args:
            says: This rank's flag for each parameter.
        """
        if not (voting := self._exchange.voting):
            return {}
        return {
            index: says[index] == UNUSED
            for index, placement in enumerate(self._placements)
            if not voting.isdisjoint(placement.buckets)
        }

    def _flags(self, says: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Makes the message of flags: `says`, bytes of notes, and whether inf or nan was found.

        Returns:
            The message, [n] uint8, and a scalar: whether this rank has found inf or nan. It is a
            view of the message, except at world size 1. So it tells whether any rank has found
            them, once the maximum over ranks was taken.
        """
        device, end = self._collectives.flags_device, len(says) + self._notes.num_bytes
        flags = torch.ones(end + 1, dtype=torch.uint8, device=device)
        # Usually all flags are USED, which is 1: then no flag has to be copied to the device.
        if any(flag != USED for flag in says):
            flags[: len(says)] = torch.tensor(says, dtype=torch.uint8)
        self._notes.write(flags[len(says) : end])
        # With two hops, blocks until the sums of this host are encoded: only then inf is found.
        found = self._exchange.take_found_inf()
        if self._collectives.world.size == 1:
            # No other rank needs it. To copy it to `flags`, which may be on another device, would
            # make the host wait.
            return flags, torch.as_tensor(found)
        flags[end] = found
        return flags, flags[end]

    def _hear(
        self, says: Sequence[int], absent: dict[int, int], flags: Tensor, found: Tensor
    ) -> Sequence[int]:
        """Passes the maxima in `flags` on to notes and exchange; see also `_refuse_votes`.

        Returns:
            For each parameter the maximum of its flag over ranks.
        """
        num_flags = len(says) + len(absent)
        self._notes.hear(flags[num_flags:-1], self._collectives)
        self._exchange.hear_found_inf(found)
        # On NCCL reading flags would block the host, and no rank's flag is LATE, since late
        # gradients were refused. So if all flags of this rank are USED, they are the maxima.
        is_free = self._collectives.wait_blocks_host
        if not is_free and not absent and all(flag == USED for flag in says):
            return says
        agreed = flags[:num_flags].tolist()
        self._refuse_votes(agreed, dict(zip(absent, agreed[len(says) :], strict=True)))
        return agreed[: len(says)]

    def _refuse_votes(self, agreed: Sequence[int], absent: dict[int, int]) -> None:
        """Lets the step raise (`Exchange.check`) if only some ranks can vote on a parameter.

        Args:
            agreed: For each parameter the maximum of its flag over ranks. UNUSED means that no rank
                has a gradient. Such a parameter is not refused.
            absent: Index of each parameter that ranks vote on -> whether any rank has no gradient.
        """
        split = [index for index, is_absent in absent.items() if is_absent and agreed[index]]
        if split:
            self._exchange.refuse_votes([self._names[index] for index in split])
