"""Makes reads of a module's parameters wait: a gate in the place of `module._parameters`.

While a parameter of a module is being gathered, an instance of a dict subclass replaces the
module's `_parameters`. Any read or write through it (`self.weight`, `parameters()`, `state_dict()`,
`to()`) first blocks until all parameters in that dict have arrived. Then the module's own dict is
put back, so that later reads cost nothing. Reads in C, such as TorchScript's, do not wait.
"""

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
    """Makes a method that opens the gates, which may block, and calls the plain dict's `name`."""

    def call(self: ParameterGate, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return call


class ParameterGate(dict[str, Any]):
    """Dict that replaces `module._parameters` while a `ModuleGate` of that module is closed.

    It holds the same items, so that reads in C find the right tensors, though without a wait: the
    tensors may still have old values then.

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
        # Without an `__iter__` of the subclass, dict(gate) and {**gate} would copy in C, without a
        # wait. With it they call `__getitem__`, which waits.
        return iter(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Waits first. A copied or pickled module then has new values, and an ordinary dict.
        return dict, (dict(self._opened()),)


for _name in _READ_OR_WRITE.split():
    setattr(ParameterGate, _name, _opening(_name))


def plain_parameters(module: Module) -> dict[str, Any]:
    """Returns the module's own dict of parameters, without a wait, also if a gate is closed.

    The values of the parameters may be old then. For TorchScript's modules the dict is a copy.
    """
    parameters: Any = private_names.PARAMETERS.of(module)
    if isinstance(parameters, ParameterGate):
        return parameters.plain
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def owners(module: Module, parameters: Sequence[Parameter]) -> dict[Module, dict[str, int]]:
    """Returns: submodule that owns any of `parameters` -> name in it -> index in `parameters`.

    Waits for no parameter. `module` itself counts as a submodule.
    """
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    found: dict[Module, dict[str, int]] = {}
    for part in module.modules():
        for name, parameter in plain_parameters(part).items():
            if id(parameter) in indices:
                found.setdefault(part, {})[name] = indices[id(parameter)]
    return found


def has_gate(module: Module) -> bool:
    """Whether the module can have a gate: its `_parameters` is a dict, unlike in TorchScript."""
    return isinstance(private_names.PARAMETERS.of(module), dict)


class ModuleGate:
    """Makes reads of one module's parameters call a function while this gate is closed.

    A module may have several gates. They share one `ParameterGate`.

    Args:
        module: Module that can have a gate, see `has_gate`.
    """

    __slots__ = ("_spare", "_vars")

    def __init__(self, module: Module) -> None:
        self._vars = module.__dict__
        # The `ParameterGate` that `close` has made before. Using it again takes half as long as
        # making a new one.
        self._spare: ParameterGate | None = None

    def close(self, wait: Callable[[], None]) -> None:
        """Lets reads and writes call `wait` until `open`. Does not block. Idempotent.

        Args:
            wait: Called at each read or write while this gate is closed. Must call `open`, and may
                block before.
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
        """Lets reads go on without calling `wait`. Does not block. Idempotent.

        Once no gate of the module is closed, `module._parameters` is the plain dict again.
        """
        present = self._vars.get(_PARAMETERS)
        if type(present) is ParameterGate:
            present.closed.pop(self, None)
            if not present.closed:
                self._vars[_PARAMETERS] = present.plain
