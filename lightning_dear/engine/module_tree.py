"""The modules of a model, and a cheap look at whether they still hold what they held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_dear import private_names


def ignored_names(module: Module) -> frozenset[str]:
    """Names of parameters and buffers that are each rank's own, as torch's DDP is told of them."""
    return frozenset(getattr(module, private_names.IGNORED_NAMES.name, ()))


class ModuleTree:
    """A module with all modules in it, as they were when it was looked at last.

    A walk over a thousand modules takes milliseconds of Python. A look compares what their dicts
    hold, by identity and in one pass of C calls.

    Args:
        module: The root.

    Attributes:
        version: Grows by one with each look that finds other modules or parameters.
    """

    def __init__(self, module: Module) -> None:
        self._root = module
        self.version = 0
        self._seen: Sequence[Any] = ()
        self._seen_buffers: Sequence[Any] = ()
        self._ignored: frozenset[str] = frozenset()
        self._by_dtype: Sequence[list[Tensor]] = ()
        self.look()

    def look(self) -> None:
        """Sees whether modules or parameters were exchanged since the last look. Local."""
        if self._seen and _are_same(self._seen, [*self._held()]):
            return
        self.version += 1
        modules = [*self._root.modules()]
        dicts = [vars(one) for one in modules]
        # TorchScript's modules have something else in the place of these dicts.
        self._dicts = [
            one for one in dicts if isinstance(one.get(private_names.PARAMETERS.name), dict)
        ]
        plain = set(map(id, self._dicts))
        pairs = zip(modules, dicts, strict=True)
        self._scripted = [one for one, own in pairs if id(own) not in plain]
        # Strong references, since the id of an object that is gone may be a new one's.
        self._seen = [*self._held()]

    def _held(self) -> Iterator[Any]:
        """All modules and parameters, in the order of the modules that hold them."""
        for name in (private_names.MODULES.name, private_names.PARAMETERS.name):
            # The dict's own method, which does not wait at a gate.
            yield from chain.from_iterable(map(dict.values, map(itemgetter(name), self._dicts)))
        for one in self._scripted:
            yield from chain(one.children(), one.parameters(recurse=False))

    def buffers(self) -> Sequence[list[Tensor]]:
        """The buffers that all ranks have alike, as they are now, by dtype. Local.

        Of modules that were put into the tree since the last look none is among them.
        """
        dicts = map(itemgetter(private_names.BUFFERS.name), self._dicts)
        own = chain.from_iterable(map(dict.values, dicts))
        scripted = chain.from_iterable(one.buffers(recurse=False) for one in self._scripted)
        buffers = [one for one in chain(own, scripted) if one is not None]
        seen = [*buffers, *map(attrgetter("dtype"), buffers)]
        ignored = ignored_names(self._root)
        if ignored != self._ignored or not _are_same(self._seen_buffers, seen):
            self._seen_buffers, self._ignored = seen, ignored
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for name, buffer in self._root.named_buffers():
                if name not in ignored:
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._by_dtype = [*by_dtype.values()]
        return self._by_dtype


def _are_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether both hold the same objects, in one order."""
    return len(before) == len(now) and all(map(is_, before, now))
