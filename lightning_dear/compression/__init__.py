"""Compressors by name. So far the strategy knows one, none; codecs wait for their exchange."""

from __future__ import annotations

from lightning_dear.compression.codec import Codec
from lightning_dear.compression.floats import Bf16, Fp16
from lightning_dear.compression.integers import Int4, Int8
from lightning_dear.compression.signs import EFSignSGD, OneBit, SignSGD, Signum
from lightning_dear.compression.sparse import DGC, RandomK, TopK
from lightning_dear.compression.stochastic import QSGD, Natural, TernGrad

_CODECS = (
    Fp16,
    Bf16,
    Int8,
    Int4,
    OneBit,
    EFSignSGD,
    SignSGD,
    Signum,
    QSGD,
    TernGrad,
    Natural,
    TopK,
    RandomK,
    DGC,
)

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in _CODECS}
"""All codecs by name."""


class NoCompression:
    """The identity: gradients and parameters travel as they are."""

    name = "none"


COMPRESSORS: dict[str, type[NoCompression]] = {"none": NoCompression}


def resolve_compressor(compressor: str | NoCompression | Codec) -> NoCompression:
    """The compressor that a name or an instance means.

    Raises:
        ValueError: For an unknown name, with a list of the valid ones, and for codecs, which no
            exchange sends yet.
        TypeError: If it is neither a name nor a compressor.
    """
    if type(compressor) is NoCompression:
        return compressor
    name = compressor.name if isinstance(compressor, Codec) else compressor
    if isinstance(name, str) and name in CODECS:
        raise ValueError(
            f"compressor={name!r} is a codec, and the strategy does not send encoded buckets yet."
            f" Valid names: {', '.join(COMPRESSORS)}."
        )
    if not isinstance(compressor, str):
        raise TypeError(
            f"compressor must be one of {', '.join(COMPRESSORS)} or an instance from"
            f" lightning_dear.compression, got {type(compressor).__name__}."
        )
    if compressor not in COMPRESSORS:
        raise ValueError(
            f"Unknown compressor {compressor!r}; valid names: {', '.join(COMPRESSORS)}."
        )
    return COMPRESSORS[compressor]()


__all__ = [
    "CODECS",
    "COMPRESSORS",
    "DGC",
    "QSGD",
    "Bf16",
    "Codec",
    "EFSignSGD",
    "Fp16",
    "Int4",
    "Int8",
    "Natural",
    "NoCompression",
    "OneBit",
    "RandomK",
    "SignSGD",
    "Signum",
    "TernGrad",
    "TopK",
    "resolve_compressor",
]
