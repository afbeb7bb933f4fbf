"""Other codecs for some tensors, such as none for norms and biases."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lightning_dear.compression.codec import Codec, Compressor
from lightning_dear.compression.floats import Fp32

VECTORS = "vectors"
"""Instead of a pattern: all tensors of fewer than two dimensions."""

Groups = tuple[tuple[str, Codec], ...]
"""(pattern of parameter names, codec of those tensors), the first match counts."""


def groups_of(compressors: Mapping[str, Compressor | None]) -> Groups:
    """Returns what a user's mapping means; None is no compression.

    Raises:
        ValueError: For a compressor that is no codec of rows.
    """
    groups = []
    for pattern, compressor in compressors.items():
        if compressor is not None and not isinstance(compressor, Codec):
            raise ValueError(
                f"compressors={{{pattern!r}: {compressor.name}}}: only codecs of rows can be used"
                f" for some tensors, and {compressor.name} is none. Set it as the compressor."
            )
        groups.append((pattern, compressor or Fp32()))
    return tuple(groups)


def codec_for(groups: Groups, codec: Codec, name: str, num_dimensions: int) -> Codec:
    """Returns what encodes the tensor of this name; `codec` where no group has it."""
    number = _match(groups, name, num_dimensions)
    return codec if number is None else groups[number][1]


def _match(groups: Groups, name: str, num_dimensions: int) -> int | None:
    for number, (pattern, _) in enumerate(groups):
        if fnmatchcase(name, pattern) or (pattern == VECTORS and num_dimensions < 2):
            return number
    return None


def unused_group(groups: Groups, tensors: Iterable[tuple[str, int]]) -> str | None:
    """Says which group has no tensor, and what names there are; None if each has one.

    Args:
        groups: The first match counts.
        tensors: (name, number of dimensions) of all that may be trained, now or later.
    """
    tensors = list(tensors)
    for number, (pattern, _) in enumerate(groups):
        own = groups[: number + 1]
        if pattern != VECTORS and not any(_match(own, *one) == number for one in tensors):
            examples = f" Names are such as {tensors[0][0]!r}." if tensors else ""
            return (
                f"No parameter is encoded as compressors={{{pattern!r}: ...}} says: no name matches"
                f" it, or an earlier pattern does.{examples}"
            )
    return None


def check_groups(groups: Groups, codec: Compressor | None) -> None:
    """Refuses codecs of groups that cannot stand beside `codec`.

    Raises:
        ValueError: Saying why.
    """
    for pattern, other in groups:
        what = f"compressors={{{pattern!r}: {other.name}}}"
        if not isinstance(codec, Codec):
            name = "none" if codec is None else codec.name
            raise ValueError(
                f"{what} encodes some parameters in another way than the others, and"
                f" compressor={name!r} cannot leave any out. Leave compressors= out, or use one"
                " that encodes each tensor's numbers, such as 'topk' or 'int8'."
            )
        if type(other) is Fp32 and codec.votes:
            raise ValueError(
                f"{what} cannot stand beside {codec.name}: signs would be stepped with the same"
                " learning rate as gradients."
            )
        if type(other) is Fp32:
            continue
        if other.halves != codec.halves:
            raise ValueError(
                f"{what} encodes halves={other.halves!r}, and {codec.name} {codec.halves!r}. Set"
                " the same in both."
            )
        if other.brings_momentum or codec.brings_momentum or other.votes or codec.votes:
            raise ValueError(
                f"{what} cannot stand beside {codec.name}: codecs that vote or keep momentum need"
                " an optimizer of their own."
            )
