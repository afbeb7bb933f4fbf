"""Codecs for some parameters, chosen by name, such as no compression of norms and biases.

A group is a pattern of parameter names, and the codec of the parameters whose names match it.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lightning_dear.compression.codec import Codec, Compressor
from lightning_dear.compression.floats import Fp32

VECTORS = "vectors"
"""May be used in place of a pattern: matches all parameters of fewer than two dimensions."""

Groups = tuple[tuple[str, Codec], ...]
"""Pairs (pattern of parameter names, codec of these parameters). If several patterns match a name,
the first one counts."""


def groups_of(compressors: Mapping[str, Compressor | None]) -> Groups:
    """Turns the `compressors` mapping of a `CompressionSchedule` into groups.

    Args:
        compressors: Pattern of parameter names -> compressor. None as a compressor means no
            compression, and becomes `Fp32`.

    Raises:
        ValueError: If a compressor is not a `Codec`, such as `PowerSGD`.
    """
    groups = []
    for pattern, compressor in compressors.items():
        if compressor is not None and not isinstance(compressor, Codec):
            raise ValueError(
                f"{compressor.name} cannot compress only some parameters (compressors= has it for"
                f" {pattern!r}). Choose another for them, such as int8 or topk, or set"
                f" compressor={compressor.name!r} on the strategy and leave compressors out."
            )
        groups.append((pattern, compressor or Fp32()))
    return tuple(groups)


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
        pattern is `VECTORS`.
    """
    tensors = list(tensors)
    for number, (pattern, _) in enumerate(groups):
        so_far = groups[: number + 1]
        if pattern != VECTORS and not any(_match(so_far, *one) == number for one in tensors):
            examples = f" Names are such as {tensors[0][0]!r}." if tensors else ""
            return (
                f"compressors={{{pattern!r}: ...}} is used for no parameter: no name matches it, or"
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
        what = f"compressors={{{pattern!r}: {other.name}}}"
        if not isinstance(compressor, Codec):
            name = "none" if compressor is None else compressor.name
            raise ValueError(
                f"{what} is for some parameters, and compressor={name!r} cannot leave any out."
                " Leave compressors= out, or set compressor='int8' or 'topk' on the strategy."
            )
        if type(other) is Fp32 and compressor.votes:
            raise ValueError(
                f"{what} leaves parameters uncompressed beside {compressor.name}'s signs. Leave it"
                " out of compressors. Signs and gradients need different learning rates."
            )
        if type(other) is Fp32:
            continue
        if other.halves != compressor.halves:
            raise ValueError(
                f"{what} has halves={other.halves!r}, and {compressor.name} has"
                f" {compressor.halves!r}. Set the same in both, such as Int8(halves='both')."
            )
        if any(codec.brings_momentum or codec.votes for codec in (other, compressor)):
            raise ValueError(
                f"{what} cannot be used beside {compressor.name}. Leave it out of compressors. A"
                " codec that votes or keeps momentum needs an optimizer of its own."
            )
