"""The gather half: all-gathers are launched in the step, and waited for where a read happens."""

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
"""Number of buckets whose receives are posted before the bucket is stepped. Posting the receives of
all buckets first would delay the first all-gather."""

_SECONDS_BETWEEN_LOOKS = 1.0
"""A thread that waits for the end of a step checks this often whether the stepping thread lives."""

_PRE_HOOKS = private_names.FORWARD_PRE_HOOKS.name

Waiting = Callable[[str], AbstractContextManager[None]]
"""Reason of a wait for parameters -> context that is entered around that wait."""


class ParameterGatherer:
    """Launches the gathers of stepped buckets, and makes reads of parameters wait for them.

    The step launches gathers. Modules' gates and forward pre-hooks call `complete`, and so does
    `complete_parameters` of the strategy. It does not know how a bucket was stepped. A caller that
    steps buckets itself and blocks until they have arrived can do with `Exchange.launch_gather`.

    `complete` is a local wait. It launches no collective, so any rank may call it alone at any
    time. Between `begin_step` and `end_step` only the stepping thread completes buckets; other
    threads wait for the end of the step.

    Args:
        module: Module whose parameters are gathered. Mutated: gates and hooks.
        buffers: The buckets, and where each parameter lies in them.
        exchange: Launches the all-gathers.
        ungated: Parameter index -> module whose forward must wait, since it reads the parameter
            through a reference that no gate sees; see `ForwardRecorder.ungated`.
        waiting: Reason -> context that is entered around every wait.
        on_arrival: Called with a bucket number once the bucket has arrived, by the thread that
            waits for it. None means that nothing is called.

    Attributes:
        pending: Bucket number -> work of its all-gather, until it was waited for; read-only.
        entry: Numbers of the buckets that forward reads before any module runs.
        ungatable: Numbers of the buckets with parameters of modules that cannot have a gate, see
            `has_gate`. They are completed at the end of the step.
        arriving: Lock that a thread holds while it completes buckets.
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
        # At world size 1 without a compressor nothing travels, and modules get no hooks or gates.
        self._is_gated = exchange.collectives.world.size > 1 or bool(exchange.coded)
        self._find_readers(module, ungated)

    def _find_readers(self, module: Module, ungated: Mapping[int, Module | None]) -> None:
        """Makes a `_Reader` for each module that owns parameters, or reads some without a gate."""
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
        """Lets the modules wait that read parameters now. No bucket may be pending. Local.

        Args:
            module: Same as the argument of the class, with other submodules than before.
            ungated: Same as the argument of the class.
        """
        self.detach()
        self._find_readers(module, ungated)

    def _buckets_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        placements = self._buffers.placements
        return tuple(sorted({n for index in indices for n in placements[index].buckets}))

    def begin_step(self) -> None:
        """Begins a step in the calling thread: other threads' reads wait for `end_step`."""
        with self.arriving:
            self._stepping_thread = threading.current_thread()
            self._streams.readers.add(self._streams.current())
            for reader in self._readers:
                reader.watch()

    def end_step(self) -> None:
        """Lets other threads complete buckets again, also after a step that raised. Idempotent."""
        if self._stepping_thread is None:
            return
        with self.arriving:
            self._stepping_thread = None
            self._step_ended.notify_all()

    def expect(self, *, early: bool) -> None:
        """Posts receives of all-gathers, so that other ranks' shards may arrive. Does not block.

        Args:
            early: True means the receives of all early buckets, for the backward that steps them.
                False means all other buckets: the first few now, one more with each `launch`.
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
        """Launches the all-gather of bucket `number`, which was stepped. Does not block."""
        bucket = self._buffers.buckets[number]
        self._unexpected.pop(number, None)
        work = self._exchange.launch_gather(bucket)
        if not work.is_done:
            # An early bucket becomes pending when the step ends: backward reads its old values.
            (self._staged if bucket.role.is_staged else self.pending)[number] = work
        self._expect_next(1)

    def close_gates(self) -> None:
        """Ends the step: modules that read pending buckets wait at their next read.

        Blocks until `ungatable` buckets are complete, since their reads cannot be made to wait.
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
        """Blocks until buckets hold the new parameters. Local, idempotent, thread-safe.

        While another thread steps, it first blocks until that step has ended.

        Args:
            numbers: Bucket numbers. None means all buckets.
            reason: What forces the wait, for the timeline.

        Raises:
            RuntimeError: What the backend raises if a rank has failed or the timeout has passed.
                The buckets stay pending then, so that a later read raises again. Also if the
                stepping thread has ended within its step.
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
                "Some parameters have taken the last step and others have not. Load a checkpoint."
                f" Thread {thread.name} ended within optimizer.step(), and its exception says why."
                f" Thread {threading.current_thread().name} has read parameters since."
            )

    def _wait(self, number: int, work: Work, reason: str) -> None:
        with self._waiting(reason):
            work.wait()
        if self._on_arrival is not None:
            self._on_arrival(number)
        # Other streams will read the bucket without a gate, and the stepping stream will free and
        # overwrite what was gathered. Both must come after this stream's wait.
        self._streams.lead_readers()
        # The parameters have changed since an operation may have saved them for backward. With the
        # version bumped, autograd raises then instead of returning a wrong gradient.
        torch.autograd.graph.increment_version(self._parameters_of[number])
        del self.pending[number]
        for reader in self._readers_of[number]:
            if reader.is_free(self.pending):
                reader.open()

    def check_was_complete(self, index: int, name: str) -> None:
        """Refuses a gradient of parameter `index` if its new value has not arrived yet.

        Forward must have read the old value then.

        Raises:
            RuntimeError: If a bucket that holds the parameter is pending.
        """
        if not self.pending.keys().isdisjoint(self._buffers.placements[index].buckets):
            raise RuntimeError(
                f"A gradient arrived for '{name}' although its new value was still being gathered."
                " Read the parameter as an attribute of its module, or call"
                " strategy.complete_parameters() before reading it; exchange modules before"
                " training_step. Forward read the old value through a reference that"
                " strategy='dear' cannot see: a compiled graph, a tensor kept outside the module,"
                " or a module that was put into the model in mid-step."
            )

    @property
    def is_idle(self) -> bool:
        """Whether no bucket is pending and no thread steps."""
        return not self.pending and self._stepping_thread is None

    def detach(self) -> None:
        """Removes hooks and gates. Does not wait: buckets that are pending keep old values."""
        self.end_step()
        for reader in self._readers:
            reader.open()
        # Breaks a reference cycle, so that this object and the threads below it end at once.
        self._readers.clear()
        self._readers_of = [[] for _ in self._readers_of]


class _Reader:
    """Makes one module wait for the buckets that it reads, before its forward and at its gate.

    This object is the forward pre-hook. It is copied and pickled as a hook that does nothing, so
    that a copy of the module (an EMA's) waits for nothing and takes no process group along.

    Args:
        gatherer: Completes the buckets.
        module: The module.
        numbers: Numbers of the buckets that the module reads.
        name: Name of the module, for the timeline.

    Attributes:
        numbers: Same as the argument.
        is_free: Returns whether none of the given bucket numbers is in `numbers`.
    """

    def __init__(
        self, gatherer: ParameterGatherer, module: Module, numbers: tuple[int, ...], name: str
    ) -> None:
        self._gatherer, self._module = gatherer, module
        self.numbers, self._name = numbers, name
        self.is_free = frozenset(numbers).isdisjoint
        self._gate = ModuleGate(module) if has_gate(module) else None

    def watch(self) -> None:
        """Adds the forward pre-hook, in front of others, until `open`."""
        # Written into the dict: TorchScript's modules have no method to register a hook, and a
        # module with hooks cannot be scripted, so that the hook is there only while it may wait.
        hooks: Any = getattr(self._module, _PRE_HOOKS)
        hooks[id(self)] = self
        if len(hooks) > 1:
            hooks.move_to_end(id(self), last=False)

    def close(self) -> None:
        """Closes the module's gate, if it has one, so that reads of its parameters wait, too."""
        if self._gate is not None:
            self._gate.close(self._wait)

    def open(self) -> None:
        """Removes the pre-hook and opens the gate: the module reads and runs without a wait."""
        if self._gate is not None:
            self._gate.open()
        getattr(self._module, _PRE_HOOKS).pop(id(self), None)

    def __call__(self, module: Module, args: Any) -> None:
        """Waits before the module's forward."""
        if not self._gatherer.is_idle:
            self._wait()

    def _wait(self) -> None:
        self._gatherer.complete(self.numbers, self._name)

    def __reduce__(self) -> Any:
        return partial, (_wait_for_nothing,)


def _wait_for_nothing(module: Module, args: Any) -> None:
    """Forward pre-hook of a copied module."""
