"""Codecs for some parameters, chosen by name, such as no compression of norms and biases.

A group is a pattern of parameter names, and the codec of the parameters whose names match it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lightning_dear.compression.codec import Codec, Compressor
from lightning_dear.compression.floats import Fp32

VECTORS = "vectors"
"""May be used in place of a pattern: matches all parameters of fewer than two dimensions."""

OTHERS = "*"
"""Pattern of all parameters that no earlier pattern matches."""

Groups = tuple[tuple[str, Codec], ...]
"""Pairs (pattern of parameter names, codec of these parameters). If several patterns match a name,
the first one counts."""


def split(compressors: Mapping[str, Compressor | None]) -> tuple[Compressor | None, Groups]:
    """Returns the compressor of a strategy, and the groups of parameters that have another one.

    If parameters of `OTHERS` travel as they are, and others do not, the first codec that encodes
    stands for all, since it decides what is gathered. The last group is then (`OTHERS`, `Fp32`).

    Args:
        compressors: Pattern of parameter names -> compressor. None as a compressor means no
            compression, and becomes `Fp32` in a group. The last pattern is `OTHERS`.

    Raises:
        ValueError: If the last pattern is another one, or if a compressor besides that of `OTHERS`
            is not a `Codec`, such as `PowerSGD`.
    """
    if not compressors or [*compressors][-1] != OTHERS or OTHERS in [*compressors][:-1]:
        raise ValueError(
            f"compressor={{...}} needs {OTHERS!r} as its last pattern, for all other parameters,"
            f" such as {{'vectors': 'none', '*': 'int8'}}; got {[*compressors]}."
        )
    groups: list[tuple[str, Codec]] = []
    for pattern, one in [*compressors.items()][:-1]:
        if one is not None and not isinstance(one, Codec):
            raise ValueError(
                f"{one.name} cannot compress only some parameters ({pattern!r}). Choose another for"
                f" them, such as int8 or topk, or set compressor={one.name!r} for all."
            )
        groups.append((pattern, one or Fp32()))
    others = compressors[OTHERS]
    encoding = [one for one in compressors.values() if type(one) not in (type(None), Fp32)]
    if encoding and type(others) in (type(None), Fp32):
        others = encoding[0]
        groups.append((OTHERS, Fp32()))
    return others, () if others is None else tuple(groups)


def codec_for(groups: Groups, codec: Codec, name: str, num_dimensions: int) -> Codec:
    """Returns the codec of one parameter.

    Args:
        groups: Codecs of some parameters.
        codec: Codec of the parameters that are in no group.
        name: Name of the parameter.
        num_dimensions: Number of dimensions of the parameter.
    """
    number = _match(groups, name, num_dimensions)
    return codec if number is None else groups[number][1]


def _match(groups: Groups, name: str, num_dimensions: int) -> int | None:
    """Returns the index of the first group that a parameter matches. None means no group."""
    for number, (pattern, _) in enumerate(groups):
        if fnmatchcase(name, pattern) or (pattern == VECTORS and num_dimensions < 2):
            return number
    return None


def unused_group(groups: Groups, tensors: Iterable[tuple[str, int]]) -> str | None:
    """Returns a message for the user about the first group that holds no parameter.

    Args:
        groups: Codecs of some parameters.
        tensors: (name, number of dimensions) of all parameters that may be trained, now or later.

    Returns:
        The message. None means that each group holds a parameter, except perhaps groups whose
        pattern is `VECTORS` or `OTHERS`.
    """
    tensors = list(tensors)
    used = {_match(groups, *one) for one in tensors}
    for number, (pattern, _) in enumerate(groups):
        if pattern not in (VECTORS, OTHERS) and number not in used:
            examples = f" Names are such as {tensors[0][0]!r}." if tensors else ""
            return (
                f"compressor={{{pattern!r}: ...}} is used for no parameter: no name matches it, or"
                f" an earlier pattern does. Correct the pattern, or leave it out.{examples}"
            )
    return None


def check_groups(groups: Groups, compressor: Compressor | None) -> None:
    """Refuses groups whose codecs cannot be combined with the compressor of the other parameters.

    Does nothing if there are no groups.

    Args:
        groups: Codecs of some parameters.
        compressor: Compressor of all other parameters. None means no compression.

    Raises:
        ValueError: If `compressor` is no codec; if a group's `halves` differ from those of
            `compressor`; if one of the two votes or keeps momentum. A group that is not compressed
            (`Fp32`) is refused only if `compressor` votes. The message says what to change.
    """
    for pattern, other in groups:
        what = f"compressor={{{pattern!r}: {other.name}}}"
        if not isinstance(compressor, Codec):
            name = "none" if compressor is None else compressor.name
            raise ValueError(
                f"{what} is for some parameters, and {name} cannot leave any out. Use another one"
                f" for {OTHERS!r}, such as int8 or topk, or set compressor={name!r} for all."
            )
        if type(other) is Fp32 and compressor.votes:
            raise ValueError(
                f"{what} leaves parameters uncompressed beside {compressor.name}'s signs. Leave it"
                " out. Signs and gradients need different learning rates."
            )
        if type(other) is Fp32 or other is compressor:
            continue
        if other.halves != compressor.halves:
            raise ValueError(
                f"{what} has halves={other.halves!r}, and {compressor.name} has"
                f" {compressor.halves!r}. Set the same in both, such as Int8(halves='both')."
            )
        if any(codec.brings_momentum or codec.votes for codec in (other, compressor)):
            raise ValueError(
                f"{what} cannot be used beside {compressor.name}. Leave it out. A"
                " codec that votes or keeps momentum needs an optimizer of its own."
            )
