"""Waits where parameters are read: a gate in place of `module._parameters`.

While a parameter of a module is still being gathered, a dict subclass stands in for the module's
`_parameters`; any read or write through it (`self.weight`, `parameters()`, `state_dict()`, `to()`)
first completes the module's parameters. Once they are complete the module's own dict is back, so
that a module that waits for nothing pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import Module, Parameter

from lightning_dear import private_names

_PARAMETERS = private_names.PARAMETERS.name

_READ_OR_WRITE = """
__getitem__ __setitem__ __delitem__ __eq__ __or__ __ior__
get items values copy pop popitem setdefault update clear
"""


def _opening(name: str) -> Any:
    """The dict's method of this name, called on the plain dict once the gate is open."""

    def call(self: ParameterGate, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return call


class ParameterGate(dict[str, Any]):
    """Stands in for `module._parameters` until `remove_gate` has put `plain` back.

    Holds the same items, so that C-level reads find the right tensors (though without a wait).

    Args:
        plain: The module's own dict. All writes go to it.

    Attributes:
        plain: See above.
        openers: Owner's id -> what completes that owner's share of the parameters, and may block. A
            gate has several owners if several optimizers train parameters of one module.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.openers: dict[int, Callable[[], None]] = {}

    def renewed(self) -> ParameterGate:
        """Returns this gate with the items that `plain` has now; for a gate that is in no place."""
        dict.clear(self)
        dict.update(self, self.plain)
        return self

    def _opened(self) -> dict[str, Any]:
        for open_gate in tuple(self.openers.values()):
            open_gate()
        return self.plain

    def __iter__(self) -> Iterator[str]:
        # Overridden so that dict(gate) and {**gate} come through __getitem__.
        return iter(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are of a module whose parameters are complete: an ordinary dict.
        return dict, (dict(self._opened()),)


for _name in _READ_OR_WRITE.split():
    setattr(ParameterGate, _name, _opening(_name))


def plain_parameters(module: Module) -> dict[str, Any]:
    """The module's own dict of parameters, without waiting for any; of TorchScript a copy."""
    parameters: Any = private_names.PARAMETERS.of(module)
    if isinstance(parameters, ParameterGate):
        return parameters.plain
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def owners(module: Module, parameters: Sequence[Parameter]) -> dict[Module, dict[str, int]]:
    """Modules that hold any of `parameters` -> their names there -> their numbers."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = {
        part: {
            name: numbers[id(one)]
            for name, one in plain_parameters(part).items()
            if id(one) in numbers
        }
        for part in module.modules()
    }
    return {part: own for part, own in found.items() if own}


def has_gate(module: Module) -> bool:
    """Whether reads of the module's parameters can be made to wait; not those in TorchScript."""
    return isinstance(private_names.PARAMETERS.of(module), dict)


def close_gate(
    module: Module,
    owner: object,
    open_gate: Callable[[], None],
    spare: ParameterGate | None = None,
) -> ParameterGate:
    """Lets reads of the module's parameters call `open_gate`, until `owner` removes its gate.

    Args:
        module: Must have a gate; see `has_gate`.
        owner: The object whose gate it is.
        open_gate: Completes the owner's share of the parameters, and removes the owner's gate.
        spare: The gate that an earlier call has returned for this module, if there was one. It is
            put there again, which takes half as long as making one.

    Returns:
        The gate in the place of the module's dict.
    """
    gate = module.__dict__[_PARAMETERS]
    if type(gate) is not ParameterGate:
        can_reuse = spare is not None and spare.plain is gate
        gate = spare.renewed() if spare is not None and can_reuse else ParameterGate(gate)
        module.__dict__[_PARAMETERS] = gate
    gate.openers[id(owner)] = open_gate
    return gate


def remove_gate(module: Module, owner: object) -> None:
    """Takes `owner`'s gate away; after the last one the module has its own dict back."""
    gate = module.__dict__.get(_PARAMETERS)
    if type(gate) is ParameterGate:
        gate.openers.pop(id(owner), None)
        if not gate.openers:
            module.__dict__[_PARAMETERS] = gate.plain
