"""The reduce-scatter half: gradients go into buckets in backward, buckets to their owners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.background import Background
from lightning_dear.collectives.work import Work
from lightning_dear.engine.shared_options import SharedOptions
from lightning_dear.exchange import Exchange
from lightning_dear.planning.plan import BucketPlan
from lightning_dear.torch_modes import saves_calls


def _references_of_a_local() -> int:
    only_here = object()
    return getrefcount(only_here)


_OF_A_LOCAL = _references_of_a_local()
"""Differs between versions of Python."""

UNUSED, USED, LATE = 0, 1, 2
"""What a rank says of a parameter, in a byte: it got no gradient, a gradient, or another one after
its bucket had been launched."""


def _most_held(bucket: Bucket) -> int:
    """Most elements of a gradient that is held until its bucket is full."""
    if saves_calls(bucket.parameters.device):
        # All of a large bucket would take much memory.
        return 1 << (20 if bucket.parameters.numel() > 1 << 24 else 24)
    # A longer one takes longer to copy than a call, and would have left the cache.
    return 1 << 12


@dataclass
class _Round:
    """How far the buckets are on their way to their owners; a step has one such round or more.

    Attributes:
        num_calls: How often each parameter's gradient was accumulated.
        collected: Whether each parameter's gradient lies in its buckets.
        missing: How many tensors each bucket still lacks.
        held: Bucket number -> (where to, gradient) that one call copies when it is full.
        works: Bucket number -> its reduce-scatter, in the order of their launches.
        arrivals: Bucket number -> an early bucket's arrival.
        streams: On which gradients were written.
        kept: Gradients that were copied on another stream, until the round is over.
    """

    num_calls: list[int]
    collected: list[bool]
    missing: list[int]
    held: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    works: dict[int, Work] = field(default_factory=dict)
    arrivals: dict[int, Future[None]] = field(default_factory=dict)
    streams: set[Any] = field(default_factory=set)
    kept: list[Tensor] = field(default_factory=list)


class GradientReducer:
    """Collects gradients and launches reduce-scatters in reduce order.

    Gradients reach their owners in rounds. Usually there is one: every bucket is launched in
    backward, and `reduce` waits. What arrives after a bucket was launched, or after a `reduce`, is
    left in `.grad` and added to the owner's mean by another round.

    Args:
        buffers: Where gradients go.
        names: Parameter names, for messages.
        expected: How often each parameter's gradient is accumulated in one backward, as recorded.
        plan: Which bucket is launched after which, and which may be stepped in backward.
        exchange: What moves buckets.
        pending: Numbers of the buckets whose parameters are being gathered at present.
        waiting: Entered around the wait for the last reduce-scatters.
        shared: Told in every round what other ranks say of the optimizer's options.

    Attributes:
        steps_early: Whether early buckets may have been stepped since `reset`, here or elsewhere.
            Their gradients cannot be added to any more.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        names: Sequence[str],
        expected: Sequence[int],
        plan: BucketPlan,
        exchange: Exchange,
        pending: Collection[int],
        waiting: Callable[[str], AbstractContextManager[None]],
        shared: SharedOptions,
    ) -> None:
        self._placements, self._buckets = buffers.placements, buffers.buckets
        self._names, self._expected = names, expected
        self._order = plan.reduce_order
        self._num_tensors = [len(bucket.spec.slices) for bucket in buffers.buckets]
        self._exchange, self._collectives = exchange, exchange.collectives
        self._pending, self._waiting, self._shared = pending, waiting, shared
        # Scaled before the sum, as DistributedDataParallel does: at two ranks the bits are its own.
        self._scale = 1.0 / exchange.collectives.world_size
        self._early = frozenset(plan.early)
        turns = {number: turn for turn, number in enumerate(plan.reduce_order)}
        # Buckets are launched in this order, and so that many launched ones have a parameter's.
        self._turns = [min(map(turns.__getitem__, one.buckets)) for one in buffers.placements]
        most = [_most_held(bucket) for bucket in buffers.buckets]
        self._may_be_held = [
            len(one.buckets) == 1 and one.parameter.numel() <= most[one.buckets[0]]
            for one in buffers.placements
        ]
        self._waiter = Background("dear-early-steps")
        self.reset()

    def end_step(self) -> None:
        """The gradients that were reduced are used up. Nothing may be under way."""
        self._exchange.commit()
        self.reset()

    def drop(self) -> None:
        """The gradients that were reduced are void. Nothing may be under way."""
        self._exchange.discard()
        self.reset()

    @property
    def has_begun(self) -> bool:
        """Whether gradients of the step have been reduced, or are on their way."""
        return self._num_rounds > 0 or bool(self._round.works)

    def reset(self) -> None:
        """Begins a step without gradients."""
        self._used = [False] * len(self._placements)
        self._num_rounds = 0
        self.steps_early = False
        self._start_round()

    def _start_round(self) -> None:
        num_calls = [0] * len(self._placements)
        self._round = _Round(num_calls, [False] * len(num_calls), list(self._num_tensors))

    # --- during backward --------------------------------------------------------------------

    def expect(self) -> None:
        """A backward begins after which the step's gradients are sent: lets others' arrive."""
        for number in self._order:
            if number not in self._round.works:
                self._exchange.expect_reduce(self._buckets[number])

    def on_gradient(self, index: int, *, launches: bool) -> None:
        """Takes parameter `index`'s `.grad` at its last recorded call; may launch full buckets.

        Raises:
            RuntimeError: If its bucket is already under way and the backend (NCCL) lets no rank
                know without a wait whether others need another round too.
        """
        round_ = self._round
        if self._num_rounds or len(round_.works) > self._turns[index]:
            self._check_may_be_late(index)
            return
        round_.num_calls[index] += 1
        if round_.num_calls[index] < self._expected[index]:
            return
        round_.streams.add(self._collectives.streams.current())
        self._collect(index)
        if launches:
            self._launch_ready()

    def check_was_complete(self, index: int) -> None:
        """Raises `RuntimeError` if parameter `index` is still being gathered."""
        if any(number in self._pending for number in self._placements[index].buckets):
            raise RuntimeError(
                f"A gradient arrived for '{self._names[index]}' although its new value was still"
                " being gathered: forward read it through a reference that strategy='dear' cannot"
                " see (a compiled graph, a tensor kept outside the module, or a module that was"
                " put into the model in mid-step)."
                " Read it as an attribute of its module, exchange modules before training_step, or"
                " call strategy.complete_parameters() before reading it."
            )

    def _check_may_be_late(self, index: int) -> None:
        if self._num_rounds or self._collectives.reads_flags_freely:
            return
        raise RuntimeError(
            f"A second gradient for '{self._names[index]}' arrived after the first had been"
            " reduced: this step ran backward through it more often than the first step did."
            " Run every backward but the step's last one in"
            " `with trainer.strategy.block_backward_sync():`, or"
            " `with fabric.no_backward_sync(model):`."
        )

    def _collect(self, index: int) -> None:
        placement, round_ = self._placements[index], self._round
        parameter, home = placement.parameter, placement.gradient
        gradient, is_first = parameter.grad, not round_.collected[index]
        if gradient is None:
            # A hook has cleared it: DistributedDataParallel averages zeros then.
            gradient = torch.zeros_like(parameter)
        if gradient.is_sparse:
            raise RuntimeError(
                f"'{self._names[index]}' has a sparse gradient, which strategy='dear' does not"
                " reduce; use sparse=False in its embedding."
            )
        if home is not None:
            parameter.grad = None
            # Else it is refused or converted, or somebody who has it too may change it until then.
            is_ours = not gradient.requires_grad and getrefcount(gradient) <= _OF_A_LOCAL
            if not is_first:
                self._copy_held(placement.buckets[0])
                self._collectives.streams.follow(round_.streams)
                home.add_(gradient, alpha=self._scale)
            elif is_ours and self._may_be_held[index] and gradient.dtype == home.dtype:
                round_.held.setdefault(placement.buckets[0], []).append((home, gradient))
            else:
                torch.mul(gradient, self._scale, out=home)
        if is_first:
            round_.collected[index] = True
            for number in placement.buckets:
                round_.missing[number] -= 1
                if not round_.missing[number]:
                    self._copy_held(number)

    def _copy_held(self, number: int) -> None:
        """Copies what is held of bucket `number` into it."""
        if (held := self._round.held.pop(number, None)) is None:
            return
        self._collectives.streams.follow(self._round.streams)
        homes, gradients = map(list, zip(*held, strict=True))
        # The same numbers either way. Not scaled in place: a CPU rounds the factor first then.
        if len(held) == self._num_tensors[number]:
            torch._foreach_copy_(homes, gradients)
            self._buckets[number].gradients.mul_(self._scale)
        else:
            torch._foreach_copy_(homes, torch._foreach_mul(gradients, self._scale))
        # Of several streams, one must not write yet to what another one reads.
        streams = self._round.streams | self._collectives.streams.readers
        self._round.kept += gradients if len(streams) > 1 else []

    def _launch_ready(self) -> None:
        while len(self._round.works) < len(self._order):
            number = self._order[len(self._round.works)]
            if self._round.missing[number]:
                return
            # A backend waits for the stream that launches, and for no other.
            self._collectives.streams.follow(self._round.streams)
            work = self._round.works[number] = self._exchange.launch_reduce(self._buckets[number])
            if self.steps_early and number in self._early:
                self._round.arrivals[number] = self._waiter.submit(work.arrive)
                work.arrive = self._round.arrivals[number].result

    def has_arrived(self, number: int) -> bool:
        """Whether bucket `number`, one of the plan's early ones, can be reduced without a wait."""
        return number in self._round.arrivals and self._round.arrivals[number].done()

    def finish_bucket(self, number: int) -> None:
        """Blocks until bucket `number`, which was launched, is reduced; others may not be yet."""
        self._round.works[number].wait()

    # --- after backward -----------------------------------------------------------------------

    def reduce(self, on_launched: Callable[[], None] = lambda: None) -> list[bool]:
        """Launches what backward left over and blocks until every gradient shard is there.

        Parameters without a gradient on this rank contribute zeros. Clears the parameters'
        `.grad`, which is not the reduced gradient (but where no buffer exists for it, where it is).
        May be called again after more backwards, by all ranks: means add up until `reset`.
        `on_launched` is called in every round, when all buckets are launched.

        Returns:
            Per parameter whether any rank had a gradient for it since `reset`.
        """
        while self._finish_round(on_launched):
            pass
        self._exchange.note_used(self._used, keeps=True)
        return list(self._used)

    def _finish_round(self, on_launched: Callable[[], None]) -> bool:
        """Ends a round; says whether some rank has gradients left for another one."""
        has_sums, buckets = any(self._used), self._buckets if self._num_rounds > 0 else []
        sums = [bucket.mean.clone() if has_sums else None for bucket in buckets]
        says = self._collect_rest()
        self._round.missing = [0] * len(self._buckets)
        self._launch_ready()
        on_launched()
        said_by_any = self._wait(says)
        if self.steps_early:
            self._check_none_came_after_its_step(said_by_any)
        for bucket, earlier in zip(self._buckets, sums, strict=False):
            self._exchange.add_earlier(bucket, earlier, is_empty=not any(said_by_any))
        self._used = [
            # Without a buffer, what `.grad` holds now is all there is.
            said > 0 or (used and placement.gradient is not None)
            for used, said, placement in zip(self._used, said_by_any, self._placements, strict=True)
        ]
        self._num_rounds += 1
        # Those that have made the gradients may use the memory of these again.
        self._collectives.streams.lead_readers()
        self._start_round()
        return LATE in said_by_any

    def _check_none_came_after_its_step(self, said_by_any: Sequence[int]) -> None:
        """On all ranks alike, wherever the bucket was stepped."""
        for name, said, placement in zip(self._names, said_by_any, self._placements, strict=True):
            if said == LATE and not self._early.isdisjoint(placement.buckets):
                raise RuntimeError(
                    f"Another gradient for '{name}' came after its first had been used for an"
                    " update during backward: this step ran backward through it more often than"
                    " the recorded one did. Use a fusion without early gathers, such as"
                    " fusion='threshold'."
                )

    def _collect_rest(self) -> list[int]:
        says = []
        for index, placement in enumerate(self._placements):
            # Nobody but the parameter refers to it here: so it may be held.
            has_one = placement.parameter.grad is not None
            if has_one and len(self._round.works) > self._turns[index]:
                says.append(LATE)
                continue
            if has_one:
                self._collect(index)
            elif not self._round.collected[index] and placement.gradient is not None:
                placement.gradient.zero_()
            says.append(USED if self._round.collected[index] else UNUSED)
        for number in tuple(self._round.held):
            self._copy_held(number)
        return says

    def _wait(self, says: list[int]) -> list[int]:
        """Blocks for the round's buckets; returns the most that any rank says per parameter."""
        voting, placements = self._exchange.voting, enumerate(self._placements)
        voted = [n for n, one in placements if voting and not voting.isdisjoint(one.buckets)]
        with self._waiting("gradients"):
            flags = self._flags(says, voted)
            # Waits where a host's sums are still to be encoded.
            found = self._exchange.take_found_inf()
            if self._collectives.world_size > 1:
                flags[-2], found = found, flags[-2]
            for one in (*self._round.works.values(), self._collectives.launch_any(flags)):
                one.wait()
        return self._hear(says, voted, flags, torch.as_tensor(found))

    def _flags(self, says: list[int], voted: Sequence[int]) -> Tensor:
        """What this rank tells the others, [n] uint8.

        What it says per parameter; of those that are voted on, so that all ranks hear of it,
        whether it has no gradient; a digest of the optimizer's options; whether it has found inf or
        nan, which is still to be filled in; its signal.
        """
        # Who is alone has nobody to hear from: the host reads what it has said itself, and waits
        # for no device.
        is_alone, shared = self._collectives.world_size == 1, self._shared
        device = torch.device("cpu") if is_alone else self._buckets[0].parameters.device
        num_told = len(says) + len(voted)
        flags = torch.ones(num_told + shared.num_bytes + 2, dtype=torch.uint8, device=device)
        if voted or says.count(USED) < len(says):
            lacks = [says[number] == UNUSED for number in voted]
            flags[:num_told] = torch.tensor([*says, *lacks], dtype=torch.uint8)
        if shared.num_bytes:
            flags[num_told:-2] = shared.digest(device)
        flags[-1] = self._collectives.signal.ask()
        return flags

    def _hear(
        self, says: list[int], voted: Sequence[int], flags: Tensor, found: Tensor
    ) -> list[int]:
        """Takes what all ranks have told. Where flags are on a device and are read, it blocks.

        Raises:
            ValueError: See `SharedOptions.hear`.
        """
        all_read, num_told = self._collectives.reads_flags_freely, len(says) + len(voted)
        # Where the host would have to wait, all hear of these one step later.
        behind = flags[num_told:]
        *digest, _, heard = behind.tolist() if all_read else self._shared.said_before(behind)
        self._shared.hear(digest, is_late=not all_read)
        self._collectives.signal.hear(heard)
        self._exchange.hear_found_inf(found)
        # Where reading flags blocks the host, late gradients were refused, and a rank that used
        # everything learns nothing new from them.
        if not all_read and not voted and says.count(USED) == len(says):
            return says
        told = flags.tolist()
        split = [
            number
            for number, lacked in zip(voted, told[len(says) : num_told], strict=True)
            if lacked and told[number] != UNUSED
        ]
        if split:
            self._exchange.refuse_votes([self._names[number] for number in split])
        return told[: len(says)]

    def release(self) -> None:
        """Ends the thread, if there is one. Nothing may be under way."""
        self._waiter.finish()

    # --- whole gradients ------------------------------------------------------------------------

    def expose(self) -> None:
        """Puts the reduced mean into every used parameter's `.grad`. All ranks call; blocks.

        Afterwards `.grad` counts: it is what the next `conceal`, or the next `reduce`, takes.
        """
        for bucket in self._buckets:
            if bucket.has_master:
                bucket.gradients[bucket.own].copy_(bucket.mean)
        works = [self._exchange.launch_gather_gradients(bucket) for bucket in self._buckets]
        with self._waiting("whole gradients"):
            for work in works:
                work.wait()
        self.show()

    def show(self) -> None:
        """Puts the views of the gradient buffers, as they are, into `.grad`."""
        self._num_rounds = 0
        for used, placement in zip(self._used, self._placements, strict=True):
            if placement.gradient is not None:
                placement.parameter.grad = placement.gradient.detach() if used else None

    @torch.no_grad()
    def conceal(self) -> list[bool]:
        """Takes the exposed gradients back, with whatever was done to them. All ranks call; blocks.

        Returns:
            As `reduce`; what counts is whether any rank has a `.grad` of a parameter now.
        """
        self._num_rounds = 1
        # Agreed on, since a hook may have cleared some on some ranks only.
        own = torch.tensor([one.parameter.grad is not None for one in self._placements])
        flags = own.to(self._buckets[0].parameters.device, torch.uint8)
        self._collectives.launch_any(flags).wait()
        # Whoever has all of them, or is alone, need not wait for a device to know.
        knows = bool(own.all()) or self._collectives.world_size == 1
        used = (own if knows else flags).tolist()
        for index, placement in enumerate(self._placements):
            gradient, home = placement.parameter.grad, placement.gradient
            self._used[index] = bool(used[index]) and (home is not None or gradient is not None)
            if home is None:
                continue
            if gradient is not None and gradient.data_ptr() != home.data_ptr():
                home.copy_(gradient)
            placement.parameter.grad = None
        for bucket in self._buckets:
            bucket.adopt_gradients()
        self._exchange.look_again()
        self._exchange.note_used(self._used, keeps=False)
        return list(self._used)
