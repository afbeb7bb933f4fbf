"""Hashes of nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> str:
    """A hash of nested containers, numbers, text and tensors, by value alone."""
    hashed = hashlib.sha256()
    for piece in _bytes_of(value):
        hashed.update(piece)
    return hashed.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} {value.device.type}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield f"key {key!r}".encode()
            yield from _bytes_of(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"sequence {len(value)}".encode()
        for one in value:
            yield from _bytes_of(one)
    elif isinstance(value, str | bytes | int | float | bool | None):
        yield repr(value).encode()
    else:
        raise TypeError(f"Nobody knows how to hash a {type(value).__name__}.")
