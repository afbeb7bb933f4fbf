"""Notes: a few bytes of each rank that travel with the flags of a round, see `BucketRound`.

`Digest` is a note that compares a number between ranks. Two digests: `SharedOptions` finds options
that differ between ranks, `LaunchDigest` launches that differ. An option is an entry of an
optimizer's parameter group: a learning rate, Adam's betas, weight decay. Also here: `Signal`,
`RingTrial`.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from statistics import fmean, median
from struct import iter_unpack, pack
from typing import Any, Protocol

import torch
from torch import Tensor, optim
from typing_extensions import override

from lightning_dear.collectives.launch_log import Report, difference, hash_of
from lightning_dear.collectives.work import Collectives
from lightning_dear.collectives.world import World
from lightning_dear.engine.batch_weights import BatchWeights
from lightning_dear.optimizers.pieces import SteppedPieces
from lightning_dear.telemetry.statistics import Instruments


class Note(Protocol):
    """A few bytes of each rank, of which all ranks get the maximum over ranks, byte by byte.

    A note tells other ranks something that is no gradient, without a message of its own. For
    example, `SharedOptions` compares learning rates, and `Signal` carries a wish to stop. `Notes`
    calls `say` (if `num_bytes` is not 0) and then `hear` once in each round.
    """

    @property
    def num_bytes(self) -> int:
        """Number of bytes, the same on all ranks. 0 means that none are sent.

        Only that of the last note may differ between rounds.
        """

    def say(self) -> bytes:
        """Returns this rank's bytes for this round, `num_bytes` of them."""

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool) -> None:
        """Receives the maximum over ranks of each byte, equal on all ranks. May raise.

        Args:
            maxima: The maxima, [num_bytes]. In the first round on NCCL all are 0, whatever ranks
                have sent, since there is no round before.
            is_of_round_before: True on NCCL: the maxima are those of the round before. False on
                gloo: they are those of this round.
        """


@dataclass(eq=False)
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
    # `int()` returns 0.
    ask: Callable[[], int] = int
    on_heard: Callable[[int], object] = int
    heard: int | None = None

    def say(self) -> bytes:
        """Returns what `ask` returns; see `Note`."""
        return bytes([self.ask()])

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Stores the maximum in `heard`, and calls `on_heard` unless it is 0; see `Note`."""
        (self.heard,) = maxima
        if self.heard:
            self.on_heard(self.heard)


class Sums:
    """Note: numbers of this rank, which all ranks add up. Each rank has a place of its own.

    Args:
        world: All ranks, and the number of this rank.

    Attributes:
        own: This rank's numbers in the next round, as many on all ranks; to be assigned to. Empty
            means that nothing travels.
        heard: Sums over ranks that the last round has brought, or an empty sequence.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.own: Sequence[float] = ()
        self.heard: Sequence[float] = ()

    @property
    def num_bytes(self) -> int:
        """8 bytes for each number of each rank."""
        return 8 * len(self.own) * self._world.size

    def say(self) -> bytes:
        """Returns this rank's numbers in its own place, and 0 in all others; see `Note`."""
        own = pack(f"{len(self.own)}d", *self.own)
        return (bytes(self._world.rank * len(own)) + own).ljust(self.num_bytes, b"\0")

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Adds up the numbers of all ranks; see `Note`."""
        of_ranks = iter_unpack(f"{len(self.own)}d", bytes(maxima)) if maxima else ()
        self.heard = [sum(one) for one in zip(*of_ranks, strict=True)]


class Notes:
    """All notes that travel with the rounds of one optimizer. One object serves all its plans.

    A note is a few bytes of each rank (class `Note`). `BucketRound` calls this object. At the end
    of each round each note gets the maximum over ranks of its bytes. On NCCL it gets the maximum of
    the round before, which has arrived by then: to read this round's bytes would block the host.

    Args:
        notes: The notes, in an order that is the same on all ranks.
        blocks: Whether notes get the maxima of the present round on NCCL, too. The host then waits
            for the device in each round.
    """

    def __init__(self, notes: Sequence[Note], *, blocks: bool = False) -> None:
        self._notes, self._blocks = notes, blocks
        self._said: bytes | None = None
        # On NCCL: returns the maxima of the round before. None before the first round has ended.
        self._earlier: Callable[[], list[int]] | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all notes together."""
        return sum(note.num_bytes for note in self._notes)

    def say(self) -> None:
        """Gets this rank's bytes from each note that sends any, for the next `write`. Local."""
        self._said = b"".join(note.say() for note in self._notes if note.num_bytes)

    def write(self, room: Tensor) -> None:
        """Writes this rank's bytes into `room`. Calls `say` if that was not called before.

        Args:
            room: Overwritten, [num_bytes] uint8.
        """
        if self._said is None:
            self.say()
        said, self._said = self._said or b"", None
        words = iter_unpack("q", said + bytes(8 - len(said) % 8))
        # Written as integers, since `torch.full` does not block the host. To copy bytes to a device
        # would.
        parts = [torch.full((1,), word, device=room.device) for (word,) in words]
        room.copy_(torch.cat(parts).view(torch.uint8)[: len(said)])

    def hear(self, room: Tensor, collectives: Collectives) -> None:
        """Gives each note the maximum over ranks of its bytes.

        On NCCL these are the maxima of the round before, unless `blocks`; at first all are 0.

        Args:
            room: The maxima of this round, [num_bytes] uint8.
            collectives: Tells whether the backend is NCCL, and reads `room` for the next round.

        Raises:
            Exception: What a note raises, on all ranks.
        """
        # On NCCL `finish` has made only the device wait: to read now would block the host.
        if is_of_round_before := not (self._blocks or collectives.wait_blocks_host):
            earlier, self._earlier = self._earlier, collectives.streams.read_later(room)
            maxima = [0] * len(room) if earlier is None else earlier()
        else:
            maxima = room.tolist()
        for note in self._notes:
            own, maxima = maxima[: note.num_bytes], maxima[note.num_bytes :]
            note.hear(own, is_of_round_before=is_of_round_before)


# --- numbers that must be equal on all ranks ----------------------------------------------------


_LARGEST = (1 << 64) - 1
"""The largest number of a digest."""


class Digest(ABC):
    """A `Note` that compares a number of 64 bits between ranks, and raises if ranks differ.

    It sends the number and its complement. Ranks get the maximum over ranks of each byte. If all
    ranks have sent the same number, a byte and its complement still add up to 255. If not, some of
    these sums are larger.

    Args:
        collectives: Collectives of the ranks that are compared.
    """

    NUM_BYTES = 16

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        # What `value` has counted in the present round, and in the round before.
        self._counted: Any = ()
        self._before: Any = ()

    @abstractmethod
    def value(self) -> int:
        """Returns this rank's number, from 0 to 2^64 - 1. Called once in each round.

        May store what the number stands for in `_counted`.
        """

    @abstractmethod
    def explain(self, counted: Any) -> None:
        """Finds out in what ranks differ, and raises. Collective, blocks.

        Args:
            counted: `_counted` of the round whose numbers differ: on NCCL the round before.
        """

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the note. 0 if there is no other rank."""
        return self.NUM_BYTES if self._collectives.world.size > 1 else 0

    def say(self) -> bytes:
        """Returns the number and its complement; see `Note`."""
        self._before, value = self._counted, self.value()
        return pack("QQ", value, _LARGEST - value)

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Calls `explain` if ranks have sent different numbers; see `Note`."""
        # On NCCL all maxima are 0 in the first round. At world size 1 there are none.
        if any(maxima) and sum(maxima) != 255 * len(maxima) // 2:
            self.explain(self._before if is_of_round_before else self._counted)


class LaunchDigest(Digest):
    """Compares between ranks what they have launched, in each round of gradients.

    Ranks that launch different collectives would add up values of different steps, or wait for each
    other. It happens if only some ranks call a backward or a method that exchanges. A whole step
    more on one rank is not found: its launches are those of the next step of the others.

    Args:
        collectives: Collectives whose launches are compared.
        number: Optimizer number, whose launches are compared where messages are matched by tag.
    """

    def __init__(self, collectives: Collectives, number: int) -> None:
        super().__init__(collectives)
        self._number = number

    @override
    def value(self) -> int:
        log = self._collectives.log
        # The last launches. Where messages are matched by tag, `explain` asks the log for them.
        if not self._collectives.matches_by_tag:
            self._counted = log.report(self._number)
        return log.total(self._number)

    @override
    def explain(self, counted: Report) -> None:
        by_tag = self._collectives.matches_by_tag
        own = self._collectives.log.report(self._number) if by_tag else counted
        first = difference(self._collectives.all_gather_object(own), matches_by_tag=by_tag)
        told = f"The first difference: {first}." if first else "The last 64 do not show which ones."
        raise RuntimeError(
            "Ranks have launched different messages. Call backward, step, and what exchanges"
            " (clipping, grad_norm(), whole_gradients(), optimizer_state()) equally often and in"
            f" the same order on all ranks. {told}"
        )


# --- how shards are gathered ---------------------------------------------------------------------

_WINDOW = 8
"""Number of steps with a ring that are compared with as many steps without one."""

_FIRST_REST = 32
"""Number of windows until a ring is tried again. It doubles whenever the use of a ring ends."""


class RingTrial:
    """Note of one byte: finds out whether an optimizer should send to one rank at a time.

    Reduce-scatters go in turn then, and all-gathers in a ring, see `PairwiseCollectives`. On slow
    links that is faster if each host has one rank. Beside much computing, or if messages are long
    on their way, it is slower. So it is tried, where every rank waits during at least half of its
    step time. After the first 8 steps in a trial, it stays if no rank's mean step is longer than
    before. Later only waits decide: it stays as long as every rank waits during at least half of
    its step time. It changes no value that arrives.

    Each rank sends 1 if it does not want that, and 0 otherwise. The maximum in every `_WINDOW`th
    round decides, so that all ranks change in the same step.

    Args:
        instruments: Tell how long this rank waits in a step.
        collectives: Collectives of the training. Mutated: `in_rings`.
        number: Optimizer number.
    """

    def __init__(self, instruments: Instruments, collectives: Collectives, number: int) -> None:
        self._instruments, self._collectives, self._number = instruments, collectives, number
        self._began_s = time.monotonic()
        # Seconds of each step of this window, and how many of them this rank has waited.
        self._steps: list[tuple[float, float]] = []
        # Largest mean step, in seconds, with which what is tried stays in use.
        self._limit_s = math.inf
        self._rest, self._next_rest = 0, _FIRST_REST

    @property
    def num_bytes(self) -> int:
        """1 if a ring can be used, and 0 if not: waits of CUDA devices would have to be timed."""
        return int(self._collectives.can_use_rings and self._instruments.clock.is_free)

    def _mean_step_s(self) -> float:
        """Returns the mean step of this window, without steps that something else has held up."""
        steps_s = [step_s for step_s, _ in self._steps]
        limit_s = 1.5 * median(steps_s)
        return fmean(step_s for step_s in steps_s if step_s <= limit_s)

    def say(self) -> bytes:
        """Returns 1 if this rank wants to send to all ranks at once, or 0; see `Note`."""
        statistics, now_s = self._instruments.statistics, time.monotonic()
        waited_s = 0.0 if statistics is None else statistics.exposed_s
        self._steps.append((now_s - self._began_s, waited_s))
        self._began_s = now_s
        step_s = self._mean_step_s()
        is_refused = median(one for _, one in self._steps) < step_s / 2 or step_s > self._limit_s
        return bytes([is_refused])

    def hear(self, maxima: Sequence[int], *, is_of_round_before: bool = False) -> None:
        """Begins or ends a trial at the end of a window; see `Note`."""
        if len(self._steps) < _WINDOW:
            return
        in_rings, step_s = self._collectives.in_rings, self._mean_step_s()
        is_refused = bool(maxima[0])
        is_in_ring, self._limit_s = self._number in in_rings, math.inf
        self._steps.clear()
        self._rest = max(self._rest - 1, 0)
        if is_in_ring and is_refused:
            in_rings.remove(self._number)
            self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
        elif not is_in_ring and not is_refused and not self._rest:
            in_rings.add(self._number)
            self._limit_s = step_s


# --- learning rates and other options of optimizers ---------------------------------------------

OptionValues = Mapping[tuple[int, str], Any]
"""(number of a parameter group, name of an option) -> value of the option, as `options_of` has it:
tensors as numbers, and whole numbers as int, so that values can be compared, pickled and hashed.
Equal values have the same `repr`: 0.0 and False become 0. None is left out."""

_KINDS = (bool, int, float, str, tuple, Tensor)


def options_of(optimizer: optim.Optimizer) -> OptionValues:
    """Options in the parameter groups, to be compared between ranks. Local, does not block.

    Tensors of one element on the CPU count as their value. Other tensors count as None, so that
    they are not compared: the host would have to wait for values on a device. Options of other
    types than `_KINDS`, such as the list of parameters, are left out. So is None, which
    `check_options` takes for equal to an option that is not there.
    """
    return {
        (number, key): _as_plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, _KINDS)
    }


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    if isinstance(value, Tensor):
        # The value is copied: a scheduler may later write to this tensor.
        return _as_plain(value.item()) if value.is_cpu and value.numel() == 1 else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Also for subclasses, such as NumPy's. Infinities and NaN are not whole.
        return int(value) if isinstance(value, int) or value.is_integer() else float(value)
    return value


def check_options(what: str, reports: Sequence[OptionValues]) -> None:
    """Refuses options that differ between ranks. Local.

    Args:
        what: For the message, where it stands after "Ranks ": what ranks do with which optimizer.
        reports: Options of every rank, by rank.

    Raises:
        ValueError: Naming the first option that differs from rank 0's.
    """
    for rank, other in enumerate(reports):
        for number, key in {**reports[0], **other}:
            left, right = (report.get((number, key)) for report in (reports[0], other))
            if left != right:
                raise ValueError(
                    f"Ranks {what}, parameter group {number}: {key} is {left} on rank 0 and {right}"
                    f" on rank {rank}. Set the same on all ranks, and let schedules follow a metric"
                    " that all share (sync_dist=True). Each rank steps a part of the model."
                )


_STATE, _BATCHES = (0, "optimizer.state"), (0, "batches")


class SharedOptions(Digest):
    """Compares learning rates and other options between ranks in each round of gradients.

    Also compares which entries of `optimizer.state` other code has written between steps, and how
    many batches a step has, if batches have weights.

    Args:
        collectives: Collectives of the training.
        stepper: Has `written`, and the optimizer whose parameter groups are compared.
        number: Optimizer number, for messages.
        weights: Counts the batches of a step.
    """

    def __init__(
        self, collectives: Collectives, stepper: SteppedPieces, number: int, weights: BatchWeights
    ) -> None:
        super().__init__(collectives)
        self._stepper, self._number, self._weights = stepper, number, weights
        # Names and values of all options at the last call of `_have_changed`.
        self._seen: Sequence[Any] = ()
        self._hash = 0

    @override
    def value(self) -> int:
        if self._have_changed():
            self._counted = self._values()
            # True equals 1, and so must have its hash.
            text = repr(sorted(self._counted.items()))
            self._hash = hash_of(text.replace("True", "1").replace("False", "0"))
        return self._hash

    def _values(self) -> OptionValues:
        others = {_STATE: self._stepper.written, _BATCHES: self._weights.num_batches}
        return {**options_of(self._stepper.optimizer), **others}

    def _have_changed(self) -> bool:
        """Whether the options have changed since `value` has hashed them.

        It is fast if all values are the same objects as at the last call. It compares by value
        (`options_of`) if an object was replaced, or if any option is a tensor or a tuple, such as
        Adam's betas: a tensor, also one in a tuple, may have been written to.
        """
        groups = self._stepper.optimizer.param_groups
        keys = chain.from_iterable(groups)
        values = chain.from_iterable(group.values() for group in groups)
        others = self._stepper.written, self._weights.num_batches
        before, self._seen = self._seen, [*keys, *values, *others]
        is_same = len(before) == len(self._seen) and all(map(is_, before, self._seen))
        if is_same and not any(isinstance(one, Tensor | tuple) for one in self._seen):
            return False
        return bool(self._values() != self._counted)

    @override
    def explain(self, counted: OptionValues) -> None:
        name = f"{type(self._stepper.optimizer).__name__} {self._number}"
        reports = self._collectives.all_gather_object(counted)
        if len({report[_STATE] for report in reports}) > 1:
            raise ValueError(
                f"Ranks have written to other entries of optimizer.state: {name}. Write, reset and"
                " remove the same entries on all ranks. Each rank steps a part of the model."
            )
        counts = [report[_BATCHES] for report in reports]
        if len({*counts}) > 1:
            raise ValueError(
                f"Ranks have weighed different numbers of batches for a step of {name}: {counts},"
                " by rank. Weigh and run as many on all ranks: a batch of weight 0 takes part"
                " without changing the mean."
            )
        check_options(f"step with different options: {name}", reports)
