"""Moves residuals between buckets, from one plan to the next, and to and from state dicts.

A residual is what a compressor has left out of its messages so far. It is sent in later steps
(error feedback).
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_dear.bucket import Chunk
from lightning_dear.checkpoint import optimizer_state, residuals
from lightning_dear.checkpoint.residuals import FACTORS, RESIDUALS_KEY, STEERING, Residuals
from lightning_dear.collectives.work import STATE_TAGS, Collectives
from lightning_dear.exchange import CompressedBucket
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning.plan import Slice


class ResidualKeeper:
    """Keeps one optimizer's residuals, in buckets and outside of them, and saves and loads them.

    The buckets of the active plan hold the residuals of their parameters. This object holds the
    residuals of parameters that are in no bucket: of all parameters while there is no plan, and
    later of frozen parameters, until a plan has these again. `PlanLifecycle` owns it.

    Args:
        optimizer: The user's optimizer. Mutated: gets a hook that reads the residuals in every
            state dict that is loaded.
        collectives: Collectives of the training.
        options: The exchange options of the training.
    """

    def __init__(
        self, optimizer: optim.Optimizer, collectives: Collectives, options: ExchangeOptions
    ) -> None:
        self._optimizer, self._collectives = optimizer, collectives
        self._rows = residuals.RowLayout(collectives.world, options.ranks_together(collectives))
        self._coded: Sequence[CompressedBucket] = ()
        self._parameters: Sequence[nn.Parameter] = ()
        self._held: Residuals | None = None
        self._seed: int | None = None
        self._is_detached = False
        self._hook = optimizer.register_load_state_dict_pre_hook(self._on_loading)

    def attach(
        self, coded: Sequence[CompressedBucket], parameters: Sequence[nn.Parameter], seed: int
    ) -> None:
        """Puts the residuals that this object holds into the buckets of a new plan. Local.

        Residuals of other parameters than `parameters` stay in this object. Rank 0 warns of
        residuals that the buckets cannot keep, which are dropped.

        Args:
            coded: Buckets of the new plan. Empty if nothing is encoded.
            parameters: Parameters of the plan, by tensor index.
            seed: Seed of the random numbers of codecs. It is used only if no seed is in use and
                none was loaded.
        """
        self._coded, self._parameters = coded, parameters
        self._seed = seed if self._seed is None else self._seed
        for bucket in coded:
            bucket.start_anew(self._seed)
        if self._held is not None:
            self.put_in(self._held)

    def release(self) -> None:
        """Copies the residuals in the buckets into this object, before their plan ends.

        Collective. Blocks. Nothing is sent if there are no compressed buckets.
        """
        if self._coded:
            self._held = self.taken()
        self._coded = self._parameters = ()

    def inherit(self, others: "Iterable[ResidualKeeper]") -> None:
        """Takes over copies of the residuals of earlier trainings, before the first plan.

        Collective. Blocks. Of a parameter whose residuals several keepers have, this keeper's own
        are used, or else those of the first of `others`.

        Args:
            others: Keepers of the same optimizer whose trainings have ended.
        """
        for held in (other.taken(self._collectives) for other in others):
            if not held.is_of_nothing or held.seed is not None:
                self._held = held if self._held is None else self._held.joined(held)

    def detach(self) -> None:
        """Removes the hook and drops the flat buffers. Local. Idempotent.

        Residuals stay in this object, for `taken` and `add_to_sharded`.
        """
        if not self._is_detached:
            self._is_detached = True
            self._hook.remove()
            for bucket in self._coded:
                bucket.detach()

    # --- into buckets ---------------------------------------------------------------------------

    def put_in(self, held: Residuals) -> None:
        """Overwrites the residuals in the buckets with `held`. Local.

        Residuals of parameters that are in no bucket stay in this object, in place of those that
        it has held. Rank 0 warns if `held` has residuals that are not 0 and that the buckets
        cannot keep. Such residuals are dropped.
        """
        self._seed = self._seed if held.seed is None else held.seed
        planned = set(self._parameters)
        own, others = held.of(lambda one: one in planned), held.of(lambda one: one not in planned)
        self._held = None if others.is_of_nothing else others
        self._overwrite(own)
        if (lost := self._unknown_names(own)) and self._collectives.world.rank == 0:
            warnings.warn(
                f"What a compressor had left to be sent ({', '.join(lost)}) is dropped. To have it"
                " sent, resume with the compressor and gather of the run that saved.",
                stacklevel=2,
            )

    @torch.no_grad()
    def _overwrite(self, own: Residuals) -> None:
        """Overwrites all that the buckets keep between steps with `own`. Local.

        Residuals that `own` lacks become 0. Counts, and thresholds and regions of sparse selection,
        that `own` lacks get their starting values. So does a low-rank factor that `own` lacks or
        has with another approximation rank. The seed stays if `own` has none. Residuals without a
        saved rate count as residuals at this training's rate, since earlier versions saved no rate.
        """
        for bucket in self._coded:
            bucket.start_anew(own.seed)
            bucket.counts.update(own.counts)
            if (steering := own.get(STEERING, self._first(bucket))) is not None:
                bucket.steer(steering)
            for index, factor in bucket.factors.items():
                saved = own.get(FACTORS, self._parameters[index])
                if saved is not None and saved.shape == factor.shape:
                    factor.copy_(saved)
            for name, kept in bucket.worker.kept.items():
                kept.copy_(bucket.part_of(self._collected(bucket, ("worker", name), own)))
            for name, kept in bucket.owner.kept.items():
                kept.copy_(self._collected(bucket, ("owner", name), own)[bucket.own])

    def _collected(
        self, bucket: CompressedBucket, kind: residuals.ResidualKind, own: Residuals
    ) -> Tensor:
        """Returns the residuals of one kind in the layout of the bucket, flat.

        They are 0 for parameters that have no residual of the kind, and in the padding. Residuals
        of error feedback were saved as the unsent error times the `rate` of `Memory` in the run
        that saved, so they are multiplied by the bucket's rate over that rate.
        """
        device = self._parameters[0].device
        flat = torch.zeros(bucket.spec.padded_numel, dtype=torch.float32, device=device)
        for part in bucket.spec.slices:
            parameter = self._parameters[part.tensor]
            if (source := own.get(kind, parameter)) is None:
                continue
            values = flat[part.offset : part.offset + part.numel]
            values.copy_(source[part.start : part.stop])
            rate = own.rates.get(parameter, bucket.rate)
            if kind[1] == "residual" and rate != bucket.rate:
                values.mul_(bucket.rate / rate)
        return flat

    def _unknown_names(self, own: Residuals) -> list[str]:
        """Returns the names of residuals in `own` that are not 0 and that no bucket can keep.

        A residual can be kept if the bucket of its parameter has a memory of that kind.
        """
        known = {
            ((half, name), self._parameters[part.tensor])
            for bucket in self._coded
            for half, memory in (("worker", bucket.worker), ("owner", bucket.owner))
            for name in memory.names
            for part in bucket.spec.slices
        }
        prefixes = {"worker": "", "owner": "owner's "}
        return [
            prefixes[kind[0]] + kind[1]
            for kind, values in own.kept.items()
            if kind[0] in prefixes
            and any((kind, one) not in known and kept.any() for one, kept in values.items())
        ]

    # --- out of buckets -------------------------------------------------------------------------

    @torch.no_grad()
    def taken(self, through: Collectives | None = None) -> Residuals:
        """Returns the residuals of whole parameters, in buckets and outside. Collective. Blocks.

        Residuals in buckets are copied. The others are shared with this object. Nothing is sent if
        there are no compressed buckets. No gather of the plan may be pending.

        Args:
            through: Collectives to gather with. None means those of the training.
        """
        collectives = through or self._collectives
        taken = self._common()
        taken.kept[FACTORS] = {one: own.clone() for one, own in taken.kept[FACTORS].items()}
        for bucket in self._coded:
            whole: dict[residuals.ResidualKind, Tensor] = {}
            for name, kept in bucket.worker.kept.items():
                whole["worker", name] = flat = bucket.whole_of(kept)
                if len(bucket.encoded) > 1:
                    # Each rank of a host encodes other elements, and under the next plan again
                    # others, so all ranks of the host get the residuals of all elements.
                    collectives.launch_gather_of_host(flat, STATE_TAGS + bucket.number).wait()
            for name, shard in bucket.owner.kept.items():
                flat = whole["owner", name] = shard.new_zeros(bucket.spec.padded_numel)
                flat[bucket.own] = shard
                collectives.launch_all_gather(flat, STATE_TAGS + bucket.number).wait()
            for (kind, flat), part in product(whole.items(), bucket.spec.slices):
                parameter, target = self._parameters[part.tensor], taken.kept.setdefault(kind, {})
                if parameter not in target:
                    target[parameter] = flat.new_zeros(parameter.numel())
                values = flat[part.offset : part.offset + part.numel]
                target[parameter][part.start : part.stop] = values
        return taken if self._held is None else taken.joined(self._held)

    def _common(self) -> Residuals:
        """Returns the data of the buckets that needs no gathering. Local.

        Factors, rates, counts and the seed are equal on all ranks. The steering (thresholds and
        regions of sparse selection) is this rank's own, and has the same length on all ranks.
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
            # The maximum, because the counts of buckets that the plan leaves uncompressed stay 0.
            {half: max(one.counts[half] for one in coded) for half in halves},
            coded[0].seed if coded else None,
        )

    def _first(self, bucket: CompressedBucket) -> nn.Parameter:
        """Returns the first parameter in the bucket, under which its steering is saved."""
        return self._parameters[bucket.spec.slices[0].tensor]

    def _chunks(self) -> Iterator[residuals.ResidualChunk]:
        """Yields this rank's residuals in the buckets, as chunks of parameters, which are views.

        All ranks yield the same kinds and parameters. A chunk is empty if this rank has no element
        of the parameter's slice.
        """
        for bucket in self._coded:
            for part in bucket.spec.slices:
                parameter = self._parameters[part.tensor]
                for name, kept in bucket.worker.kept.items():
                    values = torch.split(kept, [one.stop - one.start for one in bucket.encoded])
                    for place, own in zip(bucket.encoded, values, strict=True):
                        yield ("worker", name), parameter, _chunk_of(part, place, own)
                for name, shard in bucket.owner.kept.items():
                    yield ("owner", name), parameter, _chunk_of(part, bucket.own, shard)

    # --- into and out of state dicts ------------------------------------------------------------

    def add_to_sharded(self, state: optimizer_state.ShardedState) -> optimizer_state.ShardedState:
        """Adds stand-ins of all residuals, and this rank's chunks of them, to `state`. Local.

        Also adds the name of the optimizer's class. If there are no compressed buckets and no
        residuals, there is no entry for residuals. Returns `state`.
        """
        state[optimizer_state.CLASS] = type(self._optimizer).__name__
        if not self._coded and self._held is None:
            return state
        parameters = chain.from_iterable(one["params"] for one in self._optimizer.param_groups)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        whole = self._common().joined((self._held or Residuals()).of(lambda one: one in numbers))
        state[RESIDUALS_KEY], chunks = residuals.sharded(self._chunks(), whole, numbers, self._rows)
        state.chunks += tuple(chunks)
        return state

    def _on_loading(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Pre-hook of `load_state_dict`: replaces all residuals by those in `state_dict`. Local.

        Residuals that `state_dict` lacks become 0, since the present ones belong to other weights.
        If `state_dict` has other numbers of parameters, nothing is replaced.

        Raises:
            ValueError: If the state belongs to another optimizer class, see `check_class`.
        """
        optimizer_state.check_class(optimizer, state_dict)
        saved = [group["params"] for group in state_dict["param_groups"]]
        present = [group["params"] for group in optimizer.param_groups]
        if list(map(len, saved)) != list(map(len, present)):
            # `load_state_dict` raises in this case and loads nothing, so residuals stay too.
            return
        held = None
        if RESIDUALS_KEY in state_dict:
            parameter_of = dict(zip(chain(*saved), chain(*present), strict=True))
            held = residuals.unpacked(state_dict[RESIDUALS_KEY], parameter_of, self._rows)
        if self._parameters:
            self.put_in(held or Residuals())
        else:
            self._held = held


def _chunk_of(part: Slice, place: slice, values: Tensor) -> Chunk:
    """Returns the elements of `part` that lie in `values`, as a chunk of the parameter.

    The chunk is a view of `values`, and empty if no element lies there.

    Args:
        part: Slice of a parameter in the bucket.
        place: Range of the bucket that `values` holds.
        values: Elements of the bucket in that range, flat.
    """
    begin = max(part.offset, place.start)
    end = max(begin, min(part.offset + part.numel, place.stop))
    return Chunk(part.start + begin - part.offset, values[begin - place.start : end - place.start])
