"""Lets through to a stand-in for torch.distributed only what torch itself would take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

OLDER_NAMES = {
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
}
"""Names since torch 2.13 -> those of before, under which stand-ins have the functions."""

_WHOLE_AND_PART = {
    "reduce_scatter_tensor": ("input", "output"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
}
"""Function -> its tensor of all ranks, and that of one."""


class Strict:
    """A stand-in for torch.distributed, each call of which must be one that torch would take.

    Args:
        stand_in: Has the functions that are called, those in `OLDER_NAMES` by either name. Is given
            every argument by the name that torch has for it.
    """

    def __init__(self, stand_in: Any) -> None:
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(dist, name)
        if not inspect.isfunction(theirs):
            return getattr(self._stand_in, name)
        has_newer = name not in OLDER_NAMES or hasattr(self._stand_in, name)
        return strict(name, getattr(self._stand_in, name if has_newer else OLDER_NAMES[name]))


def strict(name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`stand_in`, behind what torch.distributed checks in its function `name`; see `Strict`.

    Raises, when it is called:
        TypeError: If torch's parameters cannot take the arguments, an argument is of another kind,
            or the group is not named, or the rank to send from or to.
        ValueError: If tensors do not fit together.
    """
    signature = signature_of(getattr(dist, name))

    @wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"torch.distributed.{name}{signature}: {error}") from None
        if "group" in signature.parameters and "group" not in given:
            raise TypeError(f"{name}: torch would take the default group, since none is named")
        if name in ("broadcast", "isend") and not _has_rank(given):
            raise TypeError(f"{name}: no rank is named")
        for parameter, value in given.items():
            if parameter in _KINDS:
                _KINDS[parameter](value, parameter)
        _check_together(name, given)
        return stand_in(**given)

    return call


@cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Of the function itself, which torch has decorated."""
    return inspect.signature(inspect.unwrap(function))


def _check_type(expected: type, value: Any, parameter: str) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"`{parameter}` must be a {expected.__name__}, got {type(value).__name__}")


def _check_sizes(value: Any, parameter: str) -> None:
    for one in value or ():
        _check_type(int, one, parameter)


def _check_reduction(value: Any, parameter: str) -> None:
    # Torch's own, which takes nothing else.
    dist.ReduceOptions().reduceOp = value


_KINDS: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(
        ("tensor", "output", "input", "output_tensor", "input_tensor"),
        distributed_c10d._check_single_tensor,
    ),
    **dict.fromkeys(
        ("output_tensor_list", "input_tensor_list"), distributed_c10d._check_tensor_list
    ),
    **dict.fromkeys(("output_split_sizes", "input_split_sizes"), _check_sizes),
    **dict.fromkeys(("src", "dst", "tag"), partial(_check_type, int)),
    "object_list": partial(_check_type, list),
    "async_op": partial(_check_type, bool),
    "op": _check_reduction,
}
"""Torch's name of a parameter -> raises unless a value is of its kind."""


def _has_rank(given: dict[str, Any]) -> bool:
    ranks = (given.get(f"{of_group}{way}") for of_group in ("", "group_") for way in ("src", "dst"))
    return any(rank is not None for rank in ranks)


def _check_together(name: str, given: dict[str, Any]) -> None:
    """Torch leaves most of this to the backends, of which NCCL's needs a GPU."""
    known = distributed_c10d._check_single_tensor, distributed_c10d._check_tensor_list
    tensors = [value for parameter, value in given.items() if _KINDS.get(parameter) in known]
    distributed_c10d._ensure_all_tensors_same_dtype(*tensors)
    if parameters := _WHOLE_AND_PART.get(OLDER_NAMES.get(name, name)):
        whole, part = (given[one].numel() for one in parameters)
        if whole < part or whole % max(1, part):
            raise ValueError(f"{name}: {whole} elements of all ranks, {part} of one")
    if name == "all_to_all_single":
        _check_rows(given, "output")
        _check_rows(given, "input")
        if given["output"].numel() != given["input"].numel() and not _has_sizes(given):
            raise ValueError(f"{name}: ranks would send more, or less, than they receive")
    if name == "all_to_all" and len(set(map(len, tensors))) > 1:
        raise ValueError(f"{name}: there must be a tensor to, and one from, each rank")


def _has_sizes(given: dict[str, Any]) -> bool:
    return any(given.get(f"{which}_split_sizes") for which in ("output", "input"))


def _check_rows(given: dict[str, Any], which: str) -> None:
    sizes, rows = given.get(f"{which}_split_sizes"), len(given[which])
    if sizes and sum(sizes) != rows:
        raise ValueError(f"`{which}` has {rows} rows, and {sum(sizes)} by its sizes")
