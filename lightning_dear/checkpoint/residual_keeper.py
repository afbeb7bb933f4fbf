"""Residuals between buckets, plans and an optimizer's state dict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.bucket import Chunk
from lightning_dear.checkpoint import residuals
from lightning_dear.checkpoint.optimizer_state import CLASS, ShardedState, check_class
from lightning_dear.checkpoint.residuals import (
    FACTORS,
    RESIDUALS_KEY,
    STEERING,
    Residuals,
    RowLayout,
)
from lightning_dear.collectives.work import STATE_TAGS, Collectives
from lightning_dear.exchange import CompressedBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning.plan import Slice


class ResidualKeeper:
    """Holds what encoding has left to be sent of parameters that are in no bucket.

    That is all of them while there is no plan, and later those that are frozen, until another plan
    has them again. Buckets hold the rest: it takes it out of them and puts it in.

    Args:
        optimizer: Whose state dict brings residuals; mutated: a hook.
        present: Says what moves the bytes at present.
        options: What travels, and how.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        present: Callable[[], Collectives],
        options: ExchangeOptions,
    ) -> None:
        self._optimizer, self._present, self._options = optimizer, present, options
        self._coded: Sequence[CompressedBucket] = ()
        self._parameters: Sequence[Parameter] = ()
        self._held: Residuals | None = None
        self._seed: int | None = None
        self._is_detached = False
        self._hook = optimizer.register_load_state_dict_pre_hook(self._on_loading)

    def attach(
        self, coded: Sequence[CompressedBucket], parameters: Sequence[Parameter], seed: int
    ) -> None:
        """Gives what is held of `parameters`, which are all of a new plan's, to its buckets.

        Args:
            coded: Of the new plan.
            parameters: See above.
            seed: Of what they draw at random, if none is in use and none was loaded.
        """
        self._coded, self._parameters = coded, parameters
        self._seed = seed if self._seed is None else self._seed
        for one in coded:
            one.start_anew(self._seed)
        if self._held is not None:
            self._put_in(self._held)

    def release(self) -> None:
        """Takes over what the buckets have; their plan ends. Collective, blocks."""
        if self._coded:
            self._held = self.taken()
        self._coded = self._parameters = ()

    def inherit(self, others: Iterable[ResidualKeeper]) -> None:
        """Holds what others hold, whose plans have ended; to be called before the first plan."""
        for held in (other.taken(self._present()) for other in others):
            if not held.is_of_nothing or held.seed is not None:
                self._held = held if self._held is None else self._held.joined(held)

    def detach(self) -> None:
        """Removes the hook and lets go of the flat buffers; residuals stay readable. Idempotent."""
        if self._is_detached:
            return
        self._is_detached = True
        self._hook.remove()
        for one in self._coded:
            one.detach()

    # --- into buckets ---------------------------------------------------------------------------

    def _put_in(self, held: Residuals) -> None:
        """Gives buckets what they can have of `held`, holds what is in no bucket; says the rest."""
        self._seed = self._seed if held.seed is None else held.seed
        planned = set(self._parameters)
        own, others = held.of(lambda one: one in planned), held.of(lambda one: one not in planned)
        self._held = None if others.is_of_nothing else others
        self._overwrite(own)
        lost = self._unknown_names(own)
        if lost and self._present().world.rank == 0:
            warnings.warn(
                f"What a compressor had left to be sent ({', '.join(lost)}) is dropped: this"
                " training has another compressor, none, or another gather, for some or all"
                " parameters. Keep these as they were to have it sent.",
                stacklevel=2,
            )

    @torch.no_grad()
    def _overwrite(self, own: Residuals) -> None:
        """Overwrites what is kept in buckets; what `own` does not know becomes 0. Local.

        A factor that it does not know, or of another rank, becomes what it was at the start.
        Numbers of which it does not know the rate count as of this training's, as earlier versions
        took all of them.
        """
        for one in self._coded:
            one.start_anew(own.seed)
            one.counts.update(own.counts)
            steering = own.get(STEERING, self._first(one))
            if steering is not None:
                one.steer(steering)
            for number, factor in one.factors.items():
                saved = own.get(FACTORS, self._parameters[number])
                if saved is not None and saved.shape == factor.shape:
                    factor.copy_(saved)
            for name in one.worker.names:
                one.worker.load(name, one.part_of(self._collected(one, ("worker", name), own)))
            for name in one.owner.names:
                one.owner.load(name, self._collected(one, ("owner", name), own)[one.own])

    def _collected(
        self, one: CompressedBucket, kind: residuals.ResidualKind, own: Residuals
    ) -> Tensor:
        """Flat, as the bucket is, at its rate; 0 where there is nothing of that kind."""
        device = self._parameters[0].device
        flat = torch.zeros(one.spec.padded_numel, dtype=torch.float32, device=device)
        for part in one.spec.slices:
            parameter = self._parameters[part.tensor]
            source = own.get(kind, parameter)
            if source is None:
                continue
            numbers = flat[part.offset : part.offset + part.numel]
            numbers.copy_(source[part.start : part.stop])
            rate = own.rates.get(parameter, one.rate)
            if kind[1] == "residual" and rate != one.rate:
                numbers.mul_(one.rate / rate)
        return flat

    def _unknown_names(self, own: Residuals) -> list[str]:
        """Names of what `own` has, not zero, of a parameter of which its bucket keeps no such."""
        known = {
            ((whose, name), self._parameters[part.tensor])
            for one in self._coded
            for whose, memory in (("worker", one.worker), ("owner", one.owner))
            for name in memory.names
            for part in one.spec.slices
        }
        said = {"worker": "", "owner": "owner's "}
        return [
            said[kind[0]] + kind[1]
            for kind, numbers in own.kept.items()
            if kind[0] in said
            and any((kind, one) not in known and kept.any() for one, kept in numbers.items())
        ]

    # --- out of buckets -------------------------------------------------------------------------

    @torch.no_grad()
    def taken(self, through: Collectives | None = None) -> Residuals:
        """Returns copies of all residuals, in buckets and not; no bucket may be pending.

        Collective, blocks; through the keeper's own collectives if no others are given.
        """
        collectives = through or self._present()
        taken = self._common()
        taken.kept[FACTORS] = {one: own.clone() for one, own in taken.kept[FACTORS].items()}
        for one in self._coded:
            whole: dict[residuals.ResidualKind, Tensor] = {}
            for name, kept in one.worker.kept.items():
                whole["worker", name] = flat = one.whole_of(kept)
                if len(one.encoded) > 1:
                    # What this rank encodes may be another part of the next plan.
                    collectives.launch_gather_of_host(flat, STATE_TAGS + one.number).wait()
            for name, shard in one.owner.kept.items():
                flat = whole["owner", name] = shard.new_zeros(one.spec.padded_numel)
                flat[one.own] = shard
                collectives.launch_all_gather(flat, STATE_TAGS + one.number).wait()
            for (kind, flat), part in product(whole.items(), one.spec.slices):
                parameter, target = self._parameters[part.tensor], taken.kept.setdefault(kind, {})
                if parameter not in target:
                    target[parameter] = flat.new_zeros(parameter.numel())
                numbers = flat[part.offset : part.offset + part.numel]
                target[parameter][part.start : part.stop] = numbers
        return taken if self._held is None else taken.joined(self._held)

    def _common(self) -> Residuals:
        """What all ranks have alike: factors, the buckets' own, counts, rates and the seed. Local.

        And by what this rank selects, which is as long on all of them.
        """
        coded, parameters = self._coded, self._parameters
        halves = coded[0].counts if coded else ()
        steered = ((self._first(one), one.steering) for one in coded)
        return Residuals(
            {
                FACTORS: {parameters[at]: own for one in coded for at, own in one.factors.items()},
                STEERING: {first: own for first, own in steered if own is not None},
            },
            {parameters[part.tensor]: one.rate for one in coded for part in one.spec.slices},
            # The most, as some buckets may travel as they are.
            {half: max(one.counts[half] for one in coded) for half in halves},
            coded[0].seed if coded else None,
        )

    @property
    def _rows(self) -> RowLayout:
        collectives = self._present()
        return RowLayout(collectives.world, self._options.ranks_together(collectives))

    def _first(self, one: CompressedBucket) -> Parameter:
        """The parameter that a bucket is known by."""
        return self._parameters[one.spec.slices[0].tensor]

    def _parts(self) -> Iterator[residuals.ResidualChunk]:
        """What lies in the buckets; every rank names the same, whatever it has of it."""
        for one in self._coded:
            for part in one.spec.slices:
                parameter = self._parameters[part.tensor]
                for name, kept in one.worker.kept.items():
                    pieces = torch.split(kept, [own.stop - own.start for own in one.encoded])
                    for own, piece in zip(one.encoded, pieces, strict=True):
                        yield ("worker", name), parameter, _part_in(own, part, piece)
                for name, shard in one.owner.kept.items():
                    yield ("owner", name), parameter, _part_in(one.own, part, shard)

    # --- into and out of state dicts ------------------------------------------------------------

    def add_to_sharded(self, state: ShardedState) -> ShardedState:
        """Returns `state` with this rank's chunks of all residuals, if there are any. Local.

        And whose it is; mutated.
        """
        state[CLASS] = type(self._optimizer).__name__
        if not self._coded and self._held is None:
            return state
        groups = self._optimizer.param_groups
        parameters = chain.from_iterable(group["params"] for group in groups)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        held = self._held or Residuals()
        whole = self._common().joined(held.of(lambda one: one in numbers))
        own, chunks = residuals.sharded(self._parts(), whole, numbers, self._rows)
        return ShardedState(
            {**state, RESIDUALS_KEY: own}, (*state.chunks, *chunks), state.parameters
        )

    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Pre-hook of `load_state_dict`: what was kept before belongs to other weights."""
        check_class(optimizer, state_dict)
        saved = [group["params"] for group in state_dict["param_groups"]]
        present = [group["params"] for group in optimizer.param_groups]
        if list(map(len, saved)) != list(map(len, present)):
            # torch refuses that, and says so: nothing is loaded.
            return
        held = None
        if RESIDUALS_KEY in state_dict:
            parameter_of = dict(zip(chain(*saved), chain(*present), strict=True))
            held = residuals.unpacked(state_dict[RESIDUALS_KEY], parameter_of, self._rows)
        if self._parameters:
            self._put_in(held or Residuals())
        else:
            self._held = held


def _part_in(own: slice, part: Slice, numbers: Tensor) -> Chunk:
    """What of `part` lies in `numbers`, which are the bucket's in `own`; perhaps nothing."""
    begin = max(part.offset, own.start)
    end = max(begin, min(part.offset + part.numel, own.stop))
    return Chunk(part.start + begin - part.offset, numbers[begin - own.start : end - own.start])
