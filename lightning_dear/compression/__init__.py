"""Public names of all compressors, and the lookup of a compressor by its name."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from inspect import signature
from typing import Any

from lightning_dear.compression.codec import Codec, Compressor, FewOfMany
from lightning_dear.compression.floats import Bf16, Fp16, Fp32
from lightning_dear.compression.groups import Groups, split
from lightning_dear.compression.integers import Int4, Int8, LoCo
from lightning_dear.compression.low_rank import PowerSGD
from lightning_dear.compression.signs import EFSignSGD, OneBit, SignSGD, Signum
from lightning_dear.compression.sparse import DGC, RandomK, TopK
from lightning_dear.compression.sparse_all_reduce import (
    Gaussiank,
    GTopk,
    OkTopk,
    SparseAllReduce,
    TopkA,
    TopkDSA,
)
from lightning_dear.compression.stochastic import QSGD, Natural, TernGrad
from lightning_dear.names import check_name

_NARROW = (Fp32, Fp16, Bf16, Int8, Int4, LoCo)
_OF_SIGNS = (OneBit, EFSignSGD, SignSGD, Signum)
_FEW_LEVELS = (QSGD, TernGrad, Natural)
_FEW_OF_MANY = (TopK, RandomK, DGC)
_BY_ROWS = (*_NARROW, *_OF_SIGNS, *_FEW_LEVELS, *_FEW_OF_MANY)
_NOT_BY_ROWS = (PowerSGD, OkTopk, TopkA, TopkDSA, GTopk, Gaussiank)

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in _BY_ROWS}
"""Name -> class of each codec of this package. Compressors that do not encode rows are left out."""

_COMPRESSORS: dict[str, type[Compressor]] = CODECS | {kind.name: kind for kind in _NOT_BY_ROWS}


def class_of(compressor: object) -> type[Compressor] | None:
    """Returns the class of an instance, or of a name of this package. None means neither."""
    if isinstance(compressor, Compressor):
        return type(compressor)
    return _COMPRESSORS.get(compressor) if isinstance(compressor, str) else None


def class_with(option: str) -> type[Compressor] | None:
    """Returns the first compressor class of this package that has an option of this name.

    None means that no compressor has such an option.
    """
    kinds = _COMPRESSORS.values()
    return next((kind for kind in kinds if option in signature(kind).parameters), None)


class NoCompression:
    """Stands for no compression, as compressor=None does: values travel uncompressed."""

    name = "none"


Given = str | Compressor | NoCompression | Mapping[str, Any] | None
"""What the option `compressor` takes, see `resolve_compressors`."""

COMPRESSORS = ("none", *_COMPRESSORS)
"""Names of all compressors of this package, and "none"."""

ENTRY_POINTS = "lightning_dear.compressors"
"""Group of entry points under which other packages register names of their codecs."""


def resolve_compressor(compressor: str | Compressor | NoCompression | None) -> Compressor | None:
    """Returns the compressor that a name or an instance stands for.

    A name is looked up in this package, then among the entry points of other packages
    (`ENTRY_POINTS`). The compressor of a name has the default options.

    Args:
        compressor: Name; a compressor, which is returned as it is; or "none", None or a
            `NoCompression`, which mean no compression.

    Returns:
        The compressor. None means no compression.

    Raises:
        ValueError: If the name is unknown; the message lists the valid ones.
        TypeError: If `compressor` is nothing of the above, or if the entry point of its name makes
            something else than a codec.
    """
    if isinstance(compressor, Compressor):
        return compressor
    if compressor in (None, "none") or type(compressor) is NoCompression:
        return None
    if not isinstance(compressor, str):
        kind = compressor if isinstance(compressor, type) else type(compressor)
        got = f"the class {kind.__name__}" if kind is compressor else kind.__name__
        raise TypeError(
            f"compressor must be one of {', '.join(COMPRESSORS)} or an instance of a class from"
            f" lightning_dear.compression, such as Int8(), or of your own; got {got}."
        )
    if compressor in _COMPRESSORS:
        return _COMPRESSORS[compressor]()
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    check_name("compressor", compressor, (*COMPRESSORS, *others))
    codec = others[compressor].load()()
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{others[compressor].value}, registered as compressor {compressor!r}, is no Codec."
            " Register a class that is derived from lightning_dear.compression.Codec."
        )
    return codec


def resolve_compressors(given: Given) -> tuple[Compressor | None, Groups]:
    """Returns the compressor that an option stands for, and those of groups of parameters.

    Args:
        given: What `resolve_compressor` takes, for all parameters; or a mapping of patterns to
            that, of which the first one that matches a parameter's name counts. A pattern is
            "*.bias" or "*norm*", for example, and "vectors" matches all parameters of fewer than
            two dimensions. The last one is "*". Each pattern's parameters get buckets of their own.

    Raises:
        Exception: All that `resolve_compressor` and `groups.split` raise.
    """
    if not isinstance(given, Mapping):
        return resolve_compressor(given), ()
    return split({pattern: resolve_compressor(one) for pattern, one in given.items()})


def check_replaces(compressor: Compressor, configured: Compressor | None) -> None:
    """Refuses a compressor that cannot take the place of the configured one in mid-run.

    Only `Fp32`, and the configured compressor with the same or another density, can replace it.

    Args:
        compressor: Compressor to use from now on.
        configured: Compressor of the strategy. None means no compression, which nothing can
            replace in mid-run.

    Raises:
        ValueError: If `compressor` cannot replace `configured`.
    """
    if configured is None:
        raise ValueError(f"{compressor.name} cannot start mid-run. Set the strategy's compressor=.")
    if compressor.has_density and isinstance(configured, FewOfMany):
        compressor = compressor.at_density(configured.density)
    if type(compressor) is not Fp32 and compressor != configured:
        raise ValueError(
            f"{compressor!r} cannot replace {configured!r} in mid-run. Use fp32, or the same with"
            " another density. Set a different compressor= on the strategy before training."
        )


__all__ = ["CODECS", "COMPRESSORS", "NoCompression", "check_replaces", "resolve_compressor"]
__all__ += ["Given", "resolve_compressors"]
__all__ += ["Codec", "Compressor", "SparseAllReduce"]
__all__ += ["Bf16", "Fp16", "Fp32", "Int4", "Int8", "LoCo"]
__all__ += ["EFSignSGD", "OneBit", "SignSGD", "Signum"]
__all__ += ["QSGD", "Natural", "TernGrad"]
__all__ += ["DGC", "RandomK", "TopK"]
__all__ += ["GTopk", "Gaussiank", "OkTopk", "PowerSGD", "TopkA", "TopkDSA"]
