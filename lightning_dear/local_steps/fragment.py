"""A fragment: some of the parameters, their anchor, and the exchange that moves the anchor."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from lightning_dear.bucket import Role, allocate
from lightning_dear.checkpoint.optimizer_state import ShardedState, gathered, sharded_state
from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.checkpoint.residuals import Residuals
from lightning_dear.collectives.work import Collectives, Work, uncounted
from lightning_dear.engine.active_plan import spec_of
from lightning_dear.engine.bucket_round import USED, BucketRound
from lightning_dear.engine.notes import LaunchDigest, Note, Notes, Signal, Sums
from lightning_dear.engine.training import Training
from lightning_dear.exchange import Traffic, base, new_exchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps.schedule import LocalSteps
from lightning_dear.optimizers.masters import MASTER_KEY, without_masters
from lightning_dear.optimizers.sharded import ShardedOptimizer, inner_step
from lightning_dear.planning.fusion import MIB, FusionPlanner, ThresholdFusion
from lightning_dear.planning.plan import MAX_BUCKETS

_NUM_BUCKETS, _LEAST_MB = 8, 1 / 16
"""Buckets of a fragment by default, and the least MiB of each. On a slow, long link large messages
arrive late; see recipes/local_steps/speed."""

_CHUNK = 1 << 20
"""Most elements that `Fragment.swap` copies at once, so that it needs little memory."""


class Value(NamedTuple):
    """A replica's own values of a tensor, or of a range of its elements in storage order.

    Attributes:
        tensor: The values. An fp32 master in the place of a 16-bit parameter.
        start: First element of the range. None means the whole tensor, in its shape.
    """

    tensor: Tensor
    start: int | None = None


Replica = Callable[[], Mapping[str, Sequence[Value]]]
"""Returns the replica's own values of every tensor of a fragment, by the tensor's name."""


@dataclass(frozen=True)
class OuterOptions:
    """What all fragments of an outer half share.

    Attributes:
        training: The inner half's `Training`.
        steps: Options of local steps.
        collectives: Launches the messages, over all ranks.
        exchange: Compressor of the messages.
        fusion: Planner of a fragment's buckets.
        signal: Carries each rank's wish to stop. Hears of wishes at a merge.
        seed: Seed of random numbers of compressors, the same on all ranks.
    """

    training: Training
    steps: LocalSteps
    collectives: Collectives
    exchange: ExchangeOptions
    fusion: FusionPlanner
    signal: Signal
    seed: int


class Fragment:
    """Some parameters: their anchor, its way to the other ranks and back, and the outer optimizer.

    An exchange goes through `send`, `step` and `merge`. What the outer optimizer has stepped, and
    what has arrived, waits beside the anchor. So only `merge`, which runs after the same step on
    all ranks, changes what other code can see.

        send (anchor - replica) / world size                   `send`
        reduce-scatter: this rank's shard of the sum, which
        is the mean pseudo-gradient                            (meanwhile replicas train on)
        outer optimizer steps this rank's shard                `step`
        all-gather of the stepped shards                       (meanwhile replicas train on)
        anchor <- gathered;
        replica <- (1 - mix) anchor + mix replica              `merge`

    If ranks count by samples, the factor is this rank's part of them. Ranks exchange their numbers
    first, and `launch` sends once these have arrived. A shadow is a tensor of the anchor, as a
    parameter of the outer optimizer.

    If a rank's values are not finite when they are sent, all ranks leave this exchange out: anchor,
    outer optimizer and replicas stay as they are.

    Args:
        replica: Returns the replica's values. Read by `send`, mutated by `merge` and `swap`.
        tensors: Name -> first value of the anchor, equal on all ranks. Copied, in fp32 at least.
        options: What all fragments share.
        number: Number of the fragment, unique among those that share process groups.
        notes: Outer optimizer -> more notes that travel with each exchange.
        keeps_own: Whether `merge` leaves the replica as it is, whatever `mix` is.

    Attributes:
        names: Names of the tensors.
        number: Same as the argument.
        keeps_own: Same as the argument.
        anchor: Name -> the anchor's values, in the shape of the tensor. All ranks have the same.
        stepper: This rank's shard of the anchor, and the outer optimizer with its state.
        round: Reduces the pseudo-gradients.
        sent_at: Step after which the fragment was sent last; to be assigned to. None means that it
            is not under way.
        is_stepped: Whether the outer optimizer has stepped in the exchange that is under way.
        stop: Note: the largest wish to stop of any rank.
        sums: Note: adds up figures. If numbers travel with an exchange, `norms` are measured.
        norms: Norm of this rank's pseudo-gradient, times its weight in the mean, in the last
            exchange; and the square of the norm of its shard of the mean.
    """

    def __init__(
        self,
        replica: Replica,
        tensors: Mapping[str, Tensor],
        options: OuterOptions,
        number: int,
        notes: Callable[[optim.Optimizer], Sequence[Note]] = lambda _: (),
        *,
        keeps_own: bool = False,
    ) -> None:
        self.names, self._replica, self._options = [*tensors], replica, options
        self.keeps_own, self.number = keeps_own, number
        self.sent_at: int | None = None
        self.stop, self._bad = Signal(), Signal()
        self.sums, self.norms = Sums(options.collectives.world), (0.0, 0.0)
        shadows = [_anchor_of(one) for one in tensors.values()]
        outer = options.steps.new_outer([*shadows])
        launches = LaunchDigest(options.collectives, number)
        own = *notes(outer), launches, self.stop, self._bad, self.sums
        self.stepper, self._notes = ShardedOptimizer(outer), Notes(own, blocks=True)
        self._build(shadows)
        self.anchor = dict(zip(self.names, (one.data for one in shadows), strict=True))
        # After the outer optimizer has stepped: its pieces and state, until the merge.
        self._stepped = self.stepper.shards
        self._gathers: Sequence[Work] = ()
        self.is_stepped = False
        self._free()

    def _build(self, shadows: list[nn.Parameter]) -> None:
        """Makes buffers, exchange, round and outer optimizer. Moves `shadows` into the buffers."""
        options, collectives = self._options, self._options.collectives
        pairs = [*zip(self.names, shadows, strict=True)]
        codecs = [options.exchange.codec_of(name, one.ndim) for name, one in pairs]
        specs = [
            spec_of(index, *one, codecs[index], index, len(pairs) - index)
            for index, one in enumerate(pairs)
        ]
        fusion = _in_buckets(options.fusion, sum(one.nbytes for one in specs))
        plan = replace(fusion.plan(specs, collectives.world.size), all_reduced=())
        # This rank's shard is a copy: the outer optimizer may step it before the merge.
        role_of = lambda bucket, dtype: Role.LAGGING  # noqa: E731
        where = collectives.world.rank, collectives.scratch_numel
        self._buffers = flat = allocate(plan, shadows, role_of, *where, keeps_gradients=True)
        traffic = Traffic(collectives, self.number * MAX_BUCKETS, flat, False, is_staged=True)
        of_buckets = [codecs[bucket.slices[0].tensor] for bucket in plan.buckets]
        self._exchange = new_exchange(options.exchange, of_buckets, traffic)
        waiting = partial(options.training.instruments.waiting, "reduce_scatter")
        how = self._exchange, self.names, self._notes, waiting
        self.round = BucketRound(flat, plan.reduce_order, *how)
        self.stepper.attach(flat, shadows)
        self.residuals = ResidualKeeper(self.stepper.optimizer, collectives, options.exchange)
        self.residuals.attach(self._exchange.coded, shadows, options.seed)

    # --- memory of messages -----------------------------------------------------------------------

    def _messages(self) -> Iterator[torch.UntypedStorage]:
        for bucket in self._buffers.buckets:
            yield bucket.gradients.untyped_storage()
            yield bucket.received.untyped_storage()

    def _free(self) -> None:
        """Frees the memory of messages, which is needed only while the fragment is under way."""
        self._sizes = [storage.nbytes() for storage in self._messages()]
        for storage in self._messages():
            # False once NumPy has seen the memory, as in codecs that select.
            if storage.resizable():
                storage.resize_(0)

    def _take(self) -> None:
        """Allocates the memory of messages again. What lies between tensors is 0."""
        for storage, size in zip(self._messages(), self._sizes, strict=True):
            if storage.nbytes() < size:
                storage.resize_(size)
        for bucket in self._buffers.buckets:
            bucket.gradients.zero_()

    # --- an exchange ------------------------------------------------------------------------------

    def _pairs(self, whole: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (a tensor of `whole` or a range of it, the replica's value), of one shape each."""
        own = self._replica()
        for name, one in zip(self.names, whole, strict=True):
            begin = one.storage_offset()
            for value, at in own[name]:
                yield (one if at is None else one.as_strided(value.shape, (1,), begin + at)), value

    @property
    def values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (part of the anchor, the replica's values of that part), of one shape each."""
        return self._pairs(self.anchor.values())

    @torch.no_grad()
    def send(self, sent_at: int, samples: float | None = None) -> bool:
        """Sends how far the replica has moved from the anchor. Collective. Does not block.

        Args:
            sent_at: Number of the step.
            samples: Number of samples by which this rank counts. None means that all ranks count
                alike.

        Returns:
            Whether the rank may go on with its replica: what it has sent is finite. What is not
            finite is merged by no rank. Buffers (`keeps_own`) are sent without it.
        """
        self.sent_at, rank = sent_at, self._options.collectives.world.rank
        self._take()
        messages = self._pairs(one.gradient for one in self._buffers.placements)
        for (anchor, value), (message, _) in zip(self.values, messages, strict=True):
            torch.sub(anchor, value, out=message)
            if self.keeps_own:
                # A mask may have inf in it, and inf - inf is nan.
                message.masked_fill_(anchor == value, 0.0)
        gradients = [one.gradients for one in self._buffers.buckets]
        largest = torch.stack([base.largest_of(one).double() for one in gradients])
        # Besides the notes in `step`, only here the host waits for a device.
        is_finite = bool(largest.isfinite().all())
        for one in () if is_finite else gradients:
            # Buffers may stay as they are for good. Then no later exchange would be merged.
            one.nan_to_num_(0.0, 0.0, 0.0) if self.keeps_own else one.zero_()
        if self.keeps_own and not is_finite:
            warnings.warn(
                f"Buffers of rank {rank} are not finite, among '{self.names[0]}' and"
                f" {len(self.names) - 1} more. The anchor keeps its own values in their place.",
                stacklevel=2,
            )
            is_finite = True
        self._bad.ask = partial(int, 0 if is_finite else min(rank, 254) + 1)
        # Now, and not in `launch`: until then other ranks may have made another number of steps.
        self._notes.say()
        weights = self.round.weights
        if samples is not None:
            weights.is_on = True
            weights.reset()
            weights.weigh(samples)
            self.round.launch_weights()
        self.launch()
        return is_finite

    def launch(self, *, blocks: bool = False) -> None:
        """Launches the messages of `send`, once an exchange.

        Args:
            blocks: Whether to wait for all ranks' samples. If not, nothing is launched until they
                are known.
        """
        was_launched, buckets = self.is_stepped or self.round.launched, self._buffers.buckets
        if was_launched or not (blocks or self.round.weights.is_known):
            return
        for bucket in buckets:
            bucket.gradients.mul_(self.round.weights.scale)
        self.norms = (norm_of(one.gradients for one in buckets) if self.sums.own else 0.0), 0.0
        self.round.watch(self.round.order)
        self.round.launch_all()
        self.round.launch_flags([USED] * len(self.names))

    @torch.no_grad()
    def step(self) -> None:
        """Steps the outer optimizer, and sends what it has stepped. Once an exchange.

        Blocks until all sums have arrived, see `BucketRound.is_complete`. When it is called may
        differ between ranks on gloo: other code does not see it.
        """
        if self.is_stepped:
            return
        self.launch(blocks=True)
        self.is_stepped = True
        self.round.finish(())
        self._exchange.note_used(self.round.used, keeps=True)
        if self._bad.heard:
            return
        self._exchange.check()
        if self.sums.own:
            self.norms = self.norms[0], norm_of(one.mean for one in self._buffers.buckets) ** 2
        stepper, before = self.stepper, self.stepper.shards
        stepper.set_gradients(self.round.used)
        # The optimizer steps a copy of its state, so that checkpoints have the last merge's.
        state = {
            parameter: {key: v.clone() if isinstance(v, Tensor) else v for key, v in own.items()}
            for parameter, own in before.state.items()
        }
        stepper.shards = replace(before, state=defaultdict(dict, state))
        with stepper.on_shards():
            inner_step(stepper.optimizer)
        stepper.clear_gradients()
        self._stepped, stepper.shards = stepper.shards, before
        self._gathers = [self._exchange.launch_gather(one) for one in self._buffers.buckets]
        # The exchange can only be merged now: checkpoints have its residuals.
        self._exchange.commit()

    @torch.no_grad()
    def merge(self, mix: float) -> int | None:
        """Takes over the new anchor, and moves the replica towards it. Collective. Blocks.

        Args:
            mix: Share of the replica's own values that it keeps.

        Returns:
            None, or a rank whose values were not finite when they were sent. Then nothing changes.
        """
        self.step()
        bad, self.sent_at, self.is_stepped = self._bad.heard, None, False
        if bad:
            self.round.drop()
        else:
            with self._options.training.instruments.waiting("all_gather", "anchor"):
                for work in self._gathers:
                    work.wait()
            self.stepper.shards = self._stepped
            self.round.end_step()
            for anchor, value in () if self.keeps_own else self.values:
                value.copy_(torch.lerp(anchor, value.to(anchor.dtype), mix) if mix else anchor)
        self._gathers = ()
        self._free()
        return bad - 1 if bad else None

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self, *, on_all_ranks: bool = False) -> dict[str, Any]:
        """Returns the outer optimizer's state of the last merge, by name. Collective. Blocks.

        Rank 0, or all ranks, get whole tensors on the CPU. Other ranks get stand-ins without data.
        """
        collectives, stepper = self._options.collectives, self.stepper
        with uncounted(collectives):
            state = sharded_state(stepper, collectives)
            whole = gathered(state, collectives, stepper.device, on_rank_0=not on_all_ranks)
        return {self.names[index]: own for index, own in without_masters(whole["state"]).items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` has returned, at any number of ranks. Local.

        No exchange may be under way. Entries of tensors that the fragment lacks are not used.
        """
        for name, shadow in zip(self.names, self.stepper.shards.parameters, strict=True):
            if own := state.get(name):
                self.stepper.optimizer.state[shadow] = dict(own)
        self.stepper.adopt_state()

    def left_out(self) -> Residuals:
        """Puts the owners' shards into the anchor, and returns the residuals. Collective. Blocks.

        Nothing may be under way. Afterwards a new fragment can replace this one, see `inherit`.
        """
        self._take()
        for bucket in self._buffers.buckets if self._exchange.coded else ():
            self._exchange.sync(bucket)
        self._free()
        return self.residuals.taken()

    def inherit(self, left: Iterable[tuple["Fragment", Residuals]]) -> None:
        """Takes over the residuals of other fragments, by name. Local."""
        own, held = dict(zip(self.names, self.stepper.shards.parameters, strict=True)), Residuals()
        for other, residuals in left:
            theirs = zip(other.names, other.stepper.shards.parameters, strict=True)
            held = held.joined(residuals.moved({one: own[n] for n, one in theirs if n in own}))
        self.residuals.put_in(held)

    def spread(self) -> tuple[ShardedState, ShardedState]:
        """Returns what a checkpoint folder has of the fragment. Collective. Blocks.

        Waits until all sums of an exchange under way have arrived. The module must hold the anchor.

        Returns:
            The outer optimizer's state of the last merge, by name, and what `resume` takes.
        """
        collectives, stepper = self._options.collectives, self.stepper
        if self.sent_at is not None and not self.is_stepped:
            # The step reads the anchor, in whose place the replica is at present.
            self.swap()
            self.step()
            self.swap()
        is_stepped, before = self.is_stepped and not self._bad.heard, stepper.shards
        if is_ahead := is_stepped or bool(self._exchange.coded):
            # Shards are ahead of the anchor: they are saved, whatever state there is.
            stepper.note_written()
        with uncounted(collectives):
            last = now = sharded_state(stepper, collectives)
            if is_stepped:
                stepper.shards = self._stepped
                now = sharded_state(stepper, collectives)
                stepper.shards = before
        plain = without_masters(last["state"])
        by_name = {self.names[index]: own for index, own in plain.items()}
        now = self.residuals.add_to_sharded(now)
        if not is_ahead:
            now["state"] = plain
        what = {"sent_at": self.sent_at, "bad": self._bad.heard, "state": dict(now)}
        return ShardedState(by_name, last.chunks, ()), ShardedState(what, now.chunks, ())

    @torch.no_grad()
    def resume(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `spread` has returned, with whole tensors, at the same world size.

        Collective. Does not block. The anchor and, by `load`, the state of the last merge must be
        there. An exchange that was under way is so again: its stepped shards are sent again.
        """
        stepper, last, optimizer = self.stepper, self.stepper.shards, self.stepper.optimizer
        stepper.shards = replace(last, state=defaultdict(dict))
        options = [dict(group) for group in optimizer.param_groups]
        state = saved["state"]
        # Masters are apart: before the first step an entry would have nothing else, as none has.
        optimizer.load_state_dict({**state, "state": without_masters(state["state"])})
        for index, own in state["state"].items():
            if MASTER_KEY in own:
                optimizer.state[last.parameters[index]][MASTER_KEY] = own[MASTER_KEY]
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
        stepper.adopt_state()
        self.sent_at, self._bad.heard = saved["sent_at"], saved["bad"]
        if self.sent_at is None:
            return
        self._take()
        self.is_stepped = True
        if not self._bad.heard:
            self._stepped, stepper.shards = stepper.shards, last
            for coded in self._exchange.coded:
                # As before the gather was encoded: random numbers depend on it.
                coded.counts["gather"] = max(0, coded.counts["gather"] - 1)
            self._gathers = [self._exchange.launch_gather(one) for one in self._buffers.buckets]

    @torch.no_grad()
    def write_replica(self, own: Mapping[str, Tensor]) -> None:
        """Overwrites the replica with `own`, whole tensors by name, like `anchor`. Local."""
        for saved, value in self._pairs(own[name] for name in self.names):
            value.copy_(saved)

    @torch.no_grad()
    def take_replica(self) -> None:
        """Makes the replica's present values the anchor. They must be equal on all ranks. Local."""
        for anchor, value in self.values:
            anchor.copy_(value)
        for bucket in self._buffers.buckets:
            bucket.shard.copy_(bucket.replica)
            bucket.note_published()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the anchor with the replica's values, in place. Local. Twice changes nothing.

        An exchange that is under way must not be stepped meanwhile.
        """
        for anchor, value in self.values:
            pair = anchor, value
            ours, theirs = (torch.split(one, _CHUNK) if one.ndim == 1 else (one,) for one in pair)
            for left, right in zip(ours, theirs, strict=True):
                kept = left.clone()
                left.copy_(right)
                right.copy_(kept)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Returns the 2-norm of all elements of some tensors. Blocks until the device has it."""
    return math.hypot(*map(float, map(torch.linalg.vector_norm, tensors)))


def _in_buckets(fusion: FusionPlanner, nbytes: int) -> FusionPlanner:
    """Returns `fusion`, or a planner of `_NUM_BUCKETS` buckets if the user has set no size."""
    if not isinstance(fusion, ThresholdFusion) or fusion.bucket_cap_mb is not None:
        return fusion
    return ThresholdFusion(bucket_cap_mb=max(nbytes / MIB / _NUM_BUCKETS, _LEAST_MB))


def _anchor_of(tensor: Tensor) -> nn.Parameter:
    """Returns a copy of `tensor` in fp32, or in its dtype if that has more bits, without gaps."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return nn.Parameter(torch.empty_like(tensor, dtype=dtype).copy_(tensor.detach()))
