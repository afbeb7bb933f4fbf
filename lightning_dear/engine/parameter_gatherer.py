"""The gather half: all-gathers are launched in the step, and waited for where parameters are read.

A bucket is *pending* from the launch of its all-gather until a thread has waited for it. It is
*complete* when its parameters hold the new values.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear import private_names
from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import Work
from lightning_dear.engine import batch_weights, gate
from lightning_dear.engine.read_order import Ungated
from lightning_dear.exchange import Exchange

_NUM_EXPECTED_AHEAD = 4
"""Number of buckets whose receives are posted when the step begins. After that, each `launch` posts
one more. Posting the receives of all buckets first would delay the first all-gather."""

_SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds after which a thread that waits for the end of a step checks, again and again, whether
the stepping thread is still alive."""

_PRE_HOOKS = private_names.FORWARD_PRE_HOOKS.name


class ParameterGatherer:
    """Launches the gathers of stepped buckets, and makes reads of parameters wait for them.

    The step calls `launch`. Modules' gates and forward pre-hooks call `complete`, and so does
    `complete_parameters` of the strategy. This class does not know how a bucket was stepped. Code
    that steps buckets itself and at once blocks until they have arrived does not need it:
    `Exchange.launch_gather` is enough.

    `complete` is a local wait. It launches no collective, so any rank may call it alone at any
    time. Between `begin_step` and `end_step` only the stepping thread completes buckets. Other
    threads that call `complete` then wait for the end of the step.

    Args:
        module: Module whose parameters are gathered. Mutated: it gets gates and forward pre-hooks.
        buffers: The buckets, and where each parameter lies in them.
        exchange: Launches the all-gathers.
        ungated: Parameter index -> modules whose forward must wait, since they read the parameter
            through a reference that no gate sees; see `ForwardRecorder.ungated`.
        waiting: Reason -> context that is entered around every wait.
        on_arrival: Called with a bucket number once the bucket has arrived, by the thread that
            waits for it. With gathered gradients it steps the bucket. It is not called for a bucket
            of which nothing is gathered. None means that nothing is called.

    Attributes:
        pending: Bucket number -> work of its all-gather, until it was waited for; read-only.
        entry: Numbers of the buckets that forward reads outside any module. The caller completes
            them before forward.
        ungatable: Numbers of the buckets with parameters of modules that cannot have a gate, see
            `has_gate`. They are completed at the end of the step.
        arriving: Lock that a thread holds while it completes buckets.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: FlatBuffers,
        exchange: Exchange,
        ungated: Ungated,
        waiting: batch_weights.Waiting,
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
        self._parameters_of: list[list[Tensor]] = [[] for _ in buffers.buckets]
        for placement in buffers.placements:
            for number in placement.buckets:
                self._parameters_of[number].append(placement.parameter)
        # At world size 1 without a compressor nothing travels, and modules get no hooks or gates.
        self._is_gated = exchange.collectives.world.size > 1 or bool(exchange.coded)
        self._find_readers(module, ungated)
        former = ((one.former, one) for one in buffers.placements)
        self._shared = [(memory, one) for memory, one in former if memory is not None]

    def _find_readers(self, module: nn.Module, ungated: Ungated) -> None:
        """Makes a `_Reader` for each module that owns parameters, or reads some without a gate.

        Also sets `entry` and `ungatable`. Hooks are registered later, by `begin_step`.
        """
        trained = [placement.parameter for placement in self._buffers.placements]
        found = gate.owners(module, trained) if self._is_gated else {}
        held = {part: self._buckets_of(own.values()) for part, own in found.items()}
        readers = {part: set(numbers) for part, numbers in held.items() if gate.has_gate(part)}
        self.ungatable = tuple({n for part in held if not gate.has_gate(part) for n in held[part]})
        self.entry = self._buckets_of(i for i, users in ungated.items() if None in users)
        for index, users in ungated.items():
            for user in users:
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

    def follow(self, module: nn.Module, ungated: Ungated) -> None:
        """Looks anew for the modules that must wait, since modules were replaced. Local.

        No bucket may be pending: its parameters would be read without a wait.

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
        """Begins a step in the calling thread.

        In other threads, forwards of modules that read parameters wait for `end_step`. Reads of
        parameters outside forwards do not wait: gates are closed only at the end of the step.
        """
        with self.arriving:
            self._stepping_thread = threading.current_thread()
            self._streams.readers.add(self._streams.current())
            for reader in self._readers:
                reader.watch()

    def end_step(self) -> None:
        """Lets other threads complete buckets again, also after a step that raised.

        Does nothing if no step has begun. Idempotent.
        """
        if self._stepping_thread is None:
            return
        with self.arriving:
            self._stepping_thread = None
            self._step_ended.notify_all()

    def expect(self) -> None:
        """On gloo, posts receives of all-gathers, so that other ranks' shards may arrive at once.

        It posts those of the first few buckets now, and those of one more with each `launch`. Does
        not block. An all-reduced bucket has no receives.
        """
        self._unexpected = {
            bucket.number: bucket
            for bucket in self._buffers.buckets
            if not bucket.role.is_all_reduced
        }
        self._expect_next(_NUM_EXPECTED_AHEAD)

    def _expect_next(self, count: int) -> None:
        for number in tuple(islice(self._unexpected, count)):
            self._exchange.expect_gather(self._unexpected.pop(number))

    def launch(self, number: int) -> None:
        """Launches the all-gather of bucket `number`, which was stepped. Does not block.

        Also posts the receives of one more bucket, see `expect`.
        """
        bucket = self._buffers.buckets[number]
        self._unexpected.pop(number, None)
        work = self._exchange.launch_gather(bucket)
        if not work.is_done:
            self.pending[number] = work
        self._expect_next(1)

    def close_gates(self) -> None:
        """Ends the step: modules that read pending buckets wait at their next read.

        Blocks until `ungatable` buckets are complete, since reads of their parameters cannot be
        made to wait.
        """
        self.copy_to_shared(range(len(self._buffers.buckets)))
        with self.arriving:
            for reader in self._readers:
                if reader.is_free(self.pending):
                    reader.open()
                else:
                    reader.close()
            self.end_step()
        self.complete(self.ungatable, "TorchScript")

    def complete(self, numbers: Iterable[int] | None = None, reason: str = "read") -> None:
        """Blocks until buckets hold the new parameters. Local, idempotent, thread-safe.

        While another thread steps, it first blocks until that step has ended. Buckets that are not
        pending need no wait.

        Args:
            numbers: Bucket numbers. None means all pending buckets.
            reason: What forces the wait, for the timeline.

        Raises:
            RuntimeError: What the backend raises if a rank has failed or the timeout has passed.
                The bucket stays pending then, so that a later read raises again. Also if the
                stepping thread has died within its step.
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
        # An operation may have saved the old values for backward. With the version bumped, autograd
        # raises in its backward, instead of computing a wrong gradient from the new values.
        torch.autograd.graph.increment_version(self._parameters_of[number])
        del self.pending[number]
        self.copy_to_shared([number])
        for reader in self._readers_of[number]:
            if reader.is_free(self.pending):
                reader.open()

    def copy_to_shared(self, numbers: Iterable[int]) -> None:
        """Copies parameters into the shared memory that they had before. Local.

        Processes that read that memory meanwhile may see values of two steps.

        Args:
            numbers: Buckets with new values. A parameter is copied once none of its own is pending.
        """
        for memory, one in self._shared:
            is_new = not set(numbers).isdisjoint(one.buckets)
            if is_new and self.pending.keys().isdisjoint(one.buckets):
                memory.copy_(one.view)

    def check_was_complete(self, index: int, name: str) -> None:
        """Raises if a gradient of parameter `index` was produced while its bucket was pending.

        Then forward has read the parameter without waiting for it, and so its old value. To be
        called when backward has produced the gradient.

        Args:
            index: Index of the parameter.
            name: Its name, for the message.

        Raises:
            RuntimeError: If a bucket that holds the parameter is pending.
        """
        if not self.pending.keys().isdisjoint(self._buffers.placements[index].buckets):
            raise RuntimeError(
                f"A gradient arrived for '{name}' although its new value was still being gathered."
                " Read the parameter as an attribute of its module, or call"
                " strategy.complete_parameters() before reading it; replace modules before"
                " training_step. Forward read the old value through a reference that"
                " strategy='dear' cannot see: a compiled graph, a tensor kept outside the module,"
                " or a module that was put into the model in mid-step."
            )

    @property
    def is_idle(self) -> bool:
        """Whether every launched gather was waited for, and no thread steps."""
        return not self.pending and self._stepping_thread is None

    def detach(self) -> None:
        """Removes forward pre-hooks and gates, so that reads no longer wait. Does not block.

        To be called when all buckets are complete. Parameters of buckets that are still pending may
        have old values when they are read. They are no longer waited for at a read.
        """
        self.end_step()
        for reader in self._readers:
            reader.open()
        # Breaks a reference cycle, so that this object is freed at once. Its exchange and the
        # threads of that are then freed, too.
        self._readers.clear()
        self._readers_of = [[] for _ in self._readers_of]


class _Reader:
    """Makes one module wait for the buckets that it reads, before its forward and at its gate.

    This object is the forward pre-hook. It is copied and pickled as a hook that does nothing, so
    that a copy of the module (an EMA's) waits for nothing and takes no process group along.

    Args:
        gatherer: Completes the buckets.
        module: The module, which may have no gate (`has_gate`). Then only its forward waits.
        numbers: Numbers of the buckets that the module reads.
        name: Name of the module, for the timeline.

    Attributes:
        numbers: Same as the argument.
        is_free: Function: bucket numbers -> whether none of them is in `numbers`. With the pending
            buckets it tells whether the module need not wait.
    """

    def __init__(
        self, gatherer: ParameterGatherer, module: nn.Module, numbers: tuple[int, ...], name: str
    ) -> None:
        self._gatherer, self._module = gatherer, module
        self.numbers, self._name = numbers, name
        self.is_free = frozenset(numbers).isdisjoint
        self._gate = gate.ModuleGate(module) if gate.has_gate(module) else None

    def watch(self) -> None:
        """Adds the forward pre-hook, in front of others, until `open`."""
        # Written into the dict of hooks, since TorchScript's modules have no method to register a
        # hook. It is there only while it may have to wait: a module with hooks cannot be scripted.
        hooks: Any = getattr(self._module, _PRE_HOOKS)
        hooks[id(self)] = self
        if len(hooks) > 1:
            hooks.move_to_end(id(self), last=False)

    def close(self) -> None:
        """Closes the module's gate, so that reads of its parameters outside its forward wait, too.

        Does nothing if the module has no gate.
        """
        if self._gate is not None:
            self._gate.close(self._wait)

    def open(self) -> None:
        """Removes the pre-hook and opens the gate: the module reads and runs without a wait.

        Idempotent.
        """
        if self._gate is not None:
            self._gate.open()
        getattr(self._module, _PRE_HOOKS).pop(id(self), None)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Blocks before the module's forward until its buckets are complete.

        If another thread steps, it first waits for the end of that step. Does nothing if no bucket
        is pending and no thread steps.
        """
        if not self._gatherer.is_idle:
            self._wait()

    def _wait(self) -> None:
        self._gatherer.complete(self.numbers, self._name)

    def __reduce__(self) -> Any:
        return partial, (_wait_for_nothing,)


def _wait_for_nothing(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a copied module, in place of a `_Reader`. Does nothing."""
