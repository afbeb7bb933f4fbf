"""Flat buffers, in which the parameters and the gradients of a bucket are contiguous.

There is one flat buffer of parameters for each family (dtype, device and compressor). Every
parameter becomes a view of it, so that an all-gather can write parameters in place. A bucket is a
contiguous range of the buffer, and a shard is a rank's contiguous 1/world_size of a bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from lightning_dear.planning.plan import BucketPlan, BucketSpec
from lightning_dear.torch_modes import saves_calls

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""dtypes whose parameters are stepped as fp32 masters: 16 bits would round small updates away."""


class Role(Enum):
    """What this rank does with a bucket, which determines what the bucket's buffers hold.

    `ExchangeOptions.role_of` chooses the role from options, plan and dtype:

        role                 when                    the rank steps      `shard` is
        -------------------  ----------------------  ------------------  --------------------------
        SHARDED              in all other cases      its shard           `replica` itself
        SHARDED_MASTERS      same, 16-bit parameters its shard, in fp32  a copy
        LAGGING              differences are encoded its shard           a copy, ahead of `replica`
        LAGGING_MASTERS      same, 16-bit parameters its shard, in fp32  a copy, ahead of `replica`
        REPLICATED           it is all-reduced       all of the bucket   `replica` itself
        REPLICATED_MASTERS   same, 16-bit parameters all of it, in fp32  a copy
        SCATTERED            each rank sums a region all of the bucket   `replica` itself
                             of it (Ok-Topk)

    With 16-bit parameters `mean` is an fp32 tensor of its own; otherwise it is a view of
    `gradients`. In a SCATTERED bucket `mean` is 0 outside this rank's region until the sums of all
    regions have arrived. `published` is empty except in LAGGING buckets. A REPLICATED bucket is not
    gathered.

    Attributes:
        has_master: Whether `shard` is a copy that checkpoints save, since it is more exact than
            `replica`: an fp32 master, or the shard of a bucket that lags.
        lags: Whether `replica` differs from `shard` by what encoding has left out so far.
        is_all_reduced: Whether the reduce half gives every rank the mean of the whole bucket.
        is_whole: Whether every rank steps all of the bucket.
    """

    SHARDED = ()
    SHARDED_MASTERS = ("has_master",)
    LAGGING = ("lags", "has_master")
    # `__init__` does not read "has_16_bits". Without it this value would equal that of LAGGING, and
    # Enum would make this member an alias of LAGGING.
    LAGGING_MASTERS = ("lags", "has_master", "has_16_bits")
    REPLICATED = ("is_all_reduced", "is_whole")
    REPLICATED_MASTERS = ("is_all_reduced", "is_whole", "has_master")
    SCATTERED = ("is_whole",)

    def __init__(self, *facts: str) -> None:
        self.has_master, self.lags = "has_master" in facts, "lags" in facts
        self.is_whole, self.is_all_reduced = "is_whole" in facts, "is_all_reduced" in facts


@dataclass(frozen=True, eq=False)
class Bucket:
    """Holds the buffers of one bucket.

    Attributes:
        number: Number of the bucket in the plan, the same on all ranks.
        spec: Tensors that the bucket holds, with their offsets.
        role: What this rank does with the bucket; see `Role` for what the buffers below hold.
        parameters: [spec.padded_numel], flat; the user's parameters are views of it.
        gradients: [spec.padded_numel], flat. Empty if gradients need not be sent or converted
            (world size 1, 32 or 64 bits, no codec): the optimizer then reads `parameter.grad`.
        received: Scratch for the gradients that other ranks send for this rank's shard. Empty if
            the backend needs none, or if the role is whole.
        replica: Range of `parameters` that this rank steps, its shard or the whole bucket, with the
            values that all ranks have; a view.
        shard: Values of the range of `replica`, which the optimizer steps.
        published: Copy of `replica` with the values that all ranks had last. Empty unless it lags.
        mean: Mean gradient of `shard`, once the reduce half was waited for.
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
    published: Tensor

    @cached_property
    def own(self) -> slice:
        """Returns the range of the bucket that this rank steps: its shard, or all of it."""
        begin = self.replica.storage_offset() - self.parameters.storage_offset()
        return slice(begin, begin + self.replica.numel())

    @cached_property
    def is_stepped_whole(self) -> bool:
        """Tells whether this rank steps the whole bucket: by its role, or as the only rank."""
        return self.replica.numel() == self.parameters.numel()

    def publish(self) -> None:
        """Copies the stepped `shard` to the buffer that is gathered, unless it is part of it."""
        if self.role.has_master:
            self.replica.copy_(self.shard)

    def lag(self, out: Tensor) -> Tensor:
        """Writes the difference that is to be sent, `shard` - `replica`, to `out`; returns it."""
        return torch.sub(self.shard, self.replica, out=out)

    def follow(self, differences: Tensor) -> None:
        """Adds the decoded differences of all ranks to `parameters`, the same on every rank.

        Args:
            differences: [world_size, padded_numel / world_size]; each row was sent by its owner.
        """
        self.parameters.view(differences.shape).add_(differences)
        self.note_published()

    def note_published(self) -> None:
        """Copies `replica`, whose values all ranks now have, to `published`, if the bucket lags."""
        if self.role.lags:
            self.published.copy_(self.replica)

    def adopt_writes(self) -> None:
        """Copies the elements of `replica` that the user has written to into `shard`.

        Does nothing if both are one tensor. With a master, an element was written if it is not the
        rounded master. (Version counters miss writes through `.data`.) In a bucket that lags,
        changes since the last gather are added to `shard` instead; see `follow_weights`.
        """
        if self.role.lags:
            # Usually nothing was written. A CPU finds out in one pass over memory. On an
            # accelerator the host would have to wait for the answer.
            if saves_calls(self.shard.device) or not torch.equal(self.replica, self.published):
                # Elements that were not written keep their lag, which is still to be sent.
                follow_weights(self.shard, self.published, self.replica)
                self.note_published()
        elif self.role.has_master:
            is_own = self.replica == self.shard.to(self.replica.dtype)
            torch.where(is_own, self.shard, self.replica, out=self.shard)

    def adopt_gradients(self) -> None:
        """Copies elements of `gradients` that the user has changed into an fp32 master's `mean`."""
        if self.role.has_master:
            own = self.gradients[self.own]
            was_changed = own != self.mean.to(own.dtype)
            torch.where(was_changed, own.to(self.mean.dtype), self.mean, out=self.mean)


def follow_weights(master: Tensor, before: Tensor, weights: Tensor) -> None:
    """Adds `weights` - `before` to `master`, in place; unchanged elements keep their bits.

    There is one exception: if the norm of the change is more than twice that of `weights`, or if
    `before` is not finite, `master` becomes equal to `weights`. That happens if the user restores
    weights after a divergence: what `master` had been ahead would be far too much.
    """
    dtype, norm = master.dtype, torch.linalg.vector_norm
    weights, before = weights.to(dtype), before.to(dtype)
    lag = torch.sub(master, before)
    moved = torch.where(weights == before, master, weights + lag)
    # False if a norm is nan.
    is_move = norm(weights - before) <= 2 * norm(weights)
    torch.where(is_move, moved, weights, out=master)


@dataclass(frozen=True, eq=False)
class Placement:
    """Describes where one parameter lies in the flat buffers.

    Attributes:
        parameter: The user's parameter; its `data` is a view of the flat buffer.
        view: That view of the flat buffer, also after the user has replaced `parameter.data`.
        gradient: View of the gradient buffer with the parameter's shape and strides. None means
            that there is no such buffer, and that the optimizer reads `parameter.grad`.
        buckets: Numbers of the buckets that hold the parameter.
        data_ptr: Address of `view`. If `parameter.data` has another one, the user has replaced it.
        former: The memory that the parameter had before, if processes share it (`share_memory`).
            None means that it was not shared.
    """

    parameter: nn.Parameter
    view: Tensor
    gradient: Tensor | None
    buckets: tuple[int, ...]
    data_ptr: int
    former: Tensor | None

    def was_replaced(self) -> bool:
        """Tells whether `parameter.data` is no longer the view of the flat buffer."""
        return self.parameter.data_ptr() != self.data_ptr


def storage_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns gapless strides in the tensor's memory format, such as channels_last."""
    return torch.empty_like(tensor, device="meta").stride()


def storage_shape(tensor: Tensor) -> torch.Size:
    """Returns the sizes of a tensor's dimensions in the order of its storage, outermost first."""
    dimensions = sorted(range(tensor.ndim), key=storage_strides(tensor).__getitem__, reverse=True)
    return torch.Size(tensor.shape[dimension] for dimension in dimensions)


def as_flat(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns `tensor` as 1-D in the order of `strides`: a view if these are its own, or a copy."""
    if tensor.stride() != strides:
        tensor = tensor.new_empty_strided(tensor.size(), strides).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def hash_of_bits(tensor: Tensor, before: int = 0) -> int:
    """Returns a hash of the bits of a tensor's values, and of those whose hash is `before`."""
    return crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, before)


@dataclass(frozen=True, eq=False)
class FlatBuffers:
    """Holds the buckets of a plan, by bucket number, and the placement of each parameter."""

    buckets: list[Bucket]
    placements: list[Placement]

    @property
    def lagging(self) -> list[nn.Parameter]:
        """Returns the parameters in buckets that lag; see `Role.lags`."""
        return [p.parameter for p in self.placements if self.buckets[p.buckets[0]].role.lags]

    @cached_property
    def _addresses(self) -> tuple[list[nn.Parameter], list[int]]:
        return [p.parameter for p in self.placements], [p.data_ptr for p in self.placements]

    @torch.no_grad()
    def adopt_writes(self) -> bool:
        """Takes over values that the user wrote to parameters, or set as new `data` of them. Local.

        `parameter.data` becomes a view of the flat buffer again.

        Returns:
            Whether the `data` of a parameter was replaced.
        """
        parameters, addresses = self._addresses
        # Usually none. Comparing all addresses at once is faster than a call for each placement.
        is_any = [*map(Tensor.data_ptr, parameters)] != addresses
        replaced = [one for one in self.placements if one.was_replaced()] if is_any else []
        for placement in replaced:
            placement.view.copy_(placement.parameter.data)
            placement.parameter.data = placement.view
        for bucket in self.buckets:
            bucket.adopt_writes()
        return bool(replaced)


def allocate(
    plan: BucketPlan,
    parameters: Sequence[nn.Parameter],
    role_of: Callable[[int, torch.dtype], Role],
    rank: int,
    scratch_numel: Callable[[int], int],
    *,
    keeps_gradients: bool,
) -> FlatBuffers:
    """Makes the buffers of `plan`, and moves the parameters into them. Local.

    Mutates `data` of each parameter: the values stay, the storage changes. Memory that processes
    share is kept in `Placement.former`.

    Args:
        plan: Plan over exactly these parameters, by their index.
        parameters: Parameters in the engine's order.
        role_of: (bucket number, dtype of its parameters) -> role of the bucket.
        rank: This rank.
        scratch_numel: The collectives' method of that name. With less room gloo ends the process.
        keeps_gradients: Whether 32-bit and 64-bit gradients get a buffer, as 16-bit ones always do.
            The optimizer reads `parameter.grad` otherwise.
    """
    by_family, homes = _by_family_and_tensor(plan)
    buckets: dict[int, Bucket] = {}
    placements: dict[int, Placement] = {}
    former = [one.data if is_in_shared_memory(one) else None for one in parameters]
    for numbers in by_family.values():
        like = parameters[plan.buckets[numbers[0]].slices[0].tensor]
        sizes = (plan.buckets[number].padded_numel for number in numbers)
        *offsets, numel = accumulate(sizes, initial=0)
        flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        begins = dict(zip(numbers, offsets, strict=True))
        starts = _move_data(plan, begins, parameters, flat)
        # After `_move_data`, which frees the parameters' old memory: as much as is allocated here.
        has_gradients = keeps_gradients or flat.dtype in LOW_PRECISION
        gradients = torch.zeros_like(flat) if has_gradients else flat.new_empty(0)
        for tensor, start in starts.items():
            view, buckets_of = parameters[tensor].data, tuple(homes[tensor])
            where = view.size(), view.stride(), start
            gradient = gradients.as_strided(*where) if has_gradients else None
            what = parameters[tensor], view, gradient, buckets_of, view.data_ptr(), former[tensor]
            placements[tensor] = Placement(*what)
        for number, offset in begins.items():
            spec, role = plan.buckets[number], role_of(number, flat.dtype)
            part = slice(offset, offset + spec.padded_numel)
            scratch = flat.new_empty(0 if role.is_whole else scratch_numel(spec.padded_numel))
            whole = slice(0, spec.padded_numel)
            own = whole if role.is_whole else shard_slice(whole.stop, rank, plan.world_size)
            place = flat[part], gradients[part], scratch
            buckets[number] = _bucket(number, spec, role, own, place)
    for bucket in buckets.values():
        bucket.shard.copy_(bucket.replica)
        bucket.note_published()
    return FlatBuffers(
        [buckets[number] for number in range(len(buckets))],
        [placements[index] for index in range(len(parameters))],
    )


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Whether other processes may read the tensor's memory, since `share_memory` was called."""
    # On CUDA every tensor says so.
    return tensor.is_cpu and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _by_family_and_tensor(plan: BucketPlan) -> tuple[dict[str, list[int]], dict[int, list[int]]]:
    """Returns (family -> its bucket numbers, tensor index -> numbers of the buckets with it)."""
    by_family: dict[str, list[int]] = {}
    homes: dict[int, list[int]] = {}
    for number, spec in enumerate(plan.buckets):
        by_family.setdefault(spec.family, []).append(number)
        for part in spec.slices:
            homes.setdefault(part.tensor, []).append(number)
    return by_family, homes


def shard_slice(padded_numel: int, rank: int, world_size: int) -> slice:
    """Returns the range of `rank`'s shard in a bucket of `padded_numel` elements."""
    size = padded_numel // world_size
    return slice(rank * size, (rank + 1) * size)


def _bucket(
    number: int, spec: BucketSpec, role: Role, own: slice, place: tuple[Tensor, Tensor, Tensor]
) -> Bucket:
    """Returns a bucket with the tensors that its role needs; see the table of `Role`.

    Args:
        number: Number of the bucket in the plan.
        spec: Tensors that the bucket holds.
        role: Role of the bucket.
        own: Range of the bucket that this rank steps.
        place: The bucket's `parameters`, `gradients` and `received`.
    """
    parameters, gradients, _ = place
    replica, mean = parameters[own], gradients[own]
    shard = torch.empty_like(replica) if role.lags else replica
    if parameters.dtype in LOW_PRECISION:
        shard = torch.empty_like(replica, dtype=torch.float32)
        mean = torch.empty_like(shard)
    published = torch.empty_like(replica) if role.lags else replica[:0]
    return Bucket(number, spec, role, *place, replica, shard, mean, published)


def _move_data(
    plan: BucketPlan, begins: Mapping[int, int], parameters: Sequence[nn.Parameter], flat: Tensor
) -> dict[int, int]:
    """Moves parameters into `flat`, where bucket b begins at element `begins[b]`.

    Returns tensor index -> the tensor's first element in `flat`.
    """
    starts = {
        part.tensor: begin + part.offset
        for number, begin in begins.items()
        for part in plan.buckets[number].slices
        if part.start == 0
    }
    for tensor, start in starts.items():
        parameter = parameters[tensor]
        view = flat.as_strided(parameter.size(), storage_strides(parameter), start)
        view.copy_(parameter.data)
        parameter.data = view
    return starts


@dataclass(frozen=True, eq=False)
class Chunk:
    """Holds consecutive elements of a tensor, in the order of its storage.

    Attributes:
        start: Index of the first element in the tensor.
        values: Values of the elements; of any shape, contiguous in memory.
    """

    start: int
    values: Tensor


@dataclass
class Piece:
    """Describes the part of one parameter that this rank steps in one bucket.

    Attributes:
        tensor_index: Index of the parameter in the engine's list.
        start: First element of the piece in the parameter, in the order of its storage.
        stop: First element after the piece.
        bucket: Number of the bucket.
        offset: Element of the bucket at which the piece begins.
        parameter: 1-D view of the piece in the bucket's `shard`, which the optimizer steps.
        gradient: 1-D view of the piece's mean gradient. None means that `parameter.grad` is read.
        role: Role of the bucket; SHARDED for a whole parameter that is in no bucket.
        is_plain: Whether the piece is a whole, contiguous parameter, whose gradient can be read as
            it is.
        was_stepped: Whether `parameter`, if it is a master, was stepped or loaded.
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
        """Returns the number of elements of the piece."""
        return self.stop - self.start


def shard_pieces(bucket: Bucket) -> list[Piece]:
    """Returns the pieces of the range of `bucket` that this rank steps, by their offsets."""
    own, pieces = bucket.own, []
    for part in bucket.spec.slices:
        lower, upper = max(part.offset, own.start), min(part.offset + part.numel, own.stop)
        if lower >= upper:
            continue
        start = part.start + lower - part.offset
        where = part.tensor, start, start + upper - lower, bucket.number, lower
        inside = slice(lower - own.start, upper - own.start)
        gradient = bucket.mean[inside] if bucket.mean.numel() else None
        pieces.append(Piece(*where, bucket.shard[inside], gradient, bucket.role))
    return pieces


def cut_state(key: str, value: Any, parameter: nn.Parameter, piece: Piece) -> Any:
    """Returns a copy of the part of an optimizer's state that belongs to `piece`.

    Args:
        key: Key of the state.
        value: State of the whole `parameter`. A tensor of another shape, or with the key "step", is
            copied whole. What is no tensor is returned itself.
        parameter: Parameter to which the state belongs.
        piece: Piece of the parameter.
    """
    if not isinstance(value, Tensor):
        return value
    # `step` is recognised by name, since it has the shape of a parameter without dimensions.
    if key != "step" and value.shape == parameter.shape:
        flat = as_flat(value, parameter.stride())
        # The state of fp32 masters is fp32, also if it comes from DDP, which keeps it in 16 bits.
        is_widened = piece.role.has_master and flat.is_floating_point()
        dtype = piece.parameter.dtype if is_widened else None
        return flat[piece.start : piece.stop].to(parameter.device, dtype, copy=True)
    # A copy, since the optimizer counts `step` in place, and steps each piece by itself.
    return value.clone()
