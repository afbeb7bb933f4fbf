"""Tells whether an optimizer can be stepped on parts of tensors, or on one tensor at a time.

torch's own optimizers are known by class. Any other optimizer is tried: twins of it, with the
options of its groups, step small tensors both whole and in the engine's way. After each step values
and state must be exactly equal. The trial proves nothing for other shapes, for later steps, and for
options that are set later.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from inspect import signature
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION, Piece
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers import pieces, replicated, sharded
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


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Says why the optimizer gives other results on parts of tensors than on whole ones. Local.

    Returns:
        Sentences for the user, with what to use instead. None means that the optimizer is one of
        `ELEMENTWISE` without unusual parameters, or that a trial found no difference.
    """
    name, why, held = type(optimizer).__name__, None, pieces.parameters_of(optimizer)
    # Parameters of lazy layers are left out, since `check_module_states` refuses them.
    strange = {*map(type, held)} - {Parameter, UninitializedParameter}
    attributes = ((one, *pair) for one in held for pair in vars(one).items())
    uncuttable = (key for one, key, value in attributes if pieces.is_uncuttable(value, one))
    if name.lower() in _WHOLE_TENSOR:
        why = "it works on whole tensors, not element by element"
    elif strange:
        kind = min(one.__name__ for one in strange)
        why = f"it holds parameters of class {kind}, which may be more than their elements"
    elif (key := next(uncuttable, None)) is not None:
        why = f"the attribute '{key}' of a parameter is a tensor of another shape"
    elif keeper := _keeper(optimizer):
        why = f"it keeps parameters in its attribute '{keeper}', where their pieces are not found"
    elif type(optimizer) not in ELEMENTWISE:
        why = find_difference(optimizer, on_parts=True)
    return why and (
        f"strategy='dear' cannot shard {name}: {why}. Use gather='gradients', which steps whole"
        f" tensors on every rank; an element-wise optimizer ({_names(ELEMENTWISE)}, or one that"
        " passes the same test); or strategy='ddp'."
    )


def why_not_tensorwise(optimizer: Optimizer) -> str | None:
    """Says why the optimizer gives other results if it steps one tensor at a time. Local.

    Returns:
        Sentences for the user, with what to use instead. None means that the optimizer is one of
        `_KNOWN`, or that a trial found no difference, and that no parameter has 16 bits.
    """
    if type(optimizer) not in _KNOWN and (why := find_difference(optimizer, on_parts=False)):
        return (
            "strategy='dear' with gather='gradients' steps each tensor when its gradient has"
            f" arrived, and {type(optimizer).__name__} does not allow that: {why}. Use an optimizer"
            f" that treats every tensor on its own ({_names(_KNOWN)}, or one that passes the same"
            " test), or strategy='ddp'."
        )
    dtypes = {one.dtype for one in pieces.parameters_of(optimizer)}
    if narrow := sorted(str(dtype) for dtype in dtypes if dtype in LOW_PRECISION):
        return (
            f"gather='gradients' steps {', '.join(narrow)} parameters without fp32 masters,"
            " so that small updates are rounded away. Use a mixed precision, or gather='parameters'"
            " where the optimizer and the compressor allow it: it steps fp32 masters."
        )
    return None


def _keeper(optimizer: Optimizer) -> str | None:
    """Returns the name of an attribute that holds parameters, or their ids. None means none.

    Looks into lists, tuples, sets and mappings of the optimizer.
    """
    held = set(map(id, pieces.parameters_of(optimizer)))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups") or not isinstance(value, Collection):
            continue
        found = chain(value, value.values() if isinstance(value, Mapping) else ())
        if any(id(one) in held or (type(one) is int and one in held) for one in found):
            return name
    return None


def _names(kinds: frozenset[type[Optimizer]]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def why_not_steppable(optimizer: Optimizer, options: ExchangeOptions) -> str | None:
    """Says why the optimizer cannot be stepped in the way that `options` asks for. Local.

    That way is to step whole tensors, each when its gradient has arrived, if gradients are
    gathered. Otherwise it is to step parts of tensors.

    Returns:
        Sentences for the user, with what to use instead. None means that it can, as far as a trial
        shows.
    """
    name = type(optimizer).__name__
    wrapped = [type(one).__name__ for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if wrapped:
        return (
            f"strategy='dear' does not support {name}, which wraps another optimizer. Use"
            f" {wrapped[0]} by itself, or strategy='ddp'. The steps and the state of the"
            f" {wrapped[0]} inside could not be seen."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return (
            f"strategy='dear' does not support {name}(differentiable=True). Leave differentiable"
            " out: steps are made outside of autograd, which cannot record them."
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return (
            f"strategy='dear' cannot shard {name}: its step needs a closure, which it may call"
            " several times. Use strategy='ddp', or an optimizer whose step needs none."
        )
    if options.is_of_gradients:
        return why_not_tensorwise(optimizer)
    why = why_not_elementwise(optimizer)
    if why is not None and (other := why_not_tensorwise(optimizer)) is not None:
        return f"{_without_remedy(why)} And gather='gradients' is no way out: {other}"
    return why


def _without_remedy(why: str) -> str:
    return why.partition(" Use ")[0]


def choose_options(
    optimizers: Sequence[Optimizer], options: ExchangeOptions, or_else: ExchangeOptions | None
) -> tuple[ExchangeOptions, str | None, str | None]:
    """Chooses between `options` and `or_else` by what all optimizers allow. Local.

    Args:
        optimizers: The user's optimizers.
        options: Options to use if all optimizers can be stepped with them.
        or_else: Options to use otherwise, if all can be stepped with these. None means no others.

    Returns:
        The chosen options, why an optimizer cannot be stepped with them, and a remark for the user.
        None in place of a sentence means that there is nothing to say. If neither options will do,
        they are `options` with the reason.
    """
    problem, remark = _problem(optimizers, options), None
    names = dict.fromkeys(type(o).__name__ for o in optimizers if type(o) not in ELEMENTWISE)
    if problem is not None and or_else is not None and _problem(optimizers, or_else) is None:
        remark = (
            f"{_without_remedy(problem)} So gather='gradients' is used: every rank gets whole"
            " gradients instead of parameters, and has the whole optimizer state."
        )
        options, problem = or_else, None
    elif problem is None and names and not options.is_of_gradients:
        remark = (
            f"strategy='dear' steps {', '.join(names)} on parts of tensors: in a test with small"
            " tensors the bits were those of whole ones. If an element's update may depend on other"
            " elements, use gather='gradients', which steps whole tensors. The test proves nothing"
            " for other shapes and options."
        )
    return options, problem, remark


def _problem(optimizers: Sequence[Optimizer], options: ExchangeOptions) -> str | None:
    return next(filter(None, (why_not_steppable(one, options) for one in optimizers)), None)


class TriedOptions:
    """Tries an optimizer again when an option is set that was not set in the last trial.

    An option is not set if it is 0, False or None, or is not there. For example, the update may
    depend on the whole tensor only with weight decay, which a schedule brings later. An option that
    is a string counts as set to each of its values. Public attributes of the optimizer that are
    numbers or strings are options, too.

    Args:
        optimizer: The optimizer, right after its trial.
        options: Options that it was tried with.
    """

    def __init__(self, optimizer: Optimizer, options: ExchangeOptions) -> None:
        self._optimizer, self._options = optimizer, options
        self._is_known = type(optimizer) in (_KNOWN if options.is_of_gradients else ELEMENTWISE)
        self._set = self._find()

    def _find(self) -> set[tuple[str, str]]:
        """(place and name, word) of each option that is set; the word is "" if it is a number."""
        if self._is_known:
            return set()
        attributes = vars(self._optimizer).items()
        own = {k: v for k, v in attributes if k[0] != "_" and isinstance(v, int | float | str)}
        held = [(type(self._optimizer).__name__, own)]
        held += [(f"group {n}", one) for n, one in enumerate(self._optimizer.param_groups)]
        return {
            (f"{key} of {place}", value if isinstance(value, str) else "")
            for place, options in held
            for key, value in options.items()
            if key not in _VARYING and _is_set(value)
        }

    def note(self) -> None:
        """Notes what the optimizer's own step has set, such as a counter. Local."""
        self._set |= self._find()

    def check(self) -> None:
        """Tries again if an option is set that was not. Local, to be called before every step.

        Raises:
            RuntimeError: If the optimizer cannot be stepped in this way with the new option.
        """
        new = self._find() - self._set
        self._set |= new
        if new and (why := why_not_steppable(self._optimizer, self._options)):
            raise RuntimeError(
                f"{' '.join(filter(None, min(new)))} is set now, and was not at first. {why}"
            )


def _is_set(value: Any) -> bool:
    """Whether an option is not 0, False or None. Values on a device are not read, and are set."""
    if isinstance(value, Tensor):
        return not value.is_cpu or bool(value.any())
    return value is not None and not (isinstance(value, int | float) and value == 0)


# --- trials on small tensors ----------------------------------------------------------------------

_SHAPES = ((8, 12), (72, 96), (40,), (130,), (4, 6, 24), (16, 33, 3, 3), (4, 2, 3, 3, 3), ())
_SCALES = (1e-7, 1e-4, 1.0, 0.0, 1e4, 1.0, 1e-9, 1.0, 30.0, 1.0, 1e2, 1.0, 1.0, 1.0, 1.0)
"""Factor of the gradients in each step of a trial."""

_VARYING = {"params", pieces.NAMES, "lr", "initial_lr"}


class _Kind(NamedTuple):
    """Parameters that an optimizer may treat alike: with the same options and attributes.

    Attributes:
        place: Index of the parameter group of the first of them.
        example: The first of them.
        name: Its name in the group, or "".
        shapes: Shapes to try.
    """

    place: int
    example: Tensor
    name: str
    shapes: set[tuple[int, ...]]


@torch.no_grad()
def find_difference(optimizer: Optimizer, *, on_parts: bool) -> str | None:
    """Tries whether steps in the engine's way equal steps on all whole tensors at once. Local.

    An optimizer that draws torch's random numbers hardly ever passes, since the two ways draw
    different numbers. torch's generators are restored afterwards.

    Args:
        optimizer: The optimizer, which is copied and not stepped. Objects that it holds and that
            are no list, dict, set or tensor are shared with the copies and may be mutated.
        on_parts: Whether the engine's way is to cut each tensor in two. If not, it is to step each
            tensor by itself, after an empty step.

    Returns:
        The difference, or the error of the trial, in words. None means no difference.
    """
    held = pieces.parameters_of(optimizer)
    device = held[0].device if held else torch.device("cpu")
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            kinds = _kinds(optimizer, tries_all=on_parts)
            whole = _Trial(optimizer, device, "whole", kinds)
            other = _Trial(optimizer, device, "parts" if on_parts else "late", kinds)
            for number in range(len(_SCALES)):
                whole.step(number)
                other.step(number)
                if (shape := other.first_difference(whole)) is not None:
                    way = "cut in two" if on_parts else "stepped by itself"
                    return f"a tensor of shape {tuple(shape)} gets other values if it is {way}"
            if on_parts and (made := other.new_attributes()):
                return f"it keeps '{min(made)}' as an attribute of parameters, which is lost there"
            values = (_new_tensor(one.shape, device) for one in whole.wholes)
            if all(map(torch.equal, whole.wholes, values)):
                # If no step changes anything, equal values prove nothing.
                raise ValueError("it changes no tensor")
            return None
    except Exception as error:
        hint = "" if on_parts else "; note that a step must skip parameters whose .grad is None"
        return f"stepping it on small tensors failed ({error}{hint})"


def _kinds(optimizer: Optimizer, *, tries_all: bool) -> list[_Kind]:
    """Returns the kinds of parameters to try. A kind may have several lr.

    Args:
        optimizer: The optimizer to try.
        tries_all: Whether to try all shapes with each kind. If not, only those with as many
            dimensions as a parameter of the kind: some optimizers accept only matrices.
    """
    kinds: dict[str, _Kind] = {}
    names = pieces.names_of(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        options = repr({key: value for key, value in group.items() if key not in _VARYING})
        for one in group["params"]:
            carried = sorted((key, type(value).__name__) for key, value in vars(one).items())
            new = _Kind(index, one, names.get(id(one), ""), set())
            own = kinds.setdefault(f"{options} {carried}", new)
            own.shapes.update(shape for shape in _SHAPES if tries_all or len(shape) == one.ndim)
    return list(kinds.values())


class _Trial:
    """A twin of an optimizer that steps small tensors in one of three ways.

    Args:
        optimizer: The optimizer to make a twin of.
        device: Device of the tensors.
        way: "whole": all tensors in one step. "late": one tensor at a time, after a step that finds
            no gradient, as in `ReplicatedOptimizer`. "parts": one half of a tensor at a time, as in
            `ShardedOptimizer`.
        kinds: Parameters to try, as `_kinds` returns them.

    Attributes:
        twin: The twin, with one group for each kind.
        wholes: The small tensors, in the same order in all trials of these kinds.
        pieces: What is stepped: the small tensors, or 1-D halves of them. `bucket` of a piece is
            the index of its group.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, way: str, kinds: Sequence[_Kind]
    ) -> None:
        self._way, self.wholes, self.pieces = way, list[Parameter](), list[Piece]()
        for place, kind in enumerate(kinds):
            for shape in filter(kind.shapes.__contains__, _SHAPES):
                whole = _like(kind.example, shape, device)
                middle = -(-whole.numel() // (2 * ALIGNMENT)) * ALIGNMENT
                ends = {0, min(middle, whole.numel()), whole.numel()}
                for start, stop in pairwise(sorted(ends) if way == "parts" else (0, max(ends))):
                    own = whole.detach().view(-1)[start:stop] if way == "parts" else whole
                    self.pieces.append(Piece(len(self.wholes), start, stop, place, 0, own, None))
                self.wholes.append(whole)
        self._names = {id(one.parameter): kinds[one.bucket].name for one in self.pieces}
        self.twin = _new_twin(optimizer, [kind.place for kind in kinds], self.wholes[0])
        self._put(self.pieces)

    def step(self, number: int) -> None:
        """Makes step `number`. All trials with the same shapes get the same gradients in it."""
        deferred = replicated.DeferredStep(self.twin)
        if self._way == "late":
            sharded.inner_step(self.twin)
        self._set_gradients(number)
        if self._way == "late":
            for one in reversed(self.pieces):
                deferred.run({one.bucket: [one.parameter]})
        elif self._way == "parts":
            pieces.carry_attributes(self.pieces, self.wholes)
            for one in self.pieces:
                self._put([one])
                sharded.inner_step(self.twin)
        else:
            sharded.inner_step(self.twin)
        for one in self.pieces:
            one.parameter.grad = None

    def new_attributes(self) -> set[str]:
        """Names of the attributes that the optimizer has given to what it has stepped."""
        pairs = ((one.parameter, self.wholes[one.tensor_index]) for one in self.pieces)
        return {key for piece, whole in pairs for key in vars(piece).keys() - vars(whole).keys()}

    def _put(self, stepped: Sequence[Piece]) -> None:
        for place, group in enumerate(self.twin.param_groups):
            tensors = [one.parameter for one in stepped if one.bucket == place]
            pieces.put_into(group, tensors, self._names)

    def _set_gradients(self, number: int) -> None:
        most = max(map(math.prod, _SHAPES))
        generator = torch.Generator().manual_seed(number)
        row = torch.randn(most, generator=generator, dtype=torch.float32, device="cpu")
        row.mul_(_SCALES[number])
        if number % 4 == 1:
            # The beginning is 0 and the rest is not, as it may be in the gradient of an embedding.
            row[:ALIGNMENT] = 0
        for one in self.pieces:
            own = row[one.start : one.stop].view(one.parameter.shape)
            one.parameter.grad = own.to(one.parameter.device, copy=True)

    def first_difference(self, whole: "_Trial") -> torch.Size | None:
        """Returns the shape of the first tensor whose values or state differ from `whole`'s.

        None means that all are exactly equal; nan counts as equal to nan. State that is no tensor
        and no number is not compared.
        """
        for one in self.pieces:
            tensor = whole.wholes[one.tensor_index]
            own = {"": one.parameter, **self.twin.state.get(one.parameter, {})}
            for key, value in {"": tensor, **whole.twin.state.get(tensor, {})}.items():
                if not isinstance(value, Tensor | int | float):
                    continue
                wanted, found = torch.as_tensor(value), torch.as_tensor(own[key])
                if wanted.shape == tensor.shape:
                    wanted = wanted.reshape(-1)[one.start : one.stop].view(found.shape)
                if not torch.allclose(found, wanted, 0, 0, equal_nan=True):
                    return tensor.shape
        return None


def _like(example: Tensor, shape: Sequence[int], device: torch.device) -> Parameter:
    """Returns a small parameter with the attributes of `example`."""
    made = Parameter(_new_tensor(shape, device))
    for key, value in vars(example).items():
        if isinstance(value, Tensor) and value.shape == example.shape:
            value = _new_tensor(shape, device).to(value.dtype)
        if not pieces.is_uncuttable(value, made):
            setattr(made, key, value)
    return made


def _new_tensor(shape: Sequence[int], device: torch.device) -> Tensor:
    values = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device=device)
    return values.view(tuple(shape))


def _new_twin(optimizer: Optimizer, places: Sequence[int], in_place_of_others: Tensor) -> Any:
    """Returns a copy of an optimizer as it was before its first step, without hooks.

    The copy has no state of parameters. A learning rate of 0 is replaced by another one.

    Args:
        optimizer: The optimizer to copy.
        places: Indices of the parameter groups that the twin gets.
        in_place_of_others: Small tensor that replaces each parameter in the optimizer's attributes,
            so that no large tensor is copied.
    """
    memo = {id(one): in_place_of_others for one in pieces.parameters_of(optimizer)}
    # The constructor is not called, because its arguments are not known.
    twin: Any = object.__new__(type(optimizer))
    kept = optimizer.state.items()
    state = {key: deepcopy(own) for key, own in kept if not isinstance(key, Tensor)}
    vars(twin)["state"] = defaultdict(dict, state)
    for name, value in vars(optimizer).items():
        # `zero_grad` may be replaced by `OptimizerPipeline`'s, which would drop the gradients of
        # the training.
        if name in ("state", "zero_grad"):
            continue
        is_copied = isinstance(value, list | dict | set | Tensor)
        own = OrderedDict() if name.endswith("_hooks") else value
        vars(twin)[name] = deepcopy(own, memo) if is_copied else value
    twin.param_groups[:] = [dict(twin.param_groups[place]) for place in places]
    for group in twin.param_groups:
        if not group.get("lr", 1):
            # A warm-up may begin with a learning rate of 0, which would change no tensor.
            group["lr"] = group.get("initial_lr") or 1e-2
    return twin
