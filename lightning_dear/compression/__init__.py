"""Finds compressors by name; they encode gradients on their way."""

from importlib.metadata import entry_points
from inspect import signature

from lightning_dear.compression.codec import Codec, Compressor, FewOfMany
from lightning_dear.compression.floats import Bf16, Fp16, Fp32
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
from lightning_dear.names import is_meant

_NARROW = (Fp32, Fp16, Bf16, Int8, Int4, LoCo)
_OF_SIGNS = (OneBit, EFSignSGD, SignSGD, Signum)
_FEW_LEVELS = (QSGD, TernGrad, Natural)
_FEW_OF_MANY = (TopK, RandomK, DGC)
_NOT_BY_ROWS = (PowerSGD, OkTopk, TopkA, TopkDSA, GTopk, Gaussiank)

CODECS: dict[str, type[Codec]] = {
    one.name: one for one in (*_NARROW, *_OF_SIGNS, *_FEW_LEVELS, *_FEW_OF_MANY)
}
"""All codecs by name."""

_COMPRESSORS: dict[str, type[Compressor]] = CODECS | {one.name: one for one in _NOT_BY_ROWS}


def class_with(option: str) -> type[Compressor] | None:
    """Returns the first class of compressors that has an option of this name."""
    kinds = _COMPRESSORS.values()
    return next((one for one in kinds if option in signature(one).parameters), None)


class NoCompression:
    """Changes nothing: gradients and parameters travel as they are."""

    name = "none"


COMPRESSORS = ("none", *_COMPRESSORS)
"""Names of all compressors of ours."""

ENTRY_POINTS = "lightning_dear.compressors"
"""Group of entry points under which other packages name codecs of theirs."""


def resolve_compressor(compressor: str | Compressor | NoCompression | None) -> Compressor | None:
    """Returns what a name or an instance means; None for no compression.

    Names that other packages have registered (`ENTRY_POINTS`) count, after ours.

    Raises:
        ValueError: For an unknown name, with a list of the valid ones.
        TypeError: If it is neither a name nor a compressor.
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
    others = {one.name: one for one in entry_points(group=ENTRY_POINTS)}
    if compressor not in others:
        names = (*COMPRESSORS, *others)
        raise ValueError(
            f"Unknown compressor {compressor!r}; valid names: {', '.join(names)}."
            f"{is_meant(compressor, names)}"
        )
    codec = others[compressor].load()()
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{others[compressor].value}, registered as compressor {compressor!r}, is no Codec."
        )
    return codec


def check_replaces(codec: Compressor, configured: Compressor | None) -> None:
    """Refuses a codec that cannot be used in mid-run instead of the configured one.

    Raises:
        ValueError: Naming those that can.
    """
    if configured is None:
        raise ValueError(f"{codec.name} cannot be used in mid-run: set compressor= first.")
    if codec.has_density and isinstance(configured, FewOfMany):
        codec = codec.at_density(configured.density)
    if type(codec) is not Fp32 and codec != configured:
        raise ValueError(
            f"{codec!r} cannot replace {configured!r} in mid-run: only fp32 can, and the same"
            " compressor with another density."
        )


__all__ = [
    "CODECS",
    "COMPRESSORS",
    "DGC",
    "QSGD",
    "Bf16",
    "Codec",
    "Compressor",
    "EFSignSGD",
    "Fp16",
    "Fp32",
    "GTopk",
    "Gaussiank",
    "Int4",
    "Int8",
    "LoCo",
    "Natural",
    "NoCompression",
    "OkTopk",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "Signum",
    "SparseAllReduce",
    "TernGrad",
    "TopK",
    "TopkA",
    "TopkDSA",
    "check_replaces",
    "resolve_compressor",
]
