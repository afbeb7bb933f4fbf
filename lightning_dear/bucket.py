"""Flat buffers: parameters and gradients of a bucket lie side by side, ready to travel.

Every parameter becomes a view of one flat buffer per family (dtype, device), so that an
all-gather lands in place; a bucket is a contiguous range of it, and a shard is this rank's
contiguous 1/world_size of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.planning.plan import BucketPlan, BucketSpec
from lightning_dear.torch_modes import plain_mode, saves_calls

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Parameters of these are stepped as fp32 masters: an update is often below their resolution."""


class Role(Enum):
    """What a rank does with a bucket, and so what the bucket's buffers hold.

    `ExchangeOptions.role_of` decides it, from options, plan and dtype. All legal combinations:

        role                 when                    the rank steps      `shard` is
        -------------------  ----------------------  ------------------  --------------------------
        SHARDED              in every other case     its shard           `replica` itself
        SHARDED_MASTERS      likewise, 16 bits       its shard, in fp32  a copy
        EARLY                the plan calls it early its shard           a copy
        EARLY_MASTERS        likewise, 16 bits       its shard, in fp32  a copy
        LAGGING              differences are encoded its shard           a copy, ahead of `replica`
        LAGGING_MASTERS      likewise, 16 bits       its shard, in fp32  a copy, ahead of `replica`
        REPLICATED           it is all-reduced       all of the bucket   `replica` itself
        REPLICATED_MASTERS   likewise, 16 bits       all of it, in fp32  a copy
        SCATTERED            sums stay with owners   all of the bucket   `replica` itself
                             of regions (Ok-Topk)

    "16 bits": parameters have 16 bits. Then `mean` is an fp32 tensor of its own; elsewhere it is a
    view of `gradients`. In a SCATTERED bucket it is 0 outside this rank's region until the sums of
    all regions have arrived. `landing` is a tensor of its own in EARLY buckets, since backward
    still reads the old parameters; elsewhere it is `parameters` itself. `published` is empty but in
    LAGGING buckets. A REPLICATED bucket gathers nothing.

    Attributes:
        has_master: Whether the numbers that are stepped are a copy that checkpoints keep.
        lags: Whether `replica` stays behind `shard` by what encoded differences have not brought.
        is_staged: Whether new parameters wait in `landing`.
        is_all_reduced: Whether every rank gets the whole mean in backward.
        is_whole: Whether every rank steps all of the bucket.
    """

    SHARDED = ()
    SHARDED_MASTERS = ("has_master",)
    EARLY = ("is_staged",)
    EARLY_MASTERS = ("is_staged", "has_master")
    LAGGING = ("lags", "has_master")
    LAGGING_MASTERS = ("lags", "has_master", "has_16_bits")
    REPLICATED = ("is_all_reduced", "is_whole")
    REPLICATED_MASTERS = ("is_all_reduced", "is_whole", "has_master")
    SCATTERED = ("is_whole",)

    def __init__(self, *facts: str) -> None:
        self.has_master, self.lags = "has_master" in facts, "lags" in facts
        self.is_staged, self.is_whole = "is_staged" in facts, "is_whole" in facts
        self.is_all_reduced = "is_all_reduced" in facts


@dataclass(frozen=True, eq=False)
class Bucket:
    """One bucket's buffers.

    Attributes:
        number: Position in the plan, equal on all ranks.
        spec: What lies where in it.
        role: What this rank does with it; `Role` says what the buffers hold in each.
        parameters: Flat, `spec.padded_numel` elements; the parameters are views of it.
        gradients: Flat, as `parameters`. Empty where nothing has to travel or to be converted
            (world size 1, 32 or 64 bits, no codec): there the optimizer reads `parameter.grad`.
        received: Scratch for what other ranks send of this rank's gradient shard.
        replica: What this rank steps, its shard or all of it, as every rank has it; a view of
            `parameters`.
        shard: The numbers that the optimizer steps.
        published: `replica` as it was when differences had arrived last.
        mean: The mean gradient of `shard`.
        landing: Where gathered parameters arrive.
    """

    number: int
    spec: BucketSpec
    role: Role
    parameters: Tensor
    gradients: Tensor
    received: Tensor
    replica: Tensor
    shard: Tensor
    mean: Tensor
    landing: Tensor
    published: Tensor

    @cached_property
    def own(self) -> slice:
        """Where what this rank steps lies in the bucket: its shard, or all of it."""
        begin = self.replica.storage_offset() - self.parameters.storage_offset()
        return slice(begin, begin + self.replica.numel())

    @cached_property
    def is_stepped_whole(self) -> bool:
        """Whether this rank steps all of it: because of its role, or since there is one rank."""
        return self.replica.numel() == self.parameters.numel()

    def publish(self) -> None:
        """Rounds the stepped shard into what is gathered; nothing to do where they are the same."""
        if self.role.is_staged:
            self.landing[self.own].copy_(self.shard)
        elif self.role.has_master:
            self.replica.copy_(self.shard)

    def lag(self, out: Tensor) -> Tensor:
        """How far `replica` is behind `shard`, written into `out`."""
        return torch.sub(self.shard, self.replica, out=out)

    def follow(self, differences: Tensor) -> None:
        """Adds what every rank has sent of its lag, its row, to the parameters everywhere alike."""
        self.parameters.view(differences.shape).add_(differences)
        self.note_published()

    def note_published(self) -> None:
        """Notes what all ranks have now of this rank's shard."""
        if self.role.lags:
            self.published.copy_(self.replica)

    def land(self) -> None:
        """Makes what was gathered the parameters' values, whatever context they are read in."""
        if self.role.is_staged:
            with plain_mode(self.parameters.device.type):
                self.parameters.copy_(self.landing)

    def adopt_writes(self) -> None:
        """Takes over values that were written to the parameters from outside, element by element.

        A value was written if its bits are not those of the master, rounded. A version counter does
        not tell, since it sees no write through `.data`. Where parameters lag, the master moves by
        as much as they were moved.
        """
        if self.role.lags:
            # Usually nobody wrote. A CPU sees that in one pass; an accelerator would be waited for.
            if saves_calls(self.shard.device) or not torch.equal(self.replica, self.published):
                # By 0 where nobody wrote: the lag is still to be sent.
                follow_weights(self.shard, self.published, self.replica)
                self.note_published()
        elif self.role.has_master:
            is_own = self.replica == self.shard.to(self.replica.dtype)
            torch.where(is_own, self.shard, self.replica, out=self.shard)
        elif self.role.is_staged:
            self.shard.copy_(self.replica)

    def adopt_gradients(self) -> None:
        """Takes what was changed of this rank's shard of the whole mean gradient into `mean`."""
        if self.role.has_master:
            own = self.gradients[self.own]
            was_changed = own != self.mean.to(own.dtype)
            torch.where(was_changed, own.to(self.mean.dtype), self.mean, out=self.mean)


def follow_weights(master: Tensor, before: Tensor, weights: Tensor) -> None:
    """Moves `master` by as much as `weights` were since they were `before`; it is mutated.

    Where they were not moved it stays, bit for bit. Not so where weights come back from a
    divergence, whose lag would swamp them: if they were moved by more than twice their new norm, or
    were not finite, `master` becomes what they are.
    """
    dtype, norm = master.dtype, torch.linalg.vector_norm
    weights, before = weights.to(dtype), before.to(dtype)
    lag = torch.sub(master, before)
    moved = torch.where(weights == before, master, weights + lag)
    # Never so if a norm is nan.
    is_move = norm(weights - before) <= 2 * norm(weights)
    torch.where(is_move, moved, weights, out=master)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one parameter lies in the flat buffers, elements in the order of its storage.

    Attributes:
        parameter: The user's parameter; its `data` is a view of the flat buffer.
        view: The part of the flat parameter buffer that `parameter.data` is.
        gradient: View of the gradient buffer in the parameter's shape and strides; None where
            there is none and the optimizer reads `parameter.grad` where autograd left it.
        buckets: Numbers of the buckets that hold it.
        data_ptr: Address of `parameter.data`; another address means that somebody replaced it.
    """

    parameter: Parameter
    view: Tensor
    gradient: Tensor | None
    buckets: tuple[int, ...]
    data_ptr: int

    def was_replaced(self) -> bool:
        """Whether `parameter.data` no longer is the flat buffer's view."""
        return self.parameter.data_ptr() != self.data_ptr


def storage_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that keep the tensor's memory format (channels_last too) without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def storage_shape(tensor: Tensor) -> torch.Size:
    """The sizes of a tensor's dimensions in the order of its storage, the outermost first."""
    dimensions = sorted(range(tensor.ndim), key=storage_strides(tensor).__getitem__, reverse=True)
    return torch.Size(tensor.shape[dimension] for dimension in dimensions)


def as_flat(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`tensor` as 1-D in the order of `strides`; a view where its layout allows, else a copy."""
    if tensor.stride() != strides:
        tensor = torch.empty_strided(
            tensor.size(), strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True, eq=False)
class FlatBuffers:
    """All buckets of a plan and where each parameter lies in them."""

    buckets: list[Bucket]
    placements: list[Placement]

    @property
    def lagging(self) -> list[Parameter]:
        """The parameters that stay behind what is stepped, see `Role.lags`."""
        return [one.parameter for one in self.placements if self.buckets[one.buckets[0]].role.lags]

    @cached_property
    def _addresses(self) -> tuple[list[Parameter], list[int]]:
        return [one.parameter for one in self.placements], [one.data_ptr for one in self.placements]

    @property
    def replaced(self) -> list[Placement]:
        """The placements whose parameters have other data in the place of the flat buffer's."""
        parameters, addresses = self._addresses
        # Usually none, which one pass of C calls tells.
        if [*map(Tensor.data_ptr, parameters)] == addresses:
            return []
        return [one for one in self.placements if one.was_replaced()]

    @torch.no_grad()
    def adopt_writes(self, but: Collection[int] = ()) -> bool:
        """Takes over what was written from outside: to a parameter, or in place of its data.

        Args:
            but: Buckets that have been stepped since; nobody may have written to them.

        Returns:
            Whether a parameter had other data in its place.
        """
        replaced = self.replaced
        for placement in replaced:
            placement.view.copy_(placement.parameter.data)
            placement.parameter.data = placement.view
        for bucket in self.buckets:
            if bucket.number not in but:
                bucket.adopt_writes()
        return bool(replaced)


def allocate(
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    role_of: Callable[[int, torch.dtype], Role],
    rank: int,
    scratch_numel: Callable[[int], int],
    *,
    keeps_gradients: bool,
) -> FlatBuffers:
    """Makes the buffers of `plan` and moves the parameters into them.

    Mutates each parameter's `data`: values stay, storage changes.

    Args:
        plan: Over exactly these parameters, by their index.
        parameters: The engine's list.
        role_of: (number of a bucket, dtype of its parameters) -> its role.
        rank: Whose shards to make.
        scratch_numel: Elements of a bucket -> elements of its scratch (see `Bucket.received`).
        keeps_gradients: Whether gradients of 32 or 64 bits go into buckets, too.
    """
    by_family, homes = _by_family_and_tensor(plan)
    buckets: dict[int, Bucket] = {}
    placements: dict[int, Placement] = {}
    for numbers in by_family.values():
        like = parameters[plan.buckets[numbers[0]].slices[0].tensor]
        numel = sum(plan.buckets[number].padded_numel for number in numbers)
        flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        sizes = (plan.buckets[number].padded_numel for number in numbers)
        begins = dict(zip(numbers, accumulate(sizes, initial=0), strict=False))
        starts = _move_data(plan, begins, parameters, flat)
        # Behind that, which gives back as much memory as is needed here.
        has_gradients = keeps_gradients or flat.dtype in LOW_PRECISION
        gradients = torch.zeros_like(flat) if has_gradients else flat.new_empty(0)
        for tensor, start in starts.items():
            placements[tensor] = _place(parameters[tensor], gradients, start, homes[tensor])
        for number, offset in begins.items():
            spec, role = plan.buckets[number], role_of(number, flat.dtype)
            part = slice(offset, offset + spec.padded_numel)
            scratch = flat.new_empty(0 if role.is_whole else scratch_numel(spec.padded_numel))
            whole = slice(0, spec.padded_numel)
            own = whole if role.is_whole else shard_slice(whole.stop, rank, plan.world_size)
            place = flat[part], gradients[part], scratch
            buckets[number] = _bucket(number, spec, role, *place, own)
    for bucket in buckets.values():
        bucket.shard.copy_(bucket.replica)
        bucket.note_published()
    return FlatBuffers(
        [buckets[number] for number in range(len(buckets))],
        [placements[index] for index in range(len(parameters))],
    )


def _by_family_and_tensor(plan: BucketPlan) -> tuple[dict[str, list[int]], dict[int, list[int]]]:
    """Numbers of the buckets of each family, and of those that hold each tensor."""
    by_family: dict[str, list[int]] = {}
    homes: dict[int, list[int]] = {}
    for number, spec in enumerate(plan.buckets):
        by_family.setdefault(spec.family, []).append(number)
        for piece in spec.slices:
            homes.setdefault(piece.tensor, []).append(number)
    return by_family, homes


def shard_slice(padded_numel: int, rank: int, world_size: int) -> slice:
    """Where `rank`'s shard lies in a bucket of `padded_numel` elements."""
    size = padded_numel // world_size
    return slice(rank * size, (rank + 1) * size)


def _bucket(
    number: int,
    spec: BucketSpec,
    role: Role,
    parameters: Tensor,
    gradients: Tensor,
    scratch: Tensor,
    own: slice,
) -> Bucket:
    """Makes what `role` needs beside views of the flat buffers; see the table there."""
    replica, mean = parameters[own], gradients[own]
    shard = torch.empty_like(replica) if role.lags or role.is_staged else replica
    if parameters.dtype in LOW_PRECISION:
        shard = torch.empty_like(replica, dtype=torch.float32)
        mean = torch.empty_like(shard)
    landing = torch.empty_like(parameters) if role.is_staged else parameters
    published = torch.empty_like(replica) if role.lags else replica[:0]
    views = parameters, gradients, scratch, replica
    return Bucket(number, spec, role, *views, shard, mean, landing, published)


def _move_data(
    plan: BucketPlan, begins: Mapping[int, int], parameters: Sequence[Parameter], flat: Tensor
) -> dict[int, int]:
    """Moves data into buckets that begin where `begins` says; returns where each tensor begins."""
    starts = {
        piece.tensor: begin + piece.offset
        for number, begin in begins.items()
        for piece in plan.buckets[number].slices
        if piece.start == 0
    }
    for tensor, start in starts.items():
        parameter = parameters[tensor]
        view = flat.as_strided(parameter.size(), storage_strides(parameter), start)
        view.copy_(parameter.data)
        parameter.data = view
    return starts


def _place(parameter: Parameter, gradients: Tensor, start: int, homes: list[int]) -> Placement:
    view, gradient = parameter.data, None
    if gradients.numel():
        gradient = gradients.as_strided(view.size(), view.stride(), start)
    return Placement(parameter, view, gradient, tuple(homes), view.data_ptr())


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive elements of a tensor, in storage order.

    Attributes:
        start: Number of the first one.
        values: The elements; of any shape, without gaps.
    """

    start: int
    values: Tensor


@dataclass
class Piece:
    """The part of one parameter that lies in this rank's shard of one bucket.

    Attributes:
        tensor_index: The parameter's number in the engine's list.
        start: First element, in storage order.
        stop: One past the last element.
        bucket: The bucket's number.
        offset: Where the piece begins in the bucket.
        parameter: 1-D view of the elements in the bucket's `shard`, what the optimizer steps on.
        gradient: 1-D view of their mean gradient; None where autograd's own is read.
        role: The bucket's; SHARDED for a whole parameter that is in no bucket.
        is_plain: Whether it is a whole, contiguous parameter, whose gradient needs no rearranging.
        was_stepped: Whether a step has changed `parameter`.
    """

    tensor_index: int
    start: int
    stop: int
    bucket: int
    offset: int
    parameter: Tensor
    gradient: Tensor | None
    role: Role = Role.SHARDED
    is_plain: bool = False
    was_stepped: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def shard_pieces(bucket: Bucket) -> list[Piece]:
    """The pieces of what this rank steps of `bucket`, in the order in which they lie in it."""
    own, pieces = bucket.own, []
    for part in bucket.spec.slices:
        lower, upper = max(part.offset, own.start), min(part.offset + part.numel, own.stop)
        if lower >= upper:
            continue
        start, inside = (
            part.start + lower - part.offset,
            slice(lower - own.start, upper - own.start),
        )
        piece = Piece(
            tensor_index=part.tensor,
            start=start,
            stop=start + upper - lower,
            bucket=bucket.number,
            offset=lower,
            parameter=bucket.shard[inside],
            gradient=bucket.mean[inside] if bucket.mean.numel() else None,
            role=bucket.role,
        )
        pieces.append(piece)
    return pieces


def cut_state(key: str, value: Any, parameter: Parameter, piece: Piece) -> Any:
    """A copy of what of an optimizer's state `value` for `parameter` belongs to `piece`."""
    if not isinstance(value, Tensor):
        return value
    # By name, since a parameter without dimensions has the shape of its `step`.
    if key != "step" and value.shape == parameter.shape:
        flat = as_flat(value, parameter.stride())
        # Beside fp32 masters state is fp32, also what DDP has kept in 16 bits.
        is_widened = piece.role.has_master and flat.is_floating_point()
        dtype = piece.parameter.dtype if is_widened else None
        return flat[piece.start : piece.stop].to(parameter.device, dtype, copy=True)
    # Pieces are stepped one by one, and each counts its `step` in place.
    return value.clone()
