"""The all-gather half: launched bucket by bucket in the step, waited for where a read happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_dear import private_names
from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import Work
from lightning_dear.engine.gate import ModuleGate, has_gate, owners
from lightning_dear.exchange import Exchange

_NUM_EXPECTED_AHEAD = 4
"""Receives that are posted before their bucket is stepped. Posting all of them first would keep the
first gather waiting."""

_SECONDS_BETWEEN_LOOKS = 1.0
"""Whether the thread that steps still lives."""

_PRE_HOOKS = private_names.FORWARD_PRE_HOOKS.name

Waiting = Callable[[str], AbstractContextManager[None]]
"""Reason -> context in which a wait for parameters happens."""


class ParameterGatherer:
    """Launches gathers and completes parameters.

    Completing is a local wait: it starts no collective, so any rank may do it at any time, alone.
    Between `begin_step` and `end_step` only the thread that steps completes anything; others wait.

    Args:
        module: Whose parameters are gathered.
        buffers: Where they lie.
        exchange: What moves them.
        ungated: Parameter index -> module in front of whose forward to wait, since it reads the
            parameter behind the gate's back (see `ForwardRecorder.ungated`).
        waiting: Entered around every wait.
        on_arrival: Called with a bucket's number once the bucket has arrived, by the thread that
            waits for it. None means that nothing is called.

    Attributes:
        pending: Bucket number -> its gather, until it has arrived; to be looked at.
        entry: Numbers of the buckets that a forward reads before any module of it runs.
        ungatable: Numbers of the buckets that modules without a gate own (see `has_gate`): they
            are complete when the step has ended.
        arriving: Held by whoever completes buckets; nothing arrives while another thread holds it.
    """

    def __init__(
        self,
        module: Module,
        buffers: FlatBuffers,
        exchange: Exchange,
        ungated: Mapping[int, Module | None],
        waiting: Waiting,
        on_arrival: Callable[[int], None] | None,
    ) -> None:
        self._buffers, self._exchange = buffers, exchange
        self._waiting, self._on_arrival = waiting, on_arrival
        self._streams = exchange.collectives.streams
        self.arriving = threading.RLock()
        self._step_ended = threading.Condition(self.arriving)
        self._stepping_thread: threading.Thread | None = None
        self._unexpected: dict[int, Bucket] = {}
        self.pending: dict[int, Work] = {}
        self._staged: dict[int, Work] = {}
        self._parameters_of: list[list[Tensor]] = [[] for _ in buffers.buckets]
        for placement in buffers.placements:
            for number in placement.buckets:
                self._parameters_of[number].append(placement.parameter)
        # Else nothing ever travels, and no hook or gate is put anywhere.
        self._is_gated = exchange.collectives.world.size > 1 or bool(exchange.coded)
        self._find_readers(module, ungated)

    def _find_readers(self, module: Module, ungated: Mapping[int, Module | None]) -> None:
        trained = [placement.parameter for placement in self._buffers.placements]
        found = owners(module, trained) if self._is_gated else {}
        held = {part: self._buckets_of(own.values()) for part, own in found.items()}
        readers = {part: set(numbers) for part, numbers in held.items() if has_gate(part)}
        self.ungatable = tuple({n for part in held if not has_gate(part) for n in held[part]})
        self.entry = self._buckets_of(i for i, user in ungated.items() if user is None)
        for index, user in ungated.items():
            if user is not None:
                readers.setdefault(user, set()).update(self._buffers.placements[index].buckets)
        names = {part: name or type(part).__name__ for name, part in module.named_modules()}
        self._readers = [
            _Reader(self, part, tuple(sorted(numbers)), names.get(part, "read"))
            for part, numbers in readers.items()
        ]
        self._readers_of: list[list[_Reader]] = [[] for _ in self._buffers.buckets]
        for reader in self._readers:
            for number in reader.numbers:
                self._readers_of[number].append(reader)

    def follow(self, module: Module, ungated: Mapping[int, Module | None]) -> None:
        """Waits from now on where the parameters are read now. Nothing may be pending. Local."""
        self.detach()
        self._find_readers(module, ungated)

    def _buckets_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        placements = self._buffers.placements
        return tuple(sorted({n for index in indices for n in placements[index].buckets}))

    def begin_step(self) -> None:
        """From now on parameters and gradients change under the calling thread's hands."""
        with self.arriving:
            self._stepping_thread = threading.current_thread()
            self._streams.readers.add(self._streams.current())
            for reader in self._readers:
                reader.watch()

    def end_step(self) -> None:
        """Lets other threads complete parameters again, also of a step that broke off."""
        if self._stepping_thread is None:
            return
        with self.arriving:
            self._stepping_thread = None
            self._step_ended.notify_all()

    def expect(self, *, early: bool) -> None:
        """Lets other ranks' new values arrive: in a backward those of early buckets, else all.

        All: those that forward needs first at once, the others one by one with each `launch`.
        """
        self._unexpected.clear()
        for bucket in self._buffers.buckets:
            is_meant = (bucket.role.is_staged or not early) and not bucket.role.is_all_reduced
            if is_meant and bucket.number not in self._staged:
                self._unexpected[bucket.number] = bucket
        self._expect_next(len(self._unexpected) if early else _NUM_EXPECTED_AHEAD)

    def _expect_next(self, count: int) -> None:
        for number in tuple(islice(self._unexpected, count)):
            self._exchange.expect_gather(self._unexpected.pop(number))

    def launch(self, number: int) -> None:
        """Starts gathering bucket `number`, whose own shard has been stepped. Does not block."""
        bucket = self._buffers.buckets[number]
        self._unexpected.pop(number, None)
        work = self._exchange.launch_gather(bucket)
        if not work.is_done:
            # Until the step has ended, reads find the values that a backward may still need.
            (self._staged if bucket.role.is_staged else self.pending)[number] = work
        self._expect_next(1)

    def close_gates(self) -> None:
        """Ends the step: every module that owns a pending parameter waits at its next read.

        Blocks for those whose reads cannot be made to wait.
        """
        with self.arriving:
            self.pending.update(self._staged)
            self._staged.clear()
            for reader in self._readers:
                if reader.is_free(self.pending):
                    reader.open()
                else:
                    reader.close()
            self.end_step()
        self.complete(self.ungatable, "TorchScript")

    def complete(self, numbers: Iterable[int] | None = None, reason: str = "read") -> None:
        """Blocks until buckets (all by default) hold the new parameters; idempotent, thread-safe.

        While another thread steps, those of that step: until it has ended.

        Args:
            numbers: Of the buckets to wait for.
            reason: What forces the wait, for the timeline.

        Raises:
            RuntimeError: What the backend raises when a peer failed or the timeout passed; the
                parameters then stay pending, so that a later read raises too. Or the thread that
                stepped has ended within its step.
        """
        with self._step_ended:
            while self._stepping_thread not in (None, threading.current_thread()):
                self._wait_for_end_of_step()
            for number in tuple(self.pending) if numbers is None else numbers:
                work = self.pending.get(number)
                if work is not None:
                    self._wait(number, work, reason)

    def _wait_for_end_of_step(self) -> None:
        has_ended = self._step_ended.wait(_SECONDS_BETWEEN_LOOKS)
        thread = self._stepping_thread
        if not has_ended and thread is not None and not thread.is_alive():
            raise RuntimeError(
                f"Parameters were read in thread {threading.current_thread().name}, but thread"
                f" {thread.name} ended within optimizer.step(), whose exception says why: some"
                " parameters have taken that step and others have not. Load a checkpoint."
            )

    def _wait(self, number: int, work: Work, reason: str) -> None:
        with self._waiting(reason):
            work.wait()
        if self._on_arrival is not None:
            self._on_arrival(number)
        # Other streams find no gate any more; and what was gathered is freed, and overwritten, in
        # the order of the one that steps.
        self._streams.lead_readers()
        # A tensor that an earlier operation saved for backward now holds other values: with the
        # version bumped, autograd refuses to use it instead of returning a wrong gradient.
        torch.autograd.graph.increment_version(self._parameters_of[number])
        del self.pending[number]
        for reader in self._readers_of[number]:
            if reader.is_free(self.pending):
                reader.open()

    def check_was_complete(self, index: int, name: str) -> None:
        """Refuses a gradient of parameter `index` if its new value has not arrived.

        Raises:
            RuntimeError: Naming the parameter.
        """
        if not self.pending.keys().isdisjoint(self._buffers.placements[index].buckets):
            raise RuntimeError(
                f"A gradient arrived for '{name}' although its new value was still"
                " being gathered: forward read it through a reference that strategy='dear' cannot"
                " see (a compiled graph, a tensor kept outside the module, or a module that was"
                " put into the model in mid-step)."
                " Read it as an attribute of its module, exchange modules before training_step, or"
                " call strategy.complete_parameters() before reading it."
            )

    @property
    def is_idle(self) -> bool:
        """Whether no bucket is being gathered, and no step is under way."""
        return not self.pending and self._stepping_thread is None

    def detach(self) -> None:
        """Removes hooks and gates. Does not wait: complete first, or accept old values."""
        self.end_step()
        for reader in self._readers:
            reader.open()
        # They hold this object, whose thread ends with it.
        self._readers.clear()
        self._readers_of = [[] for _ in self._readers_of]


class _Reader:
    """A module that waits for the buckets that it reads: in front of its forward, and at its gate.

    It is itself the forward pre-hook. A copy of the module (an EMA's, a pickled one) is an ordinary
    module: there it waits for nothing and takes no process group along.

    Args:
        gatherer: Completes the buckets.
        module: The module.
        numbers: Of the buckets that it reads.
        name: Of the module, for the timeline.

    Attributes:
        numbers: See above.
        is_free: Says whether none of given numbers is among them.
    """

    def __init__(
        self, gatherer: ParameterGatherer, module: Module, numbers: tuple[int, ...], name: str
    ) -> None:
        self._gatherer, self._module = gatherer, module
        self.numbers, self._name = numbers, name
        self.is_free = frozenset(numbers).isdisjoint
        self._gate = ModuleGate(module, self._wait) if has_gate(module) else None

    def watch(self) -> None:
        """Lets the module's forwards wait from now on."""
        # Not registered: TorchScript has no such method, and refuses to script hooks, so that they
        # stand there no longer than something is waited for.
        hooks: Any = getattr(self._module, _PRE_HOOKS)
        hooks[id(self)] = self
        if len(hooks) > 1:
            hooks.move_to_end(id(self), last=False)

    def close(self) -> None:
        """Lets reads of the module's parameters wait, too, where they can be made to."""
        if self._gate is not None:
            self._gate.close()

    def open(self) -> None:
        """Lets the module read and run without a wait."""
        if self._gate is not None:
            self._gate.open()
        getattr(self._module, _PRE_HOOKS).pop(id(self), None)

    def __call__(self, module: Module, args: Any) -> None:
        """In front of the module's forward."""
        if not self._gatherer.is_idle:
            self._wait()

    def _wait(self) -> None:
        self._gatherer.complete(self.numbers, self._name)

    def __reduce__(self) -> Any:
        return partial, (_wait_for_nothing,)


def _wait_for_nothing(module: Module, args: Any) -> None:
    """What a copy's hook does."""
