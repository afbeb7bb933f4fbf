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
    """Stands in for `module._parameters` while a `ModuleGate` of that module is closed.

    Holds the same items, so that C-level reads find the right tensors (though without a wait).

    Args:
        plain: The module's own dict. All writes go to it.

    Attributes:
        plain: See above.
        closed: The module's closed gates -> what opens each, and may block. There are several if
            several optimizers train parameters of one module.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.closed: dict[ModuleGate, Callable[[], None]] = {}

    def _opened(self) -> dict[str, Any]:
        for open_gate in tuple(self.closed.values()):
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


class ModuleGate:
    """Makes reads of one module's parameters wait, while it is closed.

    Args:
        module: Must have a gate; see `has_gate`.
        wait: Called by a read. Has to open the gate, and may block before.
    """

    __slots__ = ("_spare", "_vars", "_wait")

    def __init__(self, module: Module, wait: Callable[[], None]) -> None:
        self._vars, self._wait = module.__dict__, wait
        # What stood in the place of the module's dict the last time. Putting it there again takes
        # half as long as making another one.
        self._spare: ParameterGate | None = None

    def close(self) -> None:
        """Lets reads and writes call `wait`. Idempotent."""
        present, spare = self._vars[_PARAMETERS], self._spare
        if type(present) is not ParameterGate:
            if spare is not None and spare.plain is present:
                dict.clear(spare)
                dict.update(spare, present)
            else:
                spare = self._spare = ParameterGate(present)
            self._vars[_PARAMETERS] = present = spare
        present.closed[self] = self._wait

    def open(self) -> None:
        """Lets reads go on; after the last gate the module has its own dict back. Idempotent."""
        present = self._vars.get(_PARAMETERS)
        if type(present) is ParameterGate:
            present.closed.pop(self, None)
            if not present.closed:
                self._vars[_PARAMETERS] = present.plain
