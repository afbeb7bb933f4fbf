"""Compressors by name. So far there is one: none."""

from __future__ import annotations


class NoCompression:
    """The identity: gradients and parameters travel as they are."""

    name = "none"


COMPRESSORS: dict[str, type[NoCompression]] = {"none": NoCompression}


def resolve_compressor(compressor: str | NoCompression) -> NoCompression:
    """The compressor that a name or an instance means.

    Raises:
        ValueError: For an unknown name; the message lists the valid ones.
        TypeError: If it is neither a name nor a compressor.
    """
    if type(compressor) is NoCompression:
        return compressor
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


__all__ = ["COMPRESSORS", "NoCompression", "resolve_compressor"]
