"""Collectives for parameters on a device, whose messages travel through the host's memory.

`StagedCollectives` copies what travels into pinned host memory, hands it to the collectives of the
host (gloo, in one hop or two), and copies what arrives to the device. This is one bucket's way:

    training thread   launches the copy down, and the host's collective; goes on at once
    launching thread  waits until the copy down has ended, then sends
    arrivals thread   waits for the messages, sums on the host, launches the copy up
    `Work.wait`       blocks the host until the copy up is launched, and the stream until it ended

So in backward the training thread waits neither for the device nor for other ranks. Sums have the
bits of gloo, since gloo's own code makes them. Of n bytes a training step copies n and this rank's
shard down, and n up, whatever the number of ranks.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives import background, gloo, launch_log, shards
from lightning_dear.collectives.streams import Pairs, Streams
from lightning_dear.collectives.work import Begun, Collectives, Encode, SplitTensor, Work

_SECONDS_BETWEEN_LOOKS = 1.0
"""How often a wait asks whether a rank has failed."""

_MOST_PINNED = 0.5
"""Share of a host's memory above which pinned memory is warned of."""


def _of_host(name: str) -> Any:
    """Returns a property that stands for what the host's collectives have as `name`."""
    read = attrgetter(f"_host.{name}")
    return property(read, lambda self, value: setattr(self._host, name, value))


class StagedCollectives(Collectives):
    """Sends tensors of a device through host memory; see this module's docstring.

    Tensors that lie on the host already, such as flags, go straight to the host's collectives.

    Each half of each optimizer has a thread of its own that waits for arrivals, in the order in
    which all ranks launch them. With one thread for two optimizers ranks could wait for each other
    without end, since ranks may launch the buckets of two optimizers in another order.

    A bucket has one pinned buffer of its size, made once. The gather half uses it after the reduce
    half has ended, and the next reduce half after that. A second one receives gradients. Messages
    of no bucket, such as the gradient norm, get memory for one launch.

    Args:
        host: Collectives of the host. Their `calls` are replaced.
        streams: Streams of the parameters' device.
    """

    wait_blocks_host = matches_by_tag = True
    # Lengths would be known on the device only.
    has_variable_lengths = False

    def __init__(self, host: gloo.PairwiseCollectives, streams: Streams) -> None:
        self._host = host
        self._calls = _SendsBehindCopies(host.calls)
        groups = host.reduce_group, host.gather_group, host.object_group
        super().__init__(*groups, host.world, host.calls, streams)
        host.calls = self._calls
        self.hops, self.log = host.hops, host.log
        # (tag, use, dtype, elements) -> pinned memory of a bucket.
        self._pinned: dict[tuple[int, str, torch.dtype, int], Tensor] = {}
        # Tag -> the part of that memory that receives the bucket's gradients.
        self._scratch: dict[int, Tensor] = {}
        # (half, tag) -> the bucket's last message. Removed where it has been waited for.
        self._under_way: dict[tuple[str, int], Work] = {}
        # (half, number of the optimizer) -> the thread that waits for arrivals.
        self._arrivals: dict[tuple[str, int], background.Background] = {}

    # --- what the host's collectives know ---------------------------------------------------------

    # The ledger counts what the host's collectives send, and a failed wait of theirs is this one's.
    ledger, has_given_up = map(_of_host, ("ledger", "has_given_up"))
    favors_all_reduce = _of_host("favors_all_reduce")
    expect_max, end_training = map(_of_host, ("expect_max", "end_training"))

    @override
    def forget_groups(self) -> None:
        super().forget_groups()
        self._host.forget_groups()

    # --- memory -----------------------------------------------------------------------------------

    @override
    def check_memory(self, parameters: Iterable[Tensor]) -> None:
        # A buffer for gradients and parameters, and one for gradients that are received.
        pinned, hosts = 2 * sum(one.nbytes for one in parameters), self.world.hosts
        ranks = hosts.count(hosts[self.world.rank]) if hosts else 1
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if ranks * pinned > _MOST_PINNED * there:
            gib = 1 << 30
            warnings.warn(
                f"This host has {there / gib:.1f} GiB of memory, and each of its {ranks} ranks"
                f" needs {pinned / gib:.1f} GiB for messages. Use fewer ranks a host, or"
                " process_group_backend='nccl', which sends from the device.",
                stacklevel=2,
            )

    @override
    def begin_plan(self, first_tag: int) -> None:
        optimizer = _optimizer(first_tag)
        self._pinned = {k: one for k, one in self._pinned.items() if _optimizer(k[0]) != optimizer}
        self._scratch = {k: one for k, one in self._scratch.items() if _optimizer(k) != optimizer}

    def _like(self, tensor: Tensor, tag: int, use: str = "whole") -> Tensor:
        """Returns pinned memory like `tensor`: for a bucket always the same, else new.

        Args:
            tensor: Tensor on the device.
            tag: Tag of the message, which names its bucket.
            use: What the memory is for. "whole" is that of both halves.
        """
        memory = self._memory(tensor.numel(), tensor.dtype, tag, use)
        # Buckets are flat already. A call of torch takes 2 us.
        return memory if tensor.ndim == 1 else memory.view_as(tensor)

    def _memory(self, elements: int, dtype: torch.dtype, tag: int, use: str) -> Tensor:
        if tag >= launch_log.BUCKET_TAGS:
            return self.streams.host_memory(elements, dtype)
        key = tag, use, dtype, elements
        if key not in self._pinned:
            self._pinned[key] = self.streams.host_memory(elements, dtype)
        return self._pinned[key]

    # --- one launch -------------------------------------------------------------------------------

    def _stage(
        self,
        lane: str,
        tag: int,
        down: tuple[Tensor, Tensor] | None,
        launch: Callable[[], Work],
        up: Pairs,
    ) -> Work:
        """Copies down, launches the host's collective, and returns a work that copies up.

        Does not block, except if a message still uses the bucket's memory: it waits for that one.

        A thread waits for the copy down and for the messages. Then it starts a bucket's copies up:
        all kernels that were launched before this call have ended by then, since the copy down
        came after them. Other messages may have no copy down. The stream that waits copies them up.

        Args:
            lane: Half of the exchange, "reduce_scatter" or "all_gather".
            tag: Tag of the message, which names its bucket.
            down: Tensor on the device, and the memory that is sent. None means that `launch` sends
                nothing that must be copied.
            launch: Launches the host's collective.
            up: Tensors on the device, and the memory that is received.
        """
        for half in ("reduce_scatter", "all_gather"):
            if (earlier := self._under_way.get((half, tag))) is not None:
                # Such as parameters that no forward has read: they are still being gathered.
                earlier.wait()
        copied = _nothing if down is None else self.streams.copy_down(*down)
        work = launch() if down is None else self._calls.behind(copied, down[1], launch)
        is_bucket = tag < launch_log.BUCKET_TAGS

        def arrive() -> Callable[[], None]:
            # First, to raise what a copy raises: nothing is sent then, and nothing may arrive.
            copied()
            work.wait()
            return self.streams.copy_up(up) if is_bucket else partial(_copy_up, up)

        key = lane, _optimizer(tag) if is_bucket else -1
        if key not in self._arrivals:
            self._arrivals[key] = background.Background(f"dear {lane}, arrivals, {key[1]}")
        arrival = self._arrivals[key].submit(arrive)
        # What `wait` calls is not observed: a timeline's thread would call it, too.
        seen: Any = (lambda: arrival.result()()) if is_bucket else arrival.result
        self.observed(lane, f"bucket {tag}" if is_bucket else f"tag {tag}", seen)
        # The stream must wait in `Work.wait`, whichever thread waits for the arrival.
        staged = Work(partial(self._await, arrival), lambda: arrival.result()())
        if is_bucket:
            self._under_way[lane, tag] = staged
        return staged.then(partial(self._forget, lane, tag, down))

    def _await(self, arrival: Future[Any]) -> None:
        """Blocks until `arrival` is done, unless a rank has failed. Raises what it has raised."""
        while not wait([arrival], _SECONDS_BETWEEN_LOOKS).done:
            # The thread may still wait for a silent rank, for a whole timeout.
            if self.has_given_up:
                raise RuntimeError("A rank failed. Read its error: its message is not waited for.")
        arrival.result()

    def _forget(self, lane: str, tag: int, sent: object) -> None:
        """Ends a bucket's message, of which `sent` was held until now."""
        self._under_way.pop((lane, tag), None)

    # --- both halves ------------------------------------------------------------------------------

    @override
    def expect_reduce_scatter(self, received: Tensor, tag: int) -> None:
        # The device has no scratch, so that `received` does not tell the size. The bucket's first
        # launch makes the memory.
        if (scratch := self._scratch.get(tag)) is not None:
            self._host.expect_reduce_scatter(scratch, tag)

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        whole = self._like(buffer, tag)
        elements = self._host.scratch_numel(buffer.numel())
        scratch = self._memory(elements, buffer.dtype, tag, "received")
        if tag < launch_log.BUCKET_TAGS:
            self._scratch[tag] = scratch
        mean = shards.shard_of(whole, self.world.rank, self.world.size)
        if out.dtype != mean.dtype:
            mean = self._like(out, tag, "mean")
        launch = partial(self._host.launch_reduce_scatter, whole, scratch, mean, tag)
        return self._stage("reduce_scatter", tag, (buffer, whole), launch, [(out, mean)])

    @override
    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, tag: int
    ) -> Begun:
        whole, wires = self._like(buffer, tag), self._like(incoming, tag, "wires")
        elements = self._host.scratch_numel(buffer.numel())
        scratch = self._memory(elements, buffer.dtype, tag, "received")

        def encode_there(sums: Tensor) -> Tensor:
            with self.streams.beside():
                there = buffer.new_empty(sums.shape, dtype=sums.dtype)
                rows = encode(there.copy_(sums, non_blocking=True))
                outgoing = self._like(rows, tag, "rows")
                copied = self.streams.copy_down(rows, outgoing)
            copied()
            return outgoing

        ends: list[Callable[[], object]] = []

        def launch() -> Work:
            work, begun = self._host.launch_sums_of_host(whole, scratch, encode_there, wires, tag)
            ends.append(begun)
            return work

        def end() -> None:
            # Otherwise a copy that fails would leave this waiting for ranks that wait for it.
            self._calls.wait_for(whole)
            # Then the host has waited for the encoding, so that no stream has to.
            ends[0]()

        up = [(incoming, wires)]
        return self._stage("reduce_scatter", tag, (buffer, whole), launch, up), end

    @override
    def expect_all_gather(self, buffer: Tensor, tag: int) -> None:
        # Other ranks' shards must not arrive in gradients that are still being sent. A gather that
        # is still under way does not matter: the next reduce half waits for it.
        if tag < launch_log.BUCKET_TAGS and ("reduce_scatter", tag) not in self._under_way:
            self._host.expect_all_gather(self._like(buffer, tag), tag)

    @override
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        if not self.streams.holds(buffer):
            return self._host.launch_all_gather(buffer, tag)
        whole = self._like(buffer, tag)
        size = buffer.numel() // self.world.size
        ends = [self.world.rank * size, (self.world.rank + 1) * size]
        # The shards before this rank's, this rank's, and those after it.
        before, own, after = zip(buffer.tensor_split(ends), whole.tensor_split(ends), strict=True)
        launch = partial(self._host.launch_all_gather, whole, tag)
        return self._stage("all_gather", tag, own, launch, [before, after])

    # --- other messages ---------------------------------------------------------------------------

    @override
    def launch_all_reduce(self, buffer: Tensor, tag: int) -> Work:
        return self._in_place("reduce_scatter", self._host.launch_all_reduce, buffer, tag)

    @override
    def launch_gather_of_host(self, buffer: Tensor, tag: int) -> Work:
        return self._in_place("all_gather", self._host.launch_gather_of_host, buffer, tag)

    def _in_place(
        self, lane: str, launch: Callable[[Tensor, int], Work], buffer: Tensor, tag: int
    ) -> Work:
        pair = buffer, self._like(buffer, tag)
        return self._stage(lane, tag, pair, partial(launch, pair[1], tag), [pair])

    @override
    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, tag: int) -> Work:
        pair, outgoing = (incoming, self._like(incoming, tag, "rows")), self._like(rows, tag)
        launch = partial(self._host.launch_all_to_all, outgoing, pair[1], tag)
        return self._stage("reduce_scatter", tag, (rows, outgoing), launch, [pair])

    @override
    def launch_parts(self, outgoing: SplitTensor, incoming: SplitTensor, tag: int) -> Work:
        (parts, sizes), (arriving, their_sizes) = outgoing, incoming
        pair, sent = (arriving, self._like(arriving, tag, "rows")), self._like(parts, tag)
        launch = partial(self._host.launch_parts, (sent, sizes), (pair[1], their_sizes), tag)
        return self._stage("all_gather", tag, (parts, sent), launch, [pair])

    @override
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        if not self.streams.holds(flags):
            return self._host.launch_max(flags, tag)
        # Blocks for the device: only calls that wait at once launch flags that lie there.
        pair = flags, self.streams.host_memory(flags.numel(), flags.dtype)
        self.streams.copy_down(*pair)()
        return self._host.launch_max(pair[1], tag).then(partial(_copy_up, [pair]))

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        tag, is_first = launch_log.BUFFERS_TAG + index, self.world.rank == 0
        pair = buffer, self._like(buffer, tag)
        launch = partial(self._host.launch_broadcast, pair[1], index)
        down, up = (pair, []) if is_first else (None, [pair])
        return self._stage("all_gather", tag, down, launch, up)


def _optimizer(tag: int) -> int:
    """Returns the number of the optimizer whose bucket has `tag`."""
    return tag // launch_log.TAGS_OF_ONE_OPTIMIZER


def _nothing() -> None:
    return None


def _copy_up(pairs: Pairs) -> None:
    """Copies host memory to the device, on the current stream."""
    for tensor, host in pairs:
        tensor.copy_(host, non_blocking=True)


class _SendsBehindCopies:
    """`torch.distributed`, whose sends wait until the memory that they read has been filled.

    One thread makes all calls of `behind`, in the order of their launches, as gloo's all-reduces
    must be on all ranks. So the caller goes on at once. Sends of other threads, such as those of a
    second hop, wait in their own thread.

    Args:
        calls: `torch.distributed`, or a stand-in for it.
    """

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self._launcher = background.Background("dear-launches")
        # Address of pinned memory -> function that blocks until the last copy into it has ended.
        self._copied: dict[int, Callable[[], None]] = {}
        # In a thread that is within `behind`: its `copied`.
        self._present = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def behind(
        self, copied: Callable[[], None], memory: Tensor, launch: Callable[[], Work]
    ) -> Work:
        """Calls `launch`, and returns its work. A thread makes its sends, after `copied`.

        Until the next copy into `memory`, sends of it by other threads call `copied` first.

        Args:
            copied: Blocks until `memory` is filled.
            memory: Memory that is sent.
            launch: Called at once, in this thread.
        """
        self._copied[memory.untyped_storage().data_ptr()] = copied
        self._present.copied = copied
        try:
            return launch()
        finally:
            self._present.copied = None

    def isend(self, tensor: Tensor, **options: Any) -> Any:
        """Like `torch.distributed.isend`. What it raises is raised by the work's `wait`."""
        return self._call(partial(self._calls.isend, tensor, **options), tensor)

    def all_reduce(self, tensor: Tensor, **options: Any) -> Any:
        """Like `torch.distributed.all_reduce`; see `isend`."""
        return self._call(partial(self._calls.all_reduce, tensor, **options), tensor)

    def _call(self, call: Callable[[], Any], tensor: Tensor) -> Any:
        if (copied := getattr(self._present, "copied", None)) is not None:
            launched = self._launcher.submit(partial(_after, copied, call))
            # torch's work of a call that a thread makes.
            return SimpleNamespace(wait=lambda *limit: launched.result().wait(*limit))
        return _after(partial(self.wait_for, tensor), call)

    def wait_for(self, memory: Tensor) -> None:
        """Blocks until the last copy into `memory` has ended. Raises what it has raised."""
        self._copied.get(memory.untyped_storage().data_ptr(), _nothing)()


def _after(copied: Callable[[], None], call: Callable[[], Any]) -> Any:
    copied()
    return call()
