"""Records one forward: the order in which it reads parameters, and reads that no gate can see.

Parameters are often read in another order than they are registered in, so buckets follow the
recorded order. Some reads do not go through `module._parameters` (a list of parameters kept
elsewhere, a GRU's flat weights), so that no gate sees them. In later steps such a parameter is
waited for before the forward of each module that was running at such a read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import jit, overrides
from torch.nn import Module, Parameter, modules

from lightning_dear import private_names
from lightning_dear.collectives.streams import Streams
from lightning_dear.engine.gate import ModuleGate, has_gate, owners
from lightning_dear.engine.module_tree import other_forward

_READ_NOTHING = """
__hash__ __len__ __repr__ data_ptr dim element_size get_device is_complex is_contiguous
is_floating_point ndimension nelement numel register_hook
register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
untyped_storage
"""

_METADATA = frozenset(_READ_NOTHING.split())
"""Names of torch functions that take a tensor and do not read its values."""

_DATA_GETTERS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Names of tensor attributes through which values can be read."""


Ungated = Mapping[int, Set[Module | None]]
"""See `ForwardRecorder.ungated`."""


class ForwardRecorder:
    """Records reads of parameters in forwards, and the order of their gradients.

    CUDA streams on which parameters are read are added to `streams.readers`.

    Args:
        module: Module whose submodules are watched.
        parameters: The parameters, in the order of their indices.
        streams: Streams of the parameters' device.

    Attributes:
        first_use: Parameter index -> place in the order of first reads. Parameters that were not
            read are missing.
        ungated: Parameter index -> modules that were running when the parameter was read, though
            not through `module._parameters` in the same call of their forward. None means that no
            module was running, or that the parameter is in TorchScript, whose reads cannot be seen.
            Then it is waited for before the whole forward, and at the end of a step within one.
        gradients: Parameter index -> how often its gradient was accumulated. The keys are in the
            order of each parameter's last accumulation. Parameters without a gradient are missing.
    """

    def __init__(self, module: Module, parameters: Sequence[Parameter], streams: Streams) -> None:
        self._module, self._parameters, self._streams = module, parameters, streams
        self._index = {id(parameter): number for number, parameter in enumerate(parameters)}
        # Empty unless a forward is recorded. One set for code outside of modules, and one for each
        # call in `_running`: ids of the parameters that it has read through gates.
        self._gated: list[set[int]] = []
        self._running: list[Module] = []
        # Functions that close the gates which were opened since the last enter or leave.
        self._opened: list[Callable[[], None]] = []
        # Parameters that were read since the forward began, or since the last step in it.
        self._seen: set[int] = set()
        self.first_use: dict[int, int] = {}
        self.ungated: dict[int, set[Module | None]] = {}
        self.gradients: dict[int, int] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """A context in which reads are recorded. Compiled regions run eagerly in it.

        At the end it removes its hooks and gates.
        """
        stack = ExitStack()
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._gated, self._seen = [set()], set()
        for state in (self._gated, self._opened, self._running):
            stack.callback(state.clear)
        for module, own in owners(self._module, self._parameters).items():
            if not has_gate(module):
                for index in own.values():
                    self.ungated.setdefault(index, set()).add(None)
            else:
                stack.callback(self._gated_reads(module).open)
        stack.callback(modules.module.register_module_forward_pre_hook(self._enter).remove)
        leaving = modules.module.register_module_forward_hook(self._leave, always_call=True)
        stack.callback(leaving.remove)
        stack.enter_context(ReadMode(self._record_read))
        return stack

    @property
    def is_recording(self) -> bool:
        """Whether a forward is being recorded."""
        return bool(self._gated)

    def note_step(self) -> None:
        """Lets each parameter's next read count as its first one.

        To be called after a step, once parameters are complete: completing them may read them.
        """
        self._seen.clear()
        for gated in self._gated:
            gated.clear()
        self._close()

    def note_gradient(self, index: int) -> None:
        """Counts an accumulation into parameter `index`'s gradient, and moves it to the end.

        So `gradients` is in the order of the last accumulations.
        """
        self.gradients[index] = self.gradients.pop(index, 0) + 1

    def _gated_reads(self, module: Module) -> ModuleGate:
        """Closes a gate of the module, and returns it.

        A read through the gate opens it until a module begins or ends. It marks all parameters of
        the module as gated, in the call that reads: it reads them through `module._parameters`.
        """

        def on_read() -> None:
            gate.open()
            self._opened.append(partial(gate.close, on_read))
            self._gated[-1].update(map(id, private_names.PARAMETERS.of(module).values()))

        gate = ModuleGate(module)
        gate.close(on_read)
        return gate

    def _close(self) -> None:
        while self._opened:
            self._opened.pop()()

    def _enter(self, module: Module, args: Any) -> None:
        self._running.append(module)
        self._gated.append(set())
        self._close()

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()
            self._gated.pop()
            self._close()

    def _record_read(self, value: Any) -> None:
        """Records the first read of `value`, if it is a parameter, and the stream of every read.

        Of reads that no gate sees it records all in modules, but only first ones outside of them:
        a parameter is waited for before a module, or else before the whole forward.
        """
        index = self._index.get(id(value))
        if index is None:
            return
        self._streams.readers.add(self._streams.current())
        is_first = index not in self._seen
        self._seen.add(index)
        self.first_use.setdefault(index, len(self.first_use))
        if id(value) not in self._gated[-1] and (is_first or self._running):
            user = self._running[-1] if self._running else None
            self.ungated.setdefault(index, set()).add(user)


class ReadMode(overrides.TorchFunctionMode):
    """Calls a function for each argument of each torch function that reads values of tensors.

    Functions in `_METADATA`, such as `size`, are left out. Lists, tuples and dicts are looked into.

    Args:
        on_read: Called with the argument, which may be of any type, also no tensor.
    """

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            reads_data = getattr(func.__self__, "__name__", "") in _DATA_GETTERS
        else:
            reads_data = name not in _METADATA
        if reads_data:
            self._report((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _report(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self._report(value)
            elif isinstance(value, dict):
                self._report(value.values())
            else:
                self._on_read(value)


def has_compiled_region(module: Module) -> bool:
    """Whether the module or one of its submodules may read parameters where no gate sees it.

    It may if `torch.compile` was applied to it, or if its `forward` was replaced, as
    `torch.cuda.make_graphed_callables` does. Compiled functions and methods are not found.
    """
    return any(
        private_names.COMPILED_CALL.of(part) is not None
        or hasattr(part, private_names.ORIGINAL_MODULE.name)
        or getattr(part, private_names.COMPILER_CONTEXT.name, None) is not None
        # What TorchScript reads is complete when a step returns.
        or (not isinstance(part, jit.ScriptModule) and other_forward(vars(part)) is not None)
        for part in module.modules()
    )
