"""Nothing of a compressor waits for a device: it works on tensors that hold no numbers.

Whatever asks for a number, or for how many there are, fails on the device "meta". What runs there
is what runs on an accelerator: the way round that some codecs take on a CPU is not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import Codec, Compressor, Fp16, PowerSGD, SparseAllReduce, TopK
from tests.compression.low_rank import SHAPES, Channel
from tests.compression.properties import PROPERTIES

INSTANCES = [
    one
    for properties in PROPERTIES.values()
    for one in properties.instances
    # These work with gloo alone, and refuse everything else.
    if not isinstance(one, SparseAllReduce)
]
META = torch.device("meta")


def _send(codec: Codec, numel: int = 1000) -> None:
    rows = torch.empty(3, numel, device=META)
    wire = torch.empty(3, codec.wire_bytes(numel), device=META, dtype=torch.uint8)
    # Kernels of this device draw nothing, and take the generator of any other.
    codec.encode(rows, wire, torch.Generator())
    codec.decode(wire, rows, torch.Generator())
    if isinstance(codec, TopK):
        codec.sent_mask(wire, torch.empty(3, numel, device=META, dtype=torch.bool))


@pytest.mark.parametrize("compressor", INSTANCES, ids=repr)
def test_no_number_is_asked_for(compressor: Compressor) -> None:
    if isinstance(compressor, Codec):
        _send(compressor)
        return
    assert isinstance(compressor, PowerSGD)
    for shape in SHAPES:
        channel = Channel(compressor, torch.Size(shape), META)
        channel.send(torch.empty(shape, device=META))


class Looks(Fp16):
    """Asks whether there is anything to clip."""

    def encode(self, rows: Tensor, wire: Tensor, generator: torch.Generator | None = None) -> None:
        if rows.abs().max() > torch.finfo(torch.float16).max:
            rows = rows.clamp(-65504, 65504)
        super().encode(rows, wire, generator)


def test_one_that_asks_fails() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        _send(Looks())
