"""What is trained: the managed parameters, checked once at setup, and described for the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear.bucket import storage_strides
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec
from lightning_dear.compression.groups import unused_group
from lightning_dear.engine.gate import plain_parameters
from lightning_dear.engine.read_order import ForwardRecorder
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.tensorwise import choose_options
from lightning_dear.planning import TensorSpec

Described = Sequence[tuple[str, str]]
"""(name, layout) of every trained parameter, as compared between ranks."""


class TrainedParameters:
    """What an optimizer trains at present, and whether that is still all.

    Args:
        module: Whose parameters count.
        optimizer: Its groups are looked at, not mutated.

    Attributes:
        names: Qualified names, in registration order.
        parameters: In the same order; a shared one stands once.
        recorder: Records the first step with them.
    """

    def __init__(self, module: Module, optimizer: Optimizer) -> None:
        named = managed_parameters(module, optimizer)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._optimizer = optimizer
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = {id(parameter) for parameter in self.parameters}
        groups = optimizer.param_groups
        self._untrained = [p for group in groups for p in group["params"] if id(p) not in known]
        # Where each stands: a module's own dict, and its name in it. A shared one has several.
        self._homes = [
            (plain_parameters(part), name, parameter)
            for part in module.modules()
            for name, parameter in plain_parameters(part).items()
            if id(parameter) in known
        ]
        self.recorder = ForwardRecorder(module, self.parameters)
        self._hooks: list[RemovableHandle] = []

    def watch(self, on_gradient: Callable[[int, Tensor], None]) -> None:
        """Calls `on_gradient` with a parameter's number, and with the parameter itself.

        Whenever its `.grad` has been accumulated, until `release`.
        """
        watched: Sequence[Any] = self.parameters
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, number))
            for number, parameter in enumerate(watched)
        ]

    def release(self) -> None:
        """Removes the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def have_grown(self) -> bool:
        """Whether parameters were added to the optimizer, or began to require gradients."""
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        return sizes != self._group_sizes or any(
            parameter.requires_grad and parameter.numel() for parameter in self._untrained
        )

    def restore_replaced(self) -> None:
        """Puts the optimizer's parameters back where others stand, with the others' values.

        `load_state_dict(assign=True)` leaves new parameters in the module, which no optimizer
        knows.

        Raises:
            ValueError: If the new parameter has another shape.
        """
        for parameters, name, parameter in self._homes:
            other = parameters.get(name)
            if other is parameter or other is None:
                continue
            if any(other is known for known in self.parameters):
                continue
            if other.shape != parameter.shape:
                raise ValueError(
                    f"A '{name}' was replaced by a parameter of shape {tuple(other.shape)}; the"
                    f" optimizer trains one of shape {tuple(parameter.shape)}. Make a new optimizer"
                    " for it."
                )
            parameter.data = other.data.to(parameter.dtype)
            parameters[name] = parameter


def managed_parameters(module: Module, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
    """(name, parameter) of what the optimizer trains at present, in registration order.

    A shared parameter stands once, under its first name.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) in trained and parameter.requires_grad and parameter.numel()
    ]


def tensor_specs(
    names: Sequence[str],
    parameters: Sequence[Parameter],
    first_use: Mapping[int, int],
    ready: Sequence[int],
    codecs: Sequence[Codec | None],
) -> list[TensorSpec]:
    """What the planner needs to know of each parameter.

    Args:
        names: Of the parameters.
        parameters: The engine's list.
        first_use: Parameter index -> position of its first read in the recorded forward.
        ready: Parameter indices in the order of their gradients; empty if nothing was recorded.
        codecs: What encodes each.
    """
    order = ready or range(len(parameters) - 1, -1, -1)
    position = {index: place for place, index in enumerate(order)}
    return [
        TensorSpec(
            index=index,
            name=name,
            numel=parameter.numel(),
            itemsize=parameter.element_size(),
            family=f"{parameter.dtype}/{parameter.device.type}/{codecs[index]}",
            first_use=first_use.get(index),
            ready=position.get(index),
        )
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
    ]


def check_layout(
    module: Module,
    optimizers: Sequence[Optimizer],
    collectives: Collectives,
    options: ExchangeOptions,
    or_else: ExchangeOptions | None = None,
) -> tuple[ExchangeOptions, str | None]:
    """Refuses what cannot be trained, on every rank alike. Collective, blocks.

    Args:
        module: Whose parameters are trained.
        optimizers: Over them.
        collectives: Between the ranks.
        options: What travels.
        or_else: What may travel instead, where optimizers cannot be stepped with `options`.

    Returns:
        One of both, the same on all ranks, and what people are to be told.

    Raises:
        ValueError: Saying what is wrong and what to change.
    """
    options, problem, remark = choose_options(optimizers, options, or_else)
    problems = [problem, *(_local_problem(module, one, options) for one in optimizers)]
    # What is frozen now may be trained later.
    named = module.named_parameters()
    unused = unused_group(options.groups, [(name, one.ndim) for name, one in named])
    problem = next((one for one in problems if one), _shared_problem(optimizers) or unused)
    described = [
        (name, f"{what}, {type(optimizer).__name__} {number}")
        for number, optimizer in enumerate(optimizers)
        for name, what in _describe(module, optimizer)
    ]
    settings = [_options(optimizer, number) for number, optimizer in enumerate(optimizers)]
    reports = collectives.all_gather_object((problem, described, settings, repr(options)))
    if problem is not None:
        raise ValueError(problem)
    for rank, (other_problem, *_) in enumerate(reports):
        if other_problem is not None:
            raise ValueError(f"{other_problem} (found on rank {rank})")
    for rank, (_, other, _, other_options) in enumerate(reports):
        if other != reports[0][1]:
            raise ValueError(_difference(rank, reports[0][1], other))
        if other_options != reports[0][3]:
            raise ValueError(
                f"Ranks exchange in other ways: {reports[0][3]} on rank 0 and {other_options} on"
                f" rank {rank}. Give all the same compressor, gather and gather_depth."
            )
    for rank, (_, _, others, _) in enumerate(reports):
        for ours, theirs in zip(reports[0][2], others, strict=True):
            _check_options(rank, ours, theirs)
    return options, remark


def _describe(module: Module, optimizer: Optimizer) -> Described:
    group_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return [
        (
            name,
            f"shape {tuple(parameter.shape)}, strides {storage_strides(parameter)},"
            f" {parameter.dtype}, parameter group {group_of[id(parameter)]}",
        )
        for name, parameter in managed_parameters(module, optimizer)
    ]


def _options(optimizer: Optimizer, number: int) -> dict[str, Any]:
    """What is set in the parameter groups, by place; tensors are left out."""
    kinds = (bool, int, float, str, tuple, type(None))
    return {
        f"{type(optimizer).__name__} {number}, parameter group {place}: {key}": value
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and isinstance(value, kinds)
    }


def _check_options(rank: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key in {**first, **other}:
        left, right = first.get(key), other.get(key)
        if left != right:
            raise ValueError(
                f"Ranks set up other optimizers: {key} is {left} on rank 0 and {right} on rank"
                f" {rank}. Each rank steps a part of the model: set the same on all."
            )


def _shared_problem(optimizers: Sequence[Optimizer]) -> str | None:
    if not optimizers:
        return "strategy='dear' needs an optimizer, and configure_optimizers returned none."
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in {p for group in optimizer.param_groups for p in group["params"]}:
            other = seen.setdefault(id(parameter), number)
            if other != number:
                return (
                    f"A parameter of shape {tuple(parameter.shape)} stands in optimizer {other} and"
                    f" in optimizer {number}; under strategy='dear' each parameter belongs to one."
                )
    return None


def _local_problem(module: Module, optimizer: Optimizer, options: ExchangeOptions) -> str | None:
    own = {id(parameter) for parameter in module.parameters()}
    try:
        check_momentum(optimizer, options)
    except ValueError as error:
        return str(error)
    for number, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in own]
        if foreign:
            return (
                f"{type(optimizer).__name__}'s parameter group {number} holds {len(foreign)}"
                f" parameter(s) that are not the module's (first shape:"
                f" {tuple(foreign[0].shape)}); build the optimizer from self.parameters()."
            )
    managed = managed_parameters(module, optimizer)
    if not managed:
        return "The optimizer holds no parameter of the module that requires a gradient."
    devices = {str(parameter.device) for _, parameter in managed}
    if len(devices) > 1:
        return f"Trained parameters lie on several devices ({', '.join(sorted(devices))}); use one."
    others = [(name, one.dtype) for name, one in managed if not one.is_floating_point()]
    if others and options.codec is not None:
        name, dtype = others[0]
        return (
            f"compressor={options.codec.name!r} encodes real numbers, and '{name}' is of {dtype}."
            " Keep its real and imaginary part as two parameters, or use compressor='none'."
        )
    return None


def check_momentum(optimizer: Optimizer, options: ExchangeOptions) -> None:
    """Refuses momentum beside a compressor that keeps it. Cheap: a schedule may bring it any step.

    Raises:
        ValueError: Naming the parameter group and what to use.
    """
    codec = options.codec
    if codec is None or not codec.brings_momentum:
        return
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum") or group.get("beta1") or any(group.get("betas", ())[:1]):
            raise ValueError(
                f"compressor={codec.name!r} keeps momentum itself, and {type(optimizer).__name__}'s"
                f" parameter group {number} has momentum, too: gradients would be averaged twice."
                " Use an optimizer without momentum, such as SGD(momentum=0), and schedules that"
                " leave it so (OneCycleLR(cycle_momentum=False)), or another compressor."
            )


def _difference(rank: int, first: Described, other: Described) -> str:
    for left, right in zip(first, other, strict=False):
        if left != right:
            return (
                f"Ranks hold different models: rank 0 has '{left[0]}' ({left[1]}), rank {rank} has"
                f" '{right[0]}' ({right[1]}). Build the same model on every rank."
            )
    return (
        f"Ranks hold different models: rank 0 trains {len(first)} parameters, rank {rank}"
        f" {len(other)}. Build the same model on every rank."
    )
