"""Tries an optimizer on small tensors: whole, as torch steps them, and as the engine steps them.

The engine's own steppers step twins of the optimizer, over stand-ins for what it trains. After each
way all must be the same, bit by bit: values, state, and what the optimizer notes besides. That says
nothing of what was not tried: tensors that look otherwise, and options that are set later.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION, FlatBuffers, Piece, allocate, cut_state
from lightning_dear.optimizers.replicated import ReplicatedOptimizer
from lightning_dear.optimizers.sharded import ShardedOptimizer, inner_step
from lightning_dear.planning import NoFusion, TensorSpec
from lightning_dear.planning.plan import ALIGNMENT

_SHAPES = ((8, 32), (72, 96), (4096,), (130,), (4, 6, 24), (6, 4, 3, 3), (16, 33, 3, 3), ())
"""What is tried in parts beside what there is: parameters may be added."""

_MAX_NUMEL = 1 << 14
"""Elements of a stand-in; that of a larger tensor has fewer, and as many dimensions."""

_MAX_KINDS = 64
"""Kinds of tensors after which no other shapes are tried."""

_SCALES = (1.0, 1e-4, 1.0, 0.0, 1e4, 1.0, 1e-9, 1.0, 30.0, 1.0, 1e2, 1.0)
"""Of the gradients, step by step. Some steps like the first follow."""

_FAR = 10**6
"""What is added before those to whatever has counted the steps."""

_NUM_LATE = 3
_STRIDE = 3 * ALIGNMENT
_SOME_LR = 1e-2
_VARYING = {"params", "param_names", "lr", "initial_lr"}

_Sample = tuple[int, Tensor, tuple[int, ...] | None]
"""What a stand-in stands for: a group's number, a parameter of it, and another shape or None."""


@torch.no_grad()
def find_difference(optimizer: Optimizer, *, on_parts: bool) -> str | None:
    """What is not as if whole tensors were stepped all at once, in words; None: nothing. Local.

    What draws torch's random numbers differs, as each way draws others; afterwards they are as they
    were.

    Args:
        optimizer: Not mutated, but for what it holds in objects that are no list, dict, or set.
        on_parts: Whether each of two ranks steps its shards; else every tensor is stepped by
            itself, later than the others.

    Raises:
        ValueError: If it changes nothing, or calls its closure more than once.
        Exception: Whatever the optimizer raises.
    """
    devices = {one.device for group in optimizer.param_groups for one in group["params"]}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        samples = _samples(optimizer, *((_SHAPES, 1) if on_parts else ((), 2)))
        whole = _Stepped(optimizer, samples)
        if all(map(torch.equal, whole.tensors, _new_twin(optimizer, samples)[1])):
            # Equal bits would say nothing.
            raise ValueError("it changes nothing")
        if not on_parts:
            return _Stepped(optimizer, samples, is_late=True).difference(whole)
        ranks = (_Stepped(optimizer, samples, rank, num_shards=2) for rank in range(2))
        return next((why for one in ranks if (why := one.difference(whole))), None)


class _Stepped:
    """A twin of an optimizer that has taken the steps, in one of the engine's ways.

    Args:
        optimizer: Whose twin.
        samples: What its stand-ins stand for.
        rank: Whose shards are stepped.
        num_shards: Into how many buckets are cut; one: whole tensors are stepped.
        is_late: Whether one by one, after the call of `step`.

    Attributes:
        twin: What has been stepped.
        tensors: The stand-ins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        samples: Sequence[_Sample],
        rank: int = 0,
        num_shards: int = 1,
        is_late: bool = False,
    ) -> None:
        self.twin, self.tensors = _new_twin(optimizer, samples)
        self._is_sharded, self._is_late = num_shards > 1, is_late
        whole = partial(ReplicatedOptimizer, decouple=is_late)
        self._stepper: Any = (ShardedOptimizer if self._is_sharded else whole)(self.twin)
        buffers = _cut(self.tensors, rank, num_shards)
        self._stepper.attach(buffers, self.tensors, rank, num_shards)
        self._stepper.adopt_state()
        generator, numel = torch.Generator().manual_seed(0), _MAX_NUMEL + _STRIDE * len(samples)
        for number, scale in enumerate((*_SCALES, *[1.0] * _NUM_LATE)):
            row = scale * torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
            if number % 4 == 1:
                # What lies in one shard may be 0 where the rest of the tensor is not.
                row[: numel - numel % _STRIDE].view(-1, 3, ALIGNMENT)[:, 0] = 0
            if number == len(_SCALES):
                states = {**self.twin.state, **self._stepper.shards.state}
                _count_on([*states.values(), *self.twin.param_groups])
            # No rank has another's loss.
            self._step(row, torch.tensor(1.0 + rank + is_late))

    def _step(self, row: Tensor, loss: Tensor) -> None:
        """One step as a Trainer makes it: gradients, parts of `row`, come in the closure."""
        stepper, step, calls = self._stepper, inner_step(self.twin), list[Tensor]()
        buffers = stepper.shards.buffers

        @torch.no_grad()
        def closure() -> Tensor:
            if calls:
                raise ValueError("it calls its closure more than once in a step")
            calls.append(loss)
            for number, placement in enumerate(buffers.placements):
                begin, gradient = number * _STRIDE, placement.gradient
                part = row[begin : begin + gradient.numel()]
                gradient.copy_(part.view(gradient.shape))
            stepper.set_gradients([True] * len(self.tensors))
            for number in (0, 1) if self._is_sharded else ():
                stepper.step_early(number)
            for _ in stepper.run(()):
                pass
            return loss

        if "closure" in signature(type(self.twin).step).parameters:
            step(self.twin, closure=closure)
        if not calls:
            # It has none, or does not call it, which a Trainer cannot do with, but others can.
            closure()
            step(self.twin)
        stepper.finish()
        stepper.restore()
        stepper.stepped_early.clear()
        stepper.clear_gradients()
        for bucket in reversed(buffers.buckets) if self._is_late else ():
            stepper.step_bucket(bucket.number)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of a piece, or what of its whole tensor's belongs to it."""
        whole: Any = self.tensors[piece.tensor_index]
        state = self.twin.state.get(whole, {})
        cut = {key: cut_state(key, value, whole, piece) for key, value in state.items()}
        return dict(self._stepper.state_of(piece)) or cut

    def difference(self, whole: _Stepped) -> str | None:
        """What is not as it is in `whole`, in words; None: nothing."""
        for piece in self._stepper.pieces:
            tensor: Any = whole.tensors[piece.tensor_index]
            own, wanted = self.state_of(piece), whole.state_of(piece)
            values = cut_state("", tensor.detach(), tensor, piece)
            is_same = own.keys() == wanted.keys() and _is_equal(own, wanted)
            if is_same and _is_equal(values, piece.parameter):
                continue
            if self._is_late:
                return "two matrices stepped one by one differ from both"
            what = ("number", "vector", "matrix", "tensor")[min(tensor.ndim, 3)]
            return f"a {what} stepped in two parts differs from it whole"
        is_same = _is_equal(vars(self.twin), vars(whole.twin))
        return None if is_same else "what it notes in its groups or attributes differs"


def _count_on(everything: Iterable[Any]) -> None:
    """Adds to whatever has counted the steps, as if there had been many more."""
    for entries in everything:
        for key, value in entries.items() if isinstance(entries, dict) else ():
            is_one = isinstance(value, int | float) or getattr(value, "ndim", 1) == 0
            if is_one and value == len(_SCALES):
                entries[key] = value + _FAR


def _is_equal(one: Any, other: Any) -> bool:
    """Of what can be compared; of dictionaries, what both have. Not-a-numbers are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.detach().flatten(), other.detach().flatten()
        is_nan = (one != one) & (other != other)
        return len(one) == len(other) and bool(((one == other) | is_nan).all())
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() & other.keys() - {"params", "state"}
        return all(_is_equal(one[key], other[key]) for key in keys)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    # Flags tell first calls from others.
    is_number = isinstance(one, int | float) and not isinstance(one, bool)
    return not is_number or one == other or one != one


def _samples(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], most: int) -> list[_Sample]:
    """Parameters of each kind in each kind of group, up to `most`, and other `shapes` beside."""
    kinds: dict[Any, list[_Sample]] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = repr({key: value for key, value in group.items() if key not in _VARYING})
        for one in group["params"]:
            if is_lazy(one) or not one.numel():
                continue
            size = min(one.numel(), _MAX_NUMEL).bit_length()
            looks = type(one), one.dtype, one.ndim, size, repr(vars(one))
            kinds.setdefault((options, looks), []).append((number, one, None))
            for shape in shapes if len(kinds) < _MAX_KINDS else ():
                kinds.setdefault((options, shape), [(number, one, shape)])
    return [sample for samples in kinds.values() for sample in samples[:most]]


def _new_twin(optimizer: Optimizer, samples: Sequence[_Sample]) -> tuple[Any, list[Any]]:
    """The optimizer with stand-ins in place of its parameters, stepped never; and these."""
    groups, generator = optimizer.param_groups, torch.Generator().manual_seed(1)
    tensors = [_stand_in(one, shape, generator) for _, one, shape in samples]
    pairs = [*zip(samples, tensors, strict=True)]
    memo: dict[int, Any] = {id(one): one for group in groups for one in group["params"]}
    memo |= {id(one): tensor for (_, one, shape), tensor in reversed(pairs) if shape is None}
    # Not by its constructor, of whose arguments nothing is known here.
    twin: Any = object.__new__(type(optimizer))
    state = {key: one for key, one in optimizer.state.items() if not isinstance(key, Tensor)}
    new: dict[str, Any] = {"state": defaultdict(dict, state), "param_groups": []}
    for name, value in {**vars(optimizer), **new}.items():
        if name == "zero_grad":
            # It may be the engine's, and drop what other ranks wait for.
            continue
        is_copied = isinstance(value, list | dict | set | Tensor)
        own = OrderedDict() if name.endswith("_hooks") else value
        vars(twin)[name] = deepcopy(own, dict(memo)) if is_copied else value
    for number in dict.fromkeys(number for number, *_ in samples):
        options = deepcopy({**groups[number], "params": None}, dict(memo))
        if not options.get("lr", 1):
            # A warm-up may begin at 0, where nothing would be seen.
            options["lr"] = options.get("initial_lr") or _SOME_LR
        options["params"] = [tensor for (one, *_), tensor in pairs if one == number]
        twin.param_groups.append(options)
    for (_, one, _), tensor in pairs:
        for key, value in optimizer.state.get(one, {}).items():
            is_like = isinstance(value, Tensor) and value.shape == one.shape
            own = value.flatten()[0].expand(tensor.shape).contiguous() if is_like else value
            twin.state[tensor][key] = deepcopy(own)
    return twin, tensors


def _stand_in(
    parameter: Tensor, shape: tuple[int, ...] | None, generator: torch.Generator
) -> Tensor:
    """A small tensor like the parameter: of its class, with its values and attributes."""
    whole = parameter.detach().as_subclass(Tensor)
    dtype = torch.float32 if whole.dtype in LOW_PRECISION else whole.dtype
    if shape is not None:
        values = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
        return Parameter(values.to(whole.device))
    most = max(whole.shape, default=1)
    while math.prod(min(size, most) for size in whole.shape) > _MAX_NUMEL:
        most = most * 7 // 8
    corner = tuple(slice(min(size, most)) for size in whole.shape)
    values = torch.empty_like(whole[corner], dtype=dtype).copy_(whole[corner])
    tensor = values.as_subclass(type(parameter)).requires_grad_()
    for name, value in vars(parameter).items():
        is_like = isinstance(value, Tensor) and value.shape == whole.shape
        vars(tensor)[name] = value[corner].clone() if is_like else value
    return tensor


def _cut(tensors: list[Any], rank: int, num_shards: int) -> FlatBuffers:
    """Makes each of the tensors the view of a bucket."""
    specs = [
        TensorSpec(index, "", one.numel(), one.element_size(), f"{one.dtype}/{one.device}")
        for index, one in enumerate(tensors)
    ]
    plan = NoFusion().plan(specs, num_shards)
    rest: Any = {"keeps_gradients": True, "lags": False}
    return allocate(plan, tensors, rank, lambda _: 0, num_shards, **rest)
