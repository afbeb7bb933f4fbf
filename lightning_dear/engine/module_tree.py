"""The modules of a model, a cheap check whether they hold the same parameters, and aliases."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear import bucket, private_names


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that the user has told torch's DDP to ignore.

    Ranks do not compare, average or broadcast them. Empty if the user has told DDP nothing.
    """
    return frozenset(getattr(module, private_names.IGNORED_NAMES.name, ()))


def aliased_names(module: nn.Module) -> Set[str]:
    """Names of parameters whose memory is held by a tensor that is not the module's. Local.

    Examples: a `state_dict()` that the user has kept, a NumPy array, a flat vector of which the
    parameters are views. A tensor that a graph holds for backward counts, too. Parameters in shared
    memory do not count.
    """
    address, count = private_names.STORAGE_ADDRESS, private_names.STORAGE_USE_COUNT.imported()
    fresh = torch.empty(1)
    usual, names_in = count(address.of(fresh.untyped_storage())), dict[int, list[str]]()
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided
        if is_plain and not bucket.is_in_shared_memory(tensor):
            names_in.setdefault(address.of(tensor.untyped_storage()), []).append(name)
    # Each of the module's own tensors holds its storage once.
    held = (names for at, names in names_in.items() if count(at) - len(names) > usual - 1)
    return frozenset(chain.from_iterable(held))


def other_forward(own: Mapping[str, Any]) -> Any:
    """Returns what was put in the place of a module's forward, such as a CUDA graph's replay.

    None means that the module has the forward, or another method, of its class. While Fabric or a
    Lightning strategy redirects the call of a method through forward, that counts as such.

    Args:
        own: The module's `__dict__`.
    """
    forward = own.get("forward")
    its_class, name = type(getattr(forward, "__self__", None)), getattr(forward, "__name__", "")
    is_own = getattr(forward, "__func__", None) is getattr(its_class, name, forward)
    package = str(getattr(forward, "__module__", "")).partition(".")[0]
    return None if is_own or package in _LIGHTNING else forward


_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class ModuleTree:
    """A module and all modules in it, as they were at the last call of `look`.

    To walk over a thousand modules takes milliseconds of Python. `look` is faster: it compares by
    identity what the modules' dicts hold, in one pass of C calls. It walks only if these differ.

    Args:
        module: The root.

    Attributes:
        module: Same as the argument.
        version: Number of looks that have found other modules, parameters or forwards than the look
            before, the first look included.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version = 0
        self._seen: Sequence[Any] = ()
        self._seen_buffers: Sequence[Any] = ()
        self._ignored: frozenset[str] = frozenset()
        self._by_dtype: Sequence[list[Tensor]] = ()
        self.look()

    def look(self) -> None:
        """Adds 1 to `version` if modules, parameters or forwards were replaced since the last look.

        Those that were added or removed count, too. Waits for no parameter.
        """
        if self._seen and _are_same(self._seen, [*self._held()]):
            return
        self.version += 1
        modules = [*self.module.modules()]
        dicts = [vars(module) for module in modules]
        # TorchScript's modules have other objects in the place of these dicts.
        name = private_names.PARAMETERS.name
        self._dicts = [one for one in dicts if isinstance(one.get(name), dict)]
        plain = set(map(id, self._dicts))
        pairs = zip(modules, dicts, strict=True)
        self._scripted = [module for module, own in pairs if id(own) not in plain]
        # Strong references, since a new object may get the id of one that was freed.
        self._seen = [*self._held()]

    def _held(self) -> Iterator[Any]:
        """All submodules, then all parameters, each in the order of the modules that hold them.

        Then what was put in the place of their forwards.
        """
        for name in (private_names.MODULES.name, private_names.PARAMETERS.name):
            # `dict.values` reads a closed gate without a wait; the gate's own `values` would wait.
            yield from chain.from_iterable(map(dict.values, map(itemgetter(name), self._dicts)))
        yield from map(dict.get, self._dicts, repeat(private_names.COMPILED_CALL.name))
        yield from (other_forward(own) for own in self._dicts if "forward" in own)
        for module in self._scripted:
            yield from chain(module.children(), module.parameters(recurse=False))

    def buffers(self) -> Sequence[list[Tensor]]:
        """Returns the module's buffers, one list for each dtype, without `ignored_names`. Local.

        The widest elements come first, so that in one message each dtype begins at a multiple of
        its own width.

        Buffers that were replaced in a module since the last call are found. If there are none, the
        same object is returned. Buffers of modules that were put into the tree since the last
        `look` may be missing.
        """
        dicts = map(itemgetter(private_names.BUFFERS.name), self._dicts)
        own = chain.from_iterable(map(dict.values, dicts))
        scripted = chain.from_iterable(part.buffers(recurse=False) for part in self._scripted)
        buffers = [buffer for buffer in chain(own, scripted) if buffer is not None]
        seen = [*buffers, *map(attrgetter("dtype"), buffers)]
        ignored = ignored_names(self.module)
        if ignored != self._ignored or not _are_same(self._seen_buffers, seen):
            self._seen_buffers, self._ignored = seen, ignored
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for _, buffer in self.named_buffers():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._by_dtype = sorted(by_dtype.values(), key=lambda one: -one[0].element_size())
        return self._by_dtype

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of the module's buffers, without `ignored_names`. Local, slow."""
        ignored = ignored_names(self.module)
        return (one for one in self.module.named_buffers() if one[0] not in ignored)


def _are_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))
