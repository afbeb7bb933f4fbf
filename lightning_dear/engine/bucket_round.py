"""A round: buckets are filled, sent to their owners and summed, and ranks exchange flags and notes.

    fill buckets (in backward, or any other writer) -> launch them in one order on all ranks
        -> launch the message of flags and notes -> wait -> every owner has the means of its shards

A round knows nothing of autograd, `.grad`, or optimizers. It takes any buckets of a plan, at any
world size. A training step runs rounds over all buckets, which `GradientCollector` fills. A note is
a few bytes of each rank that travel with the flags (class `Note`).
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.background import Background
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.engine.batch_weights import BatchWeights, Waiting
from lightning_dear.engine.notes import Notes
from lightning_dear.exchange import Exchange

UNUSED, USED, LATE = 0, 1, 2
"""A rank's flag for a parameter in one round, one byte. The maximum over ranks counts. UNUSED means
that this rank has no gradient, or other value, for the parameter. USED means that this
rank's gradient lies in the parameter's bucket, and may be 0. LATE means that a gradient came after
its bucket was launched, so that one more round is needed."""


class BucketRound:
    """Reduces buckets over ranks, one round at a time, without autograd or an optimizer.

    To be used wherever ranks average values that lie in buckets: gradients, or differences of
    weights. In each round every rank

    1. may call `expect`, so that messages of faster ranks can arrive sooner,
    2. writes its values, times `weights.scale`, into `Bucket.gradients` of the round's buckets, and
       zeros where it has none,
    3. calls `mark_full` and `launch_full` as buckets become full, and `launch_all` at the end,
    4. calls `finish`. Then `Bucket.mean` of each bucket holds the weighted mean: of this rank's
       shard, or of the whole bucket if it is all-reduced. `used` says which parameters any rank
       had values for.

    After the last round of a step every rank calls `Exchange.note_used`, which completes what a
    compressor keeps, and `Exchange.check`. With a compressor, on CPUs, that raises if values were
    not finite. Without one nan and inf arrive in the means, as in any sum. Then the means may be
    used. Afterwards `end_step` keeps the residuals that encoding has left. `drop` instead forgets
    the means, and restores the residuals from before the step. The round neither reads values from
    parameters nor writes means to them. A step usually has one round. It has another one for late
    gradients (LATE), or if a backward follows after the means were reduced. The means of all rounds
    add up (`set_means_aside`). All ranks must launch the same buckets, and call `finish`,
    `end_step` and `drop` equally often.

    `PlanLifecycle` makes rounds for training. Without a module, each rank averages the 8 elements
    of `values` so:

        collectives, options = new_collectives(torch.device("cpu")), ExchangeOptions()
        world = collectives.world
        spec = TensorSpec(0, "values", 8, 4, "fp32", first_use=0, ready=0)
        plan = NoFusion().plan([spec], world.size)
        place = partial(options.role_of, plan), world.rank, collectives.scratch_numel
        flat = allocate(plan, [Parameter(values)], *place, keeps_gradients=True)
        traffic = Traffic(collectives, 0, flat, options.is_of_gradients)
        exchange = new_exchange(options, [None], traffic)
        averaging = BucketRound(flat, [0], exchange, ["values"], None, lambda _: nullcontext())

        mean = flat.placements[0].gradient  # the parameter's view of its bucket
        mean.copy_(values * averaging.weights.scale)
        averaging.launch_all()
        averaging.finish([USED])
        exchange.note_used(averaging.used, keeps=True)
        exchange.check()
        exchange.launch_gather_gradients(flat.buckets[0]).wait()  # the other ranks' shards
        averaging.end_step()

    Args:
        flat: The buckets of a plan, and where each parameter lies in them.
        order: Bucket numbers of the round, in the order in which all ranks launch them.
        exchange: Launches the messages of a bucket, and encodes them.
        names: Names of the parameters, for messages.
        notes: A few bytes of each rank that travel with the flags, see `Note`. None means no notes.
        waiting: Reason -> context that is entered around the wait for the means.

    Attributes:
        flat: Same as the argument.
        order: Same as the argument.
        exchange: Same as the argument.
        names: Same as the argument.
        waiting: Same as the argument.
        launched: Bucket number -> its work, for the buckets launched in the present round, in the
            order of the launches.
        used: For each parameter whether any rank had a gradient for it since `begin_step`. Known
            once `finish` has returned.
        late: Indices of the parameters that were LATE on a rank in the last round of this step.
        has_means: Whether buckets hold means of this step, to which another round adds.
        weights: By which this rank counts: all ranks alike, unless `BatchWeights.is_on`. To be
            assigned to between steps, and again after a new plan.
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
        waiting: Waiting,
    ) -> None:
        self.flat, self.order, self.exchange, self.names = flat, order, exchange, names
        self._buckets = {number: flat.buckets[number] for number in order}
        self._placements = flat.placements
        self._collectives = exchange.collectives
        self._notes, self.waiting = notes or Notes(()), waiting
        self.weights = BatchWeights(exchange.collectives, waiting)
        self.written_on: set[Any] = set()
        # Flags of two rounds of one exchange, with other buckets, may travel at the same time.
        self._tag = exchange.first_tag + min(order, default=0)
        self._waiter = Background("dear-arrivals")
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
        # What `launch_flags` has sent: flags, votes, message, found inf, and the message's work.
        self._told: tuple[Sequence[int], Mapping[int, int], Tensor, Tensor, Work] | None = None
        self.written_on.clear()

    def end_step(self) -> None:
        """Ends a step that has used the means, and begins another one. Local.

        Compressors keep the residuals that encoding has left in this step.
        """
        self.exchange.commit()
        self.begin_step()

    def drop(self) -> None:
        """Ends a step that has not used its means, if there are any, and begins another one. Local.

        Compressors go back to the residuals that they had before this step.
        """
        self.exchange.discard()
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
        """On gloo, posts the receives of flags, and of buckets not launched yet. Does not block.

        Other ranks' messages then arrive without delay. All these buckets must be launched later,
        and `finish` be called.
        """
        for number in self.order:
            if number not in self.launched:
                self.exchange.expect_reduce(self._buckets[number])
        num_flags = len(self._placements) + len(self._voted) + self._notes.num_bytes + 1
        self._collectives.expect_max(num_flags, self._tag)

    def watch(self, numbers: Collection[int]) -> None:
        """Lets a thread wait for these buckets, once they are launched.

        Without that, `is_on_host` of a bucket's work is False until it has been waited for. To be
        called before they are launched. Holds until the step ends. Does nothing on NCCL: there the
        stream that waits must be the one that reads.

        Args:
            numbers: Bucket numbers.
        """
        self.watched = frozenset(numbers if self._collectives.wait_blocks_host else ())

    def launch_weights(self) -> None:
        """Launches the exchange of `weights`, which a thread waits for. Collective. Does not block.

        `weights.is_known` then tells whether all have arrived. Without it `weights.scale` launches.
        """
        self.weights.launch()
        self.weights.await_in(self._waiter.submit)

    def mark_full(self, number: int) -> None:
        """Marks bucket `number` as full, which launches nothing: `launch_full` does that.

        To be called when the bucket holds all of this rank's gradients, times `weights.scale`.

        Raises:
            KeyError: If the round has no such bucket.
        """
        self._full.add(self._buckets[number].number)

    def launch_full(self) -> None:
        """Launches full buckets, in the round's order, up to the first that is not full.

        A full bucket behind that one is launched later. Does not block.
        """
        while len(self.launched) < len(self.order):
            number = self.order[len(self.launched)]
            if number not in self._full:
                return
            self._launch(self._buckets[number])

    def launch_all(self) -> None:
        """Launches all buckets that were not launched yet. Does not block.

        In them, elements without a gradient must be 0, since they are summed over ranks.
        """
        self._full.update(self.order)
        self.launch_full()

    def _launch(self, bucket: Bucket) -> None:
        # NCCL waits for the stream that launches, but not for other streams that wrote the bucket.
        self._collectives.streams.follow(self.written_on)
        if not self.weights.own:
            # This rank's gradients do not count. Multiplied by 0, inf would have become nan.
            bucket.gradients.zero_()
        work = self.launched[bucket.number] = self.exchange.launch_reduce(bucket)
        if bucket.number in self.watched:
            work.await_in(self._waiter.submit)

    # --- ending a round -------------------------------------------------------------------------

    def set_means_aside(self) -> None:
        """Copies the means of this step's earlier rounds. `finish` adds them to the next means.

        To be called before buckets are filled again, which overwrites the means. Does nothing in
        the first round of a step, or if no rank had a gradient so far.
        """
        if self.has_means and any(self.used):
            self._earlier = {n: bucket.mean.clone() for n, bucket in self._buckets.items()}

    def launch_flags(self, says: Sequence[int]) -> None:
        """Launches the message of flags and notes, which `finish` waits for.

        Collective. Does not block, except in two hops with a compressor: until the sums of this
        host are encoded. To be called after `launch_all`. Without it `finish` launches the message.

        Args:
            says: This rank's flag for each parameter: UNUSED, USED or LATE.

        Raises:
            ValueError: If `says` has another length than there are parameters.
            RuntimeError: If a bucket of the round was not launched.
        """
        if left := [number for number in self.order if number not in self.launched]:
            raise RuntimeError(f"Buckets {left} were not launched. Call launch_all before finish.")
        if len(says) != len(self._placements):
            raise ValueError(f"{len(says)} flags for {len(self._placements)} parameters. Pass all.")
        absent = {index: says[index] == UNUSED for index in self._voted}
        flags, found = self._flags([*says, *absent.values()])
        work = self._collectives.launch_max(flags, self._tag)
        if self.watched:
            work.await_in(self._waiter.submit)
        self._told = says, absent, flags, found, work

    @property
    def is_complete(self) -> bool:
        """Whether all buckets and flags are known to be here, so that `finish` does not block.

        False unless all buckets are watched (`watch`) and `launch_flags` was called.
        """
        works = [] if self._told is None else [*self.launched.values(), self._told[-1]]
        return bool(works) and all(work.is_on_host for work in works)

    def finish(self, says: Sequence[int]) -> bool:
        """Ends the round: ranks exchange flags and notes, and all means of the round arrive.

        Collective, blocks. To be called after `launch_all`.

        Args:
            says: Same as in `launch_flags`. Not read if that was called.

        Returns:
            Whether a parameter is LATE on any rank, so that all ranks need another round. On NCCL
            `GradientCollector` has refused late gradients of a backward before.

        Raises:
            ValueError: What a note raises, on all ranks, such as for different learning rates.
            Exception: What `launch_flags` and the backend raise.
        """
        with self.waiting("gradients"):
            if self._told is None:
                self.launch_flags(says)
            assert self._told is not None
            says, absent, flags, found, told = self._told
            for work in (*self.launched.values(), told):
                work.wait()
        agreed = self._hear(says, absent, flags, found)
        for number, bucket in self._buckets.items() if self.has_means else ():
            earlier = self._earlier.pop(number, None)
            self.exchange.add_earlier(bucket, earlier, is_empty=not any(agreed))
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

    @cached_property
    def _voted(self) -> Sequence[int]:
        """Indices of the parameters that ranks vote on; none if the compressor does not vote.

        Ranks vote if the compressor takes the majority of their signs. A rank without a gradient
        cannot abstain: zeros in its bucket would be votes, too. So `_hear` refuses the step
        if only some ranks have a gradient.
        """
        voting = self.exchange.voting
        placed = enumerate(self._placements)
        return [index for index, one in placed if not voting.isdisjoint(one.buckets)]

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
            flags[: len(says)] = torch.tensor(says, dtype=torch.uint8, device="cpu")
        self._notes.write(flags[len(says) : end])
        # With two hops, blocks until the sums of this host are encoded: only then inf is found.
        found = self.exchange.take_found_inf()
        if self._collectives.world.size == 1:
            # No other rank needs it. To copy it to `flags`, which may be on another device, would
            # make the host wait.
            return flags, torch.as_tensor(found)
        flags[end] = bool(found) if flags.is_cpu and self._collectives.wait_blocks_host else found
        return flags, flags[end]

    def _hear(
        self, says: Sequence[int], absent: Mapping[int, int], flags: Tensor, found: Tensor
    ) -> Sequence[int]:
        """Passes the maxima in `flags` on to notes and exchange.

        Lets the step raise (`Exchange.check`) if only some ranks can vote on a parameter.

        Returns:
            For each parameter the maximum of its flag over ranks.
        """
        num_flags = len(says) + len(absent)
        self._notes.hear(flags[num_flags:-1], self._collectives)
        self.exchange.hear_found_inf(found)
        # On NCCL reading flags would block the host, and no rank's flag is LATE, since late
        # gradients were refused. So if all flags of this rank are USED, they are the maxima.
        is_free = self._collectives.wait_blocks_host
        if not is_free and not absent and all(flag == USED for flag in says):
            return says
        agreed = flags[:num_flags].tolist()
        # Whether any rank has no gradient of a parameter that ranks vote on. If no rank has one
        # (UNUSED), the parameter is not refused.
        lacking = zip(absent, agreed[len(says) :], strict=True)
        if split := [index for index, is_absent in lacking if is_absent and agreed[index]]:
            self.exchange.refuse_votes([self.names[index] for index in split])
        return agreed[: len(says)]


def of_any_rank(own: Sequence[bool], collectives: Collectives) -> Sequence[bool]:
    """For each flag whether any rank has set it. Collective, blocks.

    Args:
        own: This rank's flags, as many on all ranks.
        collectives: Launches the message.
    """
    flags = torch.tensor(own, dtype=torch.uint8, device=collectives.flags_device)
    collectives.launch_max(flags).wait()
    # If all flags of this rank are set they are the maxima, and the host waits for no device.
    knows = collectives.world.size == 1 or all(own)
    return own if knows else flags.bool().tolist()
