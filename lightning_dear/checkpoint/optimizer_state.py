"""Converts sharded optimizer state to and from torch's state dicts, keyed by parameter index.

Tensors of the state are either gathered to whole tensors, or left sharded for a checkpoint folder.
In the latter case a *stand-in* takes the place of each such tensor: a tensor on the meta device,
which has the shape, strides and dtype of the whole tensor and no data.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.bucket import Chunk, Piece
from lightning_dear.checkpoint.moving import Item, Wanted, move
from lightning_dear.collectives.work import Collectives
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState
from lightning_dear.optimizers.pieces import SpreadState, SteppedPieces, parameters_of

CLASS = "optimizer_class"
"""Key of an optimizer's state dict: the name of the optimizer class that the state belongs to."""

_WHOLE = -1
"""Stands for the parameter index and the bucket number in a `Piece` that is a whole parameter
outside all buckets."""


class Scalar(NamedTuple):
    """A state tensor that has no value for each element (`step`), as it is sent to other ranks.

    It is taken to be equal on all ranks that have the parameter's state.

    Attributes:
        value: The tensor, on the CPU.
        is_on_cpu: Whether the optimizer keeps it on the CPU, and not on the parameter's device.
    """

    value: Tensor
    is_on_cpu: bool


_Spread = tuple[Tensor, list[Chunk]]
"""(stand-in, this rank's chunks of the tensor), see `SpreadState.chunks`."""


class ShardedState(dict[str, Any]):
    """An optimizer's state dict in which stand-ins take the place of sharded tensors.

    `sharded_state` makes it. It can be read like an ordinary state dict, but only `folder.save` can
    write it. To pickle or copy it, or to pass it to `load_state_dict`, raises TypeError.

    Args:
        packed: The state dict.
        chunks: (stand-in, this rank's chunks of the tensor), for every stand-in in `packed`. Empty
            on ranks that are not to save it.
        parameters: The optimizer's parameters, which the checkpoint holds as the module's weights.
            All ranks hold them, so `folder.save` lets each rank write some, instead of rank 0 all.
    """

    def __init__(
        self, packed: Mapping[str, Any], chunks: Iterable[_Spread], parameters: Sequence[Parameter]
    ) -> None:
        super().__init__(packed)
        self.chunks = tuple(chunks)
        self.parameters = parameters

    @override
    def __reduce_ex__(self, protocol: Any = None) -> NoReturn:
        raise TypeError(
            "This optimizer state is sharded, or whole on rank 0 alone, and cannot be pickled,"
            " copied or loaded. Save it with trainer.save_checkpoint on all ranks. To get it whole"
            " on all ranks, leave out save_distributed_checkpoint=True and call"
            " strategy.optimizer_state(optimizer, on_all_ranks=True)."
        )

    # `Optimizer.load_state_dict` copies its argument first, and so raises this error.
    copy = __reduce_ex__


def check_class(optimizer: Optimizer, state_dict: Mapping[str, Any], of_what: str = "") -> None:
    """Raises if `state_dict` is the state of another optimizer class.

    State that earlier versions or other strategies have saved does not name its class, and passes.
    Classes are compared by name. `of_what` says in the message whose state it is.

    Raises:
        ValueError: If the saved class is neither the optimizer's class nor a base of it. The
            message names both.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if (saved := state_dict.get(CLASS, kinds[0])) not in kinds:
        named = saved + of_what
        raise ValueError(
            f"This is the state of {named}, from which {kinds[0]} cannot go on. Train with {saved},"
            f" or load the weights alone. To load the state all the same, torch.load the file,"
            f" delete the key '{CLASS}' of this state, and torch.save it."
        )


@torch.inference_mode(False)
@torch.no_grad()
def spread_state(stepper: SteppedPieces, collectives: Collectives) -> SpreadState:
    """Returns the optimizer state of all ranks, with stand-ins for sharded tensors.

    Collective. Blocks. Ranks send each other dtypes, scalars and other values, but no sharded
    tensors. This rank's chunks are views of the state that the optimizer steps with: the next
    step changes them. Parameters without state have no entry. If an ended plan has left its state
    in `stepper.left`, that is returned, and nothing is sent.
    """
    if stepper.left is not None:
        return stepper.left
    parts: defaultdict[int, list[tuple[Piece, Mapping[str, Any]]]] = defaultdict(list)
    described: dict[int, dict[str, Any]] = {}
    for piece in stepper.pieces:
        if own := stepper.state_of(piece):
            parts[piece.tensor_index].append((piece, own))
            described[piece.tensor_index] = {k: _described(one, piece) for k, one in own.items()}
    of_ranks = collectives.all_gather_object(described)
    merged = {index: entries for of_rank in of_ranks for index, entries in of_rank.items()}
    entries: dict[Parameter, dict[str, Any]] = {}
    chunks: list[_Spread] = []
    for index, own in sorted(merged.items()):
        like, layout = stepper.shards.parameters[index], stepper.shards.layouts[index]
        entries[like] = {key: _restored(value, like, *layout) for key, value in own.items()}
        for key, value in entries[like].items():
            if _is_stand_in(value):
                here = [Chunk(piece.start, own[key]) for piece, own in parts[index] if key in own]
                chunks.append((value, [one for one in here if one.values.dtype == value.dtype]))
    return SpreadState(entries, chunks)


def sharded_state(stepper: SteppedPieces, collectives: Collectives) -> ShardedState:
    """Returns the state dict of the optimizer, with its tensors left sharded. Collective. Blocks.

    The chunks are views, as in `spread_state`. Write or gather them before the next step, which
    changes them.
    """
    spread = spread_state(stepper, collectives)
    parameters = stepper.shards.parameters or list(spread.entries)
    return ShardedState(packed(stepper.optimizer, spread.entries), spread.chunks, parameters)


@torch.no_grad()
def gathered(
    state: ShardedState, collectives: Collectives, device: torch.device, *, on_rank_0: bool
) -> dict[str, Any]:
    """Returns `state` with whole tensors on the CPU in place of stand-ins. Collective. Blocks.

    Elements that no rank has are 0. If `state` has no stand-ins, nothing is sent.

    Args:
        state: State dict that `sharded_state` has returned.
        collectives: Collectives of the pipeline, which send the chunks.
        device: Device of the messages that are sent.
        on_rank_0: Whether only rank 0 gets whole tensors. Other ranks then get a `ShardedState`
            that keeps the stand-ins and has no chunks, so that it cannot be saved.
    """
    if not state.chunks:
        return dict(state)
    holds = collectives.world.rank == 0 or not on_rank_0
    room = partial(torch.zeros_like, device="cpu")
    parts = [(one, own, Wanted(0, one.numel(), partial(room, one))) for one, own in state.chunks]
    # `move` clears the lists of chunks, so it gets copies: the optimizer still has its state.
    items = [Item(like.dtype, list(own), [want] * holds) for like, own, want in parts]
    move(items, collectives, device)
    whole = {id(like): want.values for like, _, want in parts if holds}
    return _filled(dict(state), whole) if holds else ShardedState(state, (), ())


def _filled(value: Any, whole: Mapping[int, Tensor]) -> Any:
    """Returns the nested dict `value` with each stand-in replaced by `whole[id(stand-in)]`."""
    if type(value) is dict:
        return {key: _filled(item, whole) for key, item in value.items()}
    return whole.get(id(value), value)


@torch.inference_mode(False)
@torch.no_grad()
def hand_on(
    left: SpreadState, stepper: SteppedPieces, known: set[Parameter], collectives: Collectives
) -> AdoptedState:
    """Moves the optimizer state of an ended plan to the ranks that step it now.

    Collective. Blocks. Parameters that are in no bucket now get their whole state in
    `optimizer.state`, on every rank. Entries of `optimizer.state` that are there already are kept.

    Args:
        left: State that the ended plan has left. Mutated: its lists of chunks are cleared as they
            are sent, to free memory.
        stepper: Has the pieces of the new plan, or none if there is no plan. Mutated: gets the
            state and the masters.
        known: The module's parameters. State of other parameters is dropped.
        collectives: Collectives that send the state.

    Returns:
        Whether a piece of this rank took over its master, and whether the master of a piece of this
        rank was dropped, since its bucket has no masters now. Weights are not compared.

    Raises:
        ValueError: If a parameter has another shape or memory format than its state.
    """
    pieces: defaultdict[Tensor, list[Piece]] = defaultdict(list)
    for piece in stepper.pieces:
        pieces[stepper.shards.parameters[piece.tensor_index]].append(piece)
    for parameter in known - set(stepper.shards.parameters):
        pieces[parameter] = [Piece(_WHOLE, 0, parameter.numel(), _WHOLE, 0, parameter, None)]
    chunks = {id(stand_in): own for stand_in, own in left.chunks}
    items: list[Item] = []
    new: list[tuple[Piece, dict[str, Any]]] = []
    for parameter, described in left.entries.items():
        _check_layout(parameter, described)
        places = [(piece, dict.fromkeys(described)) for piece in pieces[parameter]]
        for key, value in described.items():
            want = [wanted for place in places for wanted in _wanted(key, value, *place)]
            if _is_stand_in(value):
                items.append(Item(value.dtype, chunks[id(value)], want))
        new += places
    move(items, collectives, stepper.device)
    had_master: set[bool] = set()
    for piece, own in new:
        state = stepper.shards.state
        if piece.bucket == _WHOLE:
            state = stepper.optimizer.state
            own.update(state.get(piece.parameter, {}))
        elif MASTER_KEY in own:
            del own[MASTER_KEY]
            piece.was_stepped = piece.role.has_master
            had_master.add(piece.role.has_master)
        if own:
            state[piece.parameter] = own
    return AdoptedState(True in had_master, False in had_master)


def _check_layout(parameter: Parameter, described: Mapping[str, Any]) -> None:
    """Raises if the state was made for a parameter of another shape or memory format.

    Raises:
        ValueError: In that case. Only stand-ins in `described` are compared with `parameter`.
    """

    def layout(tensor: Tensor) -> list[tuple[int, int]]:
        # The stride of a dimension of size 1 means nothing and may be any number.
        return [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]

    if any(_is_stand_in(one) and layout(one) != layout(parameter) for one in described.values()):
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} has another shape or memory format than"
            " when its optimizer's state was made. Change it before the first fit, or with a new"
            " optimizer, or save a checkpoint before the change and resume from that."
        )


def _wanted(key: str, value: Any, piece: Piece, own: dict[str, Any]) -> list[Wanted]:
    """Prepares the state of `piece` under `key`. Returns the range to receive, if any.

    A value that is no stand-in is put into `own` at once, and nothing is to be received. For a
    stand-in, the returned range has memory for the piece's elements of the tensor: for a master the
    `piece.parameter` itself, otherwise a new tensor that is put into `own`. Nothing is received of
    a master if the piece has no master now, so that the old one is dropped.

    Args:
        key: Key of the state, such as "exp_avg".
        value: The value, or the stand-in of a sharded tensor.
        piece: Piece of the new plan, or a whole parameter in no bucket.
        own: State of the piece. Mutated.
    """
    is_master = key == MASTER_KEY and piece.bucket != _WHOLE
    if not _is_stand_in(value):
        own[key] = value.clone() if isinstance(value, Tensor) else value
    if not _is_stand_in(value) or (is_master and not piece.role.has_master):
        return []
    # State of pieces that have fp32 masters is fp32 too, as in `cut_state`.
    is_cast = piece.role.has_master and value.is_floating_point()
    dtype = piece.parameter.dtype if is_cast else value.dtype

    def room() -> Tensor:
        like = piece.parameter
        made = like if is_master else torch.zeros_like(like, dtype=dtype, requires_grad=False)
        own[key] = made
        return made

    return [Wanted(piece.start, piece.stop, room)]


def packed(optimizer: Optimizer, state: Mapping[Parameter, Any]) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with the entries of `state` added.

    Where both `optimizer.state` and `state` have an entry, that of `optimizer.state` counts: it was
    put there later, for instance by `load_state_dict`. State of parameters that are in no parameter
    group is left out.
    """
    # Only `state_dict` knows the parameter indices, so `optimizer.state` is replaced meanwhile.
    whole: dict[Any, Any] = dict(optimizer.state)
    whole.update((one, {**own, **whole.get(one, {})}) for one, own in state.items())
    # `state_dict` raises KeyError for a parameter that is in no group any more.
    for gone in {key for key in whole if isinstance(key, Tensor)} - set(parameters_of(optimizer)):
        del whole[gone]
    own, optimizer.state = optimizer.state, defaultdict(dict, whole)
    try:
        state_dict = optimizer.state_dict()
        return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}
    finally:
        optimizer.state = own


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _described(value: Any, piece: Piece) -> Any:
    """Returns what other ranks are told of a state value of `piece`.

    That is the dtype of a tensor with an element for each of the piece's elements, a `Scalar` for
    another tensor, and otherwise the value itself.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return value.dtype
    # Moved to the CPU because it is pickled for other ranks, which may not have its device.
    return Scalar(value.cpu(), value.device.type == "cpu")


def _restored(value: Any, like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Returns the state value that `_described` has described: the inverse of that function.

    A dtype becomes a stand-in for the whole tensor. A `Scalar` becomes a tensor on the CPU or on
    the device of `like`, wherever the optimizer keeps it.

    Args:
        value: Description that a rank has sent.
        like: The parameter, whose device is used.
        shape: Shape of the stand-in.
        strides: Strides of the stand-in.
    """
    if isinstance(value, torch.dtype):
        return torch.empty_strided(shape, strides, dtype=value, device="meta")
    if isinstance(value, Scalar):
        return value.value.to("cpu" if value.is_on_cpu else like.device, copy=True)
    return value
