"""Which running module a parameter belongs to, so that a model can be cut into layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn
from torch.nn import Parameter


def run_order(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Names of the modules that `run` calls, in the order of their first call; runs it once."""
    order: dict[str, None] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.setdefault(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(note(name)).remove)
        run()
    return list(order)


def owned_parameters(model: nn.Module, order: list[str]) -> dict[str, list[Parameter]]:
    """The trainable parameters of every module that ran and has any.

    A parameter of a module that was never called (attention's output projection) belongs to the
    next one around it. A shared one belongs to whichever module ran first; modules without
    children come before others, since a parent is called before anything in it is read.

    Args:
        model: The whole model.
        order: From `run_order`.

    Returns:
        By module name, in `order`.

    Raises:
        ValueError: If a trainable parameter is in no module that ran.
    """
    position = {name: number for number, name in enumerate(order)}
    rank = {name: (any(model.get_submodule(name).children()), position[name]) for name in order}
    owners: dict[int, tuple[Parameter, str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owner = _around(path, position)
        known = owners.get(id(parameter))
        if owner is not None and (known is None or rank[owner] < rank[known[1]]):
            owners[id(parameter)] = parameter, owner
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in owners:
            raise ValueError(f"{path} belongs to no module that was called: freeze or remove it.")
    owned: dict[str, list[Parameter]] = {name: [] for name in order}
    for parameter, owner in owners.values():
        if parameter.requires_grad:
            owned[owner].append(parameter)
    return {name: parameters for name, parameters in owned.items() if parameters}


def _around(path: str, position: dict[str, int]) -> str | None:
    """The innermost module around the parameter at `path` that ran."""
    while path:
        path = path.rpartition(".")[0]
        if path in position:
            return path
    return None
