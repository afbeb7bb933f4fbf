"""A round: full buckets go to their owners, and ranks tell each other what all must know of it.

    fill, in backward or by any other writer -> launch, in one order -> tell -> wait -> means

A round knows nothing of autograd, of `.grad` or of an optimizer. It takes any buckets of a plan, at
any world size. The step has one over all of its buckets, filled by `GradientCollector`.
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
"""What a rank says of a parameter, in a byte of which the largest of all ranks counts. UNUSED: it
has no gradient here. USED: its gradient is in its bucket. LATE: another gradient came after the
launch of its bucket, so that one more round is needed."""


@dataclass(frozen=True)
class Weight:
    """How much this rank's gradients count in a mean over ranks.

    Attributes:
        own: This rank's weight, at least 0; 0 on a rank that has no batch.
        total: The sum of all ranks' weights, the same on all ranks.
    """

    own: float
    total: float

    @cached_property
    def scale(self) -> float:
        """What this rank's gradients are multiplied by before they are summed.

        With equal weights that is 1 / world size, as under DistributedDataParallel.
        """
        return self.own / self.total if self.own else 0.0


class Note(Protocol):
    """A few bytes that ranks tell each other in each round, and whose largest all of them hear."""

    @property
    def num_bytes(self) -> int:
        """How many; the same on all ranks."""
        ...

    def say(self, device: torch.device) -> Tensor:
        """What this rank says now: [num_bytes] uint8 on `device`."""
        ...

    def hear(self, told: Sequence[int], *, is_late: bool) -> None:
        """Takes the largest that any rank has said, byte by byte, on all ranks alike. May raise.

        Args:
            told: `num_bytes` numbers. All are 0 if nothing was said.
            is_late: Whether it was said in the round before.
        """
        ...


class Signal:
    """A number that all ranks hear once a step: a note in each round.

    Attributes:
        ask: What this rank says at present, from 0 to 255.
        heard: The largest number that any rank said in the last exchange, or in the one before that
            where the host would have to wait for the last. None if there was no exchange since it
            was set to None.
        on_heard: Called with that number, unless it is 0.
    """

    num_bytes = 1

    def __init__(self) -> None:
        # `int()` is 0: this rank says nothing.
        self.ask: Callable[[], int] = int
        self.heard: int | None = None
        self.on_heard: Callable[[int], object] = int

    def say(self, device: torch.device) -> Tensor:
        """See `Note`."""
        return torch.full((1,), self.ask(), dtype=torch.uint8, device=device)

    def hear(self, told: Sequence[int], *, is_late: bool = False) -> None:
        """See `Note`."""
        (self.heard,) = told
        if self.heard:
            self.on_heard(self.heard)


class Notes:
    """All notes of one optimizer, from plan to plan.

    Where reading would stop the host (NCCL), notes are heard one round later, when they have long
    arrived.

    Args:
        notes: In the order in which they travel.
    """

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = notes
        # In the first round nothing has been said before.
        self._said: Callable[[], list[int]] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all notes together."""
        return sum(note.num_bytes for note in self._notes)

    def write(self, room: Tensor) -> None:
        """Writes what this rank says now into `room`, [num_bytes] uint8."""
        parts = torch.split(room, [note.num_bytes for note in self._notes])
        for note, part in zip(self._notes, parts, strict=True):
            if note.num_bytes:
                part.copy_(note.say(room.device))

    def hear(self, room: Tensor, collectives: Collectives) -> None:
        """Lets each note hear what has come in `room`; or what came there the round before.

        Raises:
            Exception: What a note raises, on all ranks.
        """
        is_late = not collectives.wait_blocks_host
        if is_late:
            before, self._said = self._said, collectives.streams.read_later(room)
            told = [0] * len(room) if before is None else before()
        else:
            told = room.tolist()
        for note in self._notes:
            own, told = told[: note.num_bytes], told[note.num_bytes :]
            note.hear(own, is_late=is_late)


class BucketRound:
    """Sends buckets to their owners and says how far they are; one round at a time.

    A step usually has one round. Gradients that come too late for it are added by another one, in
    which all ranks take part. `begin_step`, `finish` and whatever waits are called by all ranks.

    Args:
        flat: Where buckets and parameters lie.
        order: Numbers of the buckets of this round, in the order in which all ranks launch them.
        exchange: What moves them.
        names: Of the parameters, for messages.
        notes: What ranks tell each other besides. None means nothing.
        waiting: Entered around the wait for the means.

    Attributes:
        launched: Number of a bucket -> its work, in the order of the launches.
        used: For each parameter whether any rank had a gradient for it since `begin_step`.
        late: Numbers of the parameters of which a rank has said LATE in the last round.
        has_means: Whether buckets hold means of this step, to which another round adds.
        weight: Of this rank's gradients; to be assigned to between steps.
        written_on: The streams on which buckets are written, which launches wait for.
        watched: Numbers of the buckets that a thread waits for, see `watch`.
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
        """There are no gradients of this step yet. Nothing may be under way."""
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
        """The means were used up by a step."""
        self._exchange.commit()
        self.begin_step()

    def drop(self) -> None:
        """The means, if there are any, are void."""
        self._exchange.discard()
        self.begin_step()

    @property
    def has_begun(self) -> bool:
        """Whether gradients of the step have been reduced, or are on their way."""
        return self.has_means or bool(self.launched)

    def release(self) -> None:
        """Ends the thread, if there is one. Nothing may be under way."""
        self._waiter.finish()

    # --- launching ------------------------------------------------------------------------------

    def expect(self) -> None:
        """Lets other ranks' parts of all buckets that are not launched arrive from now on."""
        for number in self._order:
            if number not in self.launched:
                self._exchange.expect_reduce(self._buckets[number])

    def watch(self, numbers: Collection[int]) -> None:
        """Lets a thread wait for those of these buckets that are launched from now on."""
        self.watched = frozenset(numbers)

    def mark_full(self, number: int) -> None:
        """Bucket `number` holds all of this rank's gradients, multiplied by `weight.scale`."""
        self._full.add(number)

    def launch_full(self) -> None:
        """Launches full buckets, in order, up to the first one that is not full. Never blocks."""
        while len(self.launched) < len(self._order):
            number = self._order[len(self.launched)]
            if number not in self._full:
                return
            self._launch(self._buckets[number])

    def launch_all(self) -> None:
        """Launches all that are left. What nobody has written of a bucket must be 0."""
        self._full.update(self._order)
        self.launch_full()

    def _launch(self, bucket: Bucket) -> None:
        # A backend waits for the stream that launches, and for no other.
        self._collectives.streams.follow(self.written_on)
        if not self.weight.own:
            # Not multiplied by 0, since 0 times inf is nan.
            bucket.gradients.zero_()
        work = self.launched[bucket.number] = self._exchange.launch_reduce(bucket)
        if bucket.number in self.watched:
            work.await_in(self._waiter.submit)

    # --- how far a bucket is --------------------------------------------------------------------

    def has_launched(self, number: int) -> bool:
        """Whether bucket `number` is on its way: its buffers belong to the exchange."""
        return number in self.launched

    def is_on_host(self, number: int) -> bool:
        """Whether bucket `number` can be waited for without a wait; known of those watched."""
        return number in self.launched and self.launched[number].is_on_host

    def has_arrived(self, number: int) -> bool:
        """Whether the mean of bucket `number` may be read: somebody has waited for it."""
        return number in self.launched and self.launched[number].is_done

    def wait_for(self, number: int) -> None:
        """Blocks until bucket `number`, which was launched, has arrived; others may not have."""
        self.launched[number].wait()

    # --- ending a round -------------------------------------------------------------------------

    def set_means_aside(self) -> None:
        """Keeps means of earlier rounds, to which the round under way adds; before it is filled."""
        if self.has_means and any(self.used):
            self._earlier = {n: bucket.mean.clone() for n, bucket in self._buckets.items()}

    def finish(self, says: Sequence[int]) -> bool:
        """Tells other ranks, and blocks until all means of the round are there.

        All ranks call, after `launch_all`.

        Args:
            says: For each parameter UNUSED, USED or LATE.

        Returns:
            Whether a rank has said LATE, so that all ranks need another round.

        Raises:
            ValueError: What a note raises, on all ranks, such as other learning rates.
            RuntimeError: What the backend raises.
        """
        absent = self._absent_votes(says)
        with self._waiting("gradients"):
            flags, found = self._flags([*says, *absent.values()])
            for work in (*self.launched.values(), self._collectives.launch_max(flags)):
                work.wait()
        told = self._hear(says, absent, flags, found)
        self._add_earlier(is_empty=not any(told))
        self.late = [number for number, one in enumerate(told) if one == LATE]
        self.used = [
            # Without a bucket, what `.grad` holds now is all there is.
            one != UNUSED or (used and placement.gradient is not None)
            for used, one, placement in zip(self.used, told, self._placements, strict=True)
        ]
        self.has_means = True
        # The streams that made the gradients may use their memory again.
        self._collectives.streams.lead_readers()
        self._begin()
        return bool(self.late)

    def _add_earlier(self, *, is_empty: bool) -> None:
        if self.has_means:
            for number, bucket in self._buckets.items():
                earlier = self._earlier.pop(number, None)
                self._exchange.add_earlier(bucket, earlier, is_empty=is_empty)

    def _absent_votes(self, says: Sequence[int]) -> dict[int, int]:
        """Number of a parameter in whose buckets ranks vote -> whether it has no gradient here."""
        if not (voting := self._exchange.voting):
            return {}
        return {
            number: says[number] == UNUSED
            for number, placement in enumerate(self._placements)
            if not voting.isdisjoint(placement.buckets)
        }

    def _flags(self, says: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The message to all ranks, [n] uint8: `says`, notes, and whether inf or nan was found.

        Returns:
            The message, and what will be known of inf or nan once it has come back: a part of it.
        """
        device, end = self._collectives.flags_device, len(says) + self._notes.num_bytes
        flags = torch.ones(end + 1, dtype=torch.uint8, device=device)
        # All of these are USED as a rule: then nothing is copied to a device.
        if any(one != USED for one in says):
            flags[: len(says)] = torch.tensor(says, dtype=torch.uint8)
        self._notes.write(flags[len(says) : end])
        # Waits where a host's sums are still to be encoded.
        found = self._exchange.take_found_inf()
        if self._collectives.world.size == 1:
            # It stays where it is: the host waits for no device.
            return flags, torch.as_tensor(found)
        flags[end] = found
        return flags, flags[end]

    def _hear(
        self, says: Sequence[int], absent: dict[int, int], flags: Tensor, found: Tensor
    ) -> Sequence[int]:
        """Returns the most that any rank says of each parameter; all else goes where it belongs."""
        num_said = len(says) + len(absent)
        self._notes.hear(flags[num_said:-1], self._collectives)
        self._exchange.hear_found_inf(found)
        # Where reading would stop the host, late gradients were refused, and to a rank that has
        # used everything others can tell nothing new.
        is_free = self._collectives.wait_blocks_host
        if not is_free and not absent and all(one == USED for one in says):
            return says
        told = flags[:num_said].tolist()
        self._refuse_votes(told, dict(zip(absent, told[len(says) :], strict=True)))
        return told[: len(says)]

    def _refuse_votes(self, told: Sequence[int], absent: dict[int, int]) -> None:
        split = [number for number, is_absent in absent.items() if is_absent and told[number]]
        if split:
            self._exchange.refuse_votes([self._names[number] for number in split])
