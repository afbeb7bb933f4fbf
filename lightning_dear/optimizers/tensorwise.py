"""Which optimizers may be stepped on parts of tensors, and which on one tensor after the other.

torch's own are known by class. Anything else is tried on small tensors: whole, as torch steps them,
and as the engine steps them. The engine's own steppers step twins of the optimizer, over stand-ins
for what it trains. After each way all must be the same, bit by bit: values, state, and what the
optimizer notes besides. That says nothing of what was not tried: tensors that look otherwise, and
options that are set later.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION, Piece, allocate, cut_state
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.optimizers.replicated import ReplicatedOptimizer
from lightning_dear.optimizers.sharded import ShardedOptimizer, inner_step
from lightning_dear.planning import NoFusion, TensorSpec
from lightning_dear.planning.plan import ALIGNMENT

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_OTHERS = (
    "adafactor distributedshampoo galoreadamw lamb lars lbfgs muon novograd prodigy shampoo soap"
    " sparseadam"
)

ELEMENTWISE = frozenset[type[Optimizer]](getattr(torch.optim, name) for name in _NAMES.split())
_WHOLE_TENSOR = frozenset(_OTHERS.split())
_KNOWN = ELEMENTWISE | {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}


def is_trusted(optimizer: Optimizer) -> bool:
    """Whether it is known to be element-wise: of one of torch's own classes, not of a subclass.

    Parameters of a class of their own may do something else when they are stepped.
    """
    groups = optimizer.param_groups
    is_plain = all(type(one) is Parameter for group in groups for one in group["params"])
    return is_plain and type(optimizer) in ELEMENTWISE


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Why it would give another result on parts of tensors, and what to use; None: it would not."""
    name, why = type(optimizer).__name__, None
    if name.lower() in _WHOLE_TENSOR:
        why = "it works on whole tensors, not element by element"
    elif not is_trusted(optimizer):
        why = find_difference(optimizer, on_parts=True)
    return why and (
        f"strategy='dear' cannot shard {name}: {why}. Use gather='gradients', which steps whole"
        f" tensors on every rank; an element-wise optimizer ({_names(ELEMENTWISE)}, or one that"
        " passes the same test); or strategy='ddp'."
    )


def why_not_tensorwise(optimizer: Optimizer) -> str | None:
    """Why it would give another result if tensors are stepped one by one; None: it would not."""
    why = None if type(optimizer) in _KNOWN else find_difference(optimizer, on_parts=False)
    return why and (
        "strategy='dear' with gather='gradients' steps each tensor when its gradient has"
        f" arrived, and {type(optimizer).__name__} does not allow that: {why}. Use an optimizer"
        f" that treats every tensor on its own ({_names(_KNOWN)}, or one that passes the same"
        " test), or strategy='ddp'."
    )


def _names(kinds: frozenset[type[Optimizer]]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def why_not_steppable(optimizer: Optimizer, options: ExchangeOptions) -> str | None:
    """Why it cannot be stepped as `options` steps it, and what to use; None: it can."""
    name = type(optimizer).__name__
    wrapped = [type(one).__name__ for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if wrapped:
        return (
            f"strategy='dear' does not support {name}, which wraps another optimizer: what"
            f" {wrapped[0]} steps, and its state, would be out of sight. Use {wrapped[0]} by"
            " itself, or strategy='ddp'."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return (
            f"{name}(differentiable=True) lets autograd record its steps, and strategy='dear' makes"
            " them outside of it. Leave it out."
        )
    if options.is_of_gradients:
        return _why_not_whole(optimizer, _with_masters(options))
    why = why_not_elementwise(optimizer)
    if why is not None and (other := _why_not_whole(optimizer, "")) is not None:
        return f"{_without_remedy(why)} And gather='gradients' is no way out: {other}"
    return why


def _without_remedy(why: str) -> str:
    return why.partition(" Use ")[0]


def _why_not_whole(optimizer: Optimizer, or_masters: str) -> str | None:
    why = why_not_tensorwise(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    narrow = {str(p.dtype) for p in parameters if p.dtype in LOW_PRECISION}
    if why is None and narrow:
        return (
            f"gather='gradients' steps parameters as they are, and an update is often below the"
            f" resolution of {', '.join(sorted(narrow))}; use {or_masters}a mixed precision."
        )
    return why


def _with_masters(options: ExchangeOptions) -> str:
    """How fp32 masters can be stepped with what else is set; nothing where they cannot."""
    codec = options.codec
    if codec is not None and (codec.all_reduces or codec.is_scattered):
        return ""
    way = "gather='parameters'"
    if not options.decouple:
        way += " without decouple=False"
    if codec is not None and default_gather(codec, options.groups) == "gradients":
        way += f" and halves='reduce' in {codec.name}"
    return f"{way}, which steps fp32 masters of 16-bit parameters, or "


def choose_options(
    optimizers: Sequence[Optimizer], options: ExchangeOptions, or_else: ExchangeOptions | None
) -> tuple[ExchangeOptions, str | None, str | None]:
    """`options` if all can be stepped so, or else `or_else`, if it is given and they can. Local.

    Returns:
        What travels; why they cannot be stepped so; what people are to be told.
    """
    problem, remark = _problem(optimizers, options), None
    names = dict.fromkeys(type(one).__name__ for one in optimizers if not is_trusted(one))
    if problem is not None and or_else is not None and _problem(optimizers, or_else) is None:
        why = _without_remedy(problem)
        options, problem = or_else, None
        remark = (
            f"{why} So every rank gets whole gradients instead of parameters, and has the whole"
            " optimizer state, as with gather='gradients'."
        )
    elif problem is None and names and not options.is_of_gradients:
        remark = (
            f"strategy='dear' steps {', '.join(names)} on parts of tensors: in a test with small"
            " tensors the bits were those of whole ones. That does not prove it of all. If an"
            " update of an element may depend on others, use gather='gradients', which steps whole"
            " tensors."
        )
    return options, problem, remark


def _problem(optimizers: Sequence[Optimizer], options: ExchangeOptions) -> str | None:
    return next(filter(None, (why_not_steppable(one, options) for one in optimizers)), None)


# --- trials on small tensors ----------------------------------------------------------------------

_SHAPES = ((8, 32), (72, 96), (4096,), (130,), (4, 6, 24), (6, 4, 3, 3), (16, 33, 3, 3), ())
"""What is tried in parts beside what there is: parameters may be added."""

_MAX_NUMEL = 1 << 14
"""Elements of a stand-in; that of a larger tensor has fewer, and as many dimensions."""

_MAX_KINDS = 64
"""Kinds of tensors after which no other shapes are tried."""

_SCALES = (1e-7, 1e-4, 1.0, 0.0, 1e4, 1.0, 1e-9, 1.0, 30.0, 1.0, 1e2, 1.0)
"""Of the gradients, step by step. Some more of scale 1 follow."""

_FAR = 10**6
"""What is added before those to whatever has counted the steps."""

_NUM_LATE = 3
_STRIDE = 3 * ALIGNMENT
_VARYING = {"params", "param_names", "lr", "initial_lr"}

_Samples = list[tuple[int, Tensor, tuple[int, ...] | None]]
"""What stand-ins stand for: a group's number, a parameter of it, and another shape or None."""


@torch.no_grad()
def find_difference(optimizer: Optimizer, *, on_parts: bool) -> str | None:
    """What is not as if whole tensors were stepped all at once, in words; None: nothing. Local.

    What draws torch's random numbers differs, as each way draws others; afterwards they are as they
    were.

    Args:
        optimizer: Not mutated, but for what it holds in objects that are no list, dict, or set.
        on_parts: Whether each of two ranks steps its shards; else every tensor is stepped by
            itself, later than the others.
    """
    devices = {one.device for group in optimizer.param_groups for one in group["params"]}
    ways = [("parts", 0), ("parts", 1)] if on_parts else [("late", 0)]
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            samples = _samples(optimizer, *((_SHAPES, 1) if on_parts else ((), 2)))
            if not samples:
                # Of layers that have no shape yet, which others name.
                return None
            whole = _Trial(optimizer, samples, "whole")
            others = [_Trial(optimizer, samples, *way) for way in ways]
            steps = zip(*(one.steps() for one in (whole, *others)), strict=True)
            for number, _ in enumerate(steps):
                # First of all after a small step, of which large ones round away what differs.
                for one in others if number % 14 == 0 else ():
                    if why := one.difference(whole):
                        return why
            if all(map(torch.equal, whole.tensors, _new_twin(optimizer, samples)[1])):
                # Equal bits would say nothing.
                raise ValueError("it changes nothing")
            return None
    except Exception as error:
        hint = "" if on_parts else "; note that a step must skip parameters whose .grad is None"
        return f"stepping it on small matrices failed ({error}{hint})"


class _Trial:
    """A twin of an optimizer that takes the steps, in one of the engine's ways.

    Args:
        optimizer: Whose twin.
        samples: What its stand-ins stand for.
        way: "whole": all tensors at once. "late": one by one, after the call of `step`. "parts":
            the shards of one of two ranks.
        rank: Which one.

    Attributes:
        twin: What is stepped.
        tensors: The stand-ins.
    """

    def __init__(self, optimizer: Optimizer, samples: _Samples, way: str, rank: int = 0) -> None:
        self.twin, self.tensors = _new_twin(optimizer, samples)
        self._is_late, self._is_sharded = way == "late", way == "parts"
        # A bucket for each tensor.
        num_shards, rest = 1 + self._is_sharded, {"keeps_gradients": True, "lags": False}
        specs = [
            TensorSpec(index, "", one.numel(), one.element_size(), f"{one.dtype}/{one.device}")
            for index, one in enumerate(self.tensors)
        ]
        plan = NoFusion().plan(specs, num_shards)
        buffers = allocate(plan, self.tensors, rank, lambda _: 0, num_shards, **rest)
        whole = partial(ReplicatedOptimizer, decouple=self._is_late)
        self._stepper: Any = (ShardedOptimizer if self._is_sharded else whole)(self.twin)
        self._stepper.attach(buffers, self.tensors)
        self._stepper.adopt_state()
        # No rank has another's loss.
        self._loss = torch.tensor(1.0 + rank + self._is_late)

    def steps(self) -> Iterator[None]:
        """Makes the steps, and yields after each."""
        numel = _MAX_NUMEL + _STRIDE * len(self.tensors)
        generator = torch.Generator().manual_seed(0)
        for number, scale in enumerate((*_SCALES, *[1.0] * _NUM_LATE)):
            row = scale * torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
            if number % 4 == 1:
                # What lies in one shard may be 0 where the rest of the tensor is not.
                row[: numel - numel % _STRIDE].view(-1, 3, ALIGNMENT)[:, 0] = 0
            if number == len(_SCALES):
                states = {**self.twin.state, **self._stepper.shards.state}
                _count_on([*states.values(), *self.twin.param_groups])
            self._step(row)
            yield

    def _step(self, row: Tensor) -> None:
        """One step as a Trainer makes it: gradients, parts of `row`, come in the closure."""
        stepper, runs, has_begun = self._stepper, list[Sequence[int]](), False

        @torch.no_grad()
        def closure() -> Tensor:
            nonlocal has_begun
            if has_begun:
                raise ValueError("it calls its closure more than once in a step")
            has_begun = True
            for number, placement in enumerate(stepper.shards.buffers.placements):
                gradient = placement.gradient
                gradient.copy_(row[_STRIDE * number :][: gradient.numel()].view(gradient.shape))
            stepper.set_gradients([True] * len(self.tensors))
            for number in (0, 1) if self._is_sharded else ():
                stepper.step_early(number)
            runs.extend(stepper.run(()))
            return self._loss

        try:
            inner_step(self.twin, closure=closure)
        except Exception:
            if has_begun:
                raise
        if not has_begun:
            # It takes none, or does not call it, which a Trainer cannot do with, but others can.
            closure()
            inner_step(self.twin)
        stepper.finish()
        stepper.restore()
        stepper.stepped_early.clear()
        stepper.clear_gradients()
        for (number,) in reversed(runs) if self._is_late else ():
            stepper.step_bucket(number)

    def entries_of(self, piece: Piece) -> dict[str, Any]:
        """The values of a piece, and its state: its own, or what of its whole tensor's is its."""
        whole: Any = self.tensors[piece.tensor_index]
        entries = {"": whole.detach(), **self.twin.state.get(whole, {})}
        cut = {key: cut_state(key, value, whole, piece) for key, value in entries.items()}
        return cut | dict(self._stepper.state_of(piece))

    def difference(self, whole: _Trial) -> str | None:
        """What is not as it is in `whole`, in words; None: nothing."""
        for piece in self._stepper.pieces:
            own, wanted = self.entries_of(piece), whole.entries_of(piece)
            if own.keys() == wanted.keys() and _is_equal(own, wanted):
                continue
            if self._is_late:
                return "two matrices stepped one by one differ from both"
            num_dimensions = min(self.tensors[piece.tensor_index].ndim, 3)
            what = ("number", "vector", "matrix", "tensor")[num_dimensions]
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
        is_alike = one.numel() == other.numel()
        return is_alike and torch.allclose(one.flatten(), other.flatten(), 0, 0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() & other.keys() - {"params", "state"}
        return all(_is_equal(one[key], other[key]) for key in keys)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    # Flags tell first calls from others.
    is_number = isinstance(one, int | float) and not isinstance(one, bool)
    return not is_number or one == other or one != one


def _samples(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], most: int) -> _Samples:
    """Parameters of each kind in each kind of group, up to `most`, and other `shapes` beside."""
    kinds: dict[Any, _Samples] = {}
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


def _new_twin(optimizer: Optimizer, samples: _Samples) -> tuple[Any, list[Any]]:
    """The optimizer with stand-ins in place of its parameters, stepped never; and these."""
    tensors = [_stand_in(one, shape) for _, one, shape in samples]
    pairs = [*zip(samples, tensors, strict=True)]
    groups = optimizer.param_groups
    memo: dict[int, Any] = {id(one): one for group in groups for one in group["params"]}
    memo |= {id(one): tensor for (_, one, shape), tensor in reversed(pairs) if shape is None}
    # Not by its constructor, of whose arguments nothing is known here.
    twin: Any = object.__new__(type(optimizer))
    state = {key: one for key, one in optimizer.state.items() if not isinstance(key, Tensor)}
    vars(twin)["state"] = defaultdict(dict, state)
    for name, value in vars(optimizer).items():
        # `zero_grad` may be the engine's, and drop what other ranks wait for.
        if name in ("state", "zero_grad"):
            continue
        is_copied = isinstance(value, list | dict | set | Tensor)
        own = OrderedDict() if name.endswith("_hooks") else value
        vars(twin)[name] = deepcopy(own, memo) if is_copied else value
    for number, group in enumerate(twin.param_groups):
        group["params"] = [tensor for (one, *_), tensor in pairs if one == number]
        if not group.get("lr", 1):
            # A warm-up may begin at 0, where nothing would be seen.
            group["lr"] = group.get("initial_lr") or 1e-2
    twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    for (_, one, _), tensor in pairs:
        for key, value in optimizer.state.get(one, {}).items():
            is_like = isinstance(value, Tensor) and value.shape == one.shape
            own = value.flatten()[0].expand(tensor.shape).contiguous() if is_like else value
            twin.state[tensor][key] = deepcopy(own)
    return twin, tensors


def _stand_in(parameter: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """A small tensor like the parameter: of its class, with its values and attributes."""
    whole = parameter.detach().as_subclass(Tensor)
    dtype = torch.float32 if whole.dtype in LOW_PRECISION else whole.dtype
    if shape is not None:
        values = torch.linspace(-1, 1, math.prod(shape), dtype=dtype, device=whole.device)
        return Parameter(values.view(shape))
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
