"""Makes reads of a module's parameters wait: a gate in the place of `module._parameters`.

While a parameter of a module is being gathered, an instance of a dict subclass replaces the
module's `_parameters`. Any read or write through it (`self.weight`, `parameters()`, `state_dict()`,
`to()`) first blocks until the module's parameters have arrived. Then the module's own dict is put
back, so that later reads cost nothing.
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
    """Makes a method that opens the gate, and then calls the plain dict's method `name`."""

    def call(self: ParameterGate, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return call


class ParameterGate(dict[str, Any]):
    """Replaces `module._parameters` while a `ModuleGate` of that module is closed.

    It holds the same items, so that reads in C find the right tensors, though without a wait.

    Args:
        plain: The module's own dict, which gets all writes.

    Attributes:
        plain: Same as the argument.
        closed: Closed gate of the module -> function that opens it, and may block before. There
            are several if several optimizers train parameters of one module.
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
        # With an `__iter__` of the subclass, dict(gate) and {**gate} call `__getitem__`, and wait.
        return iter(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copied or pickled module has complete parameters, and so an ordinary dict.
        return dict, (dict(self._opened()),)


for _name in _READ_OR_WRITE.split():
    setattr(ParameterGate, _name, _opening(_name))


def plain_parameters(module: Module) -> dict[str, Any]:
    """The module's own dict of parameters, read without a wait. For TorchScript it is a copy."""
    parameters: Any = private_names.PARAMETERS.of(module)
    if isinstance(parameters, ParameterGate):
        return parameters.plain
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def owners(module: Module, parameters: Sequence[Parameter]) -> dict[Module, dict[str, int]]:
    """Submodules that own any of `parameters` -> name there -> index in `parameters`."""
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = {
        part: {
            name: indices[id(parameter)]
            for name, parameter in plain_parameters(part).items()
            if id(parameter) in indices
        }
        for part in module.modules()
    }
    return {part: own for part, own in found.items() if own}


def has_gate(module: Module) -> bool:
    """Whether the module can have a gate. TorchScript's modules cannot: they have no such dict."""
    return isinstance(private_names.PARAMETERS.of(module), dict)


class ModuleGate:
    """Makes reads of one module's parameters call a function while the gate is closed.

    Args:
        module: Module that can have a gate, see `has_gate`.
    """

    __slots__ = ("_spare", "_vars")

    def __init__(self, module: Module) -> None:
        self._vars = module.__dict__
        # The `ParameterGate` of the last time. Using it again takes half as long as making one.
        self._spare: ParameterGate | None = None

    def close(self, wait: Callable[[], None]) -> None:
        """Lets reads and writes call `wait` until `open`. Idempotent.

        Args:
            wait: Called at a read or write. Must open the gate, and may block before.
        """
        present, spare = self._vars[_PARAMETERS], self._spare
        if type(present) is not ParameterGate:
            if spare is not None and spare.plain is present:
                dict.clear(spare)
                dict.update(spare, present)
            else:
                spare = self._spare = ParameterGate(present)
            self._vars[_PARAMETERS] = present = spare
        present.closed[self] = wait

    def open(self) -> None:
        """Lets reads go on. The last gate of the module restores the plain dict. Idempotent."""
        present = self._vars.get(_PARAMETERS)
        if type(present) is ParameterGate:
            present.closed.pop(self, None)
            if not present.closed:
                self._vars[_PARAMETERS] = present.plain
