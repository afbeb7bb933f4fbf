"""Rows: torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.lightning.matrix.nets import RowNet
from tests.lightning.matrix.rows import Feature

BACKEND = "eager"
"""Traces and guards like any other, and keeps the bits."""
row = partial(Feature, section="torch.compile")


class _Parts(RowNet):
    """Two modules inside are compiled."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        for layer in (self.net.layers[0], self.net.layers[2]):
            layer.compile(backend=BACKEND)


class _Inner(RowNet):
    """The LightningModule holds a compiled module."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = torch.compile(self.net, backend=BACKEND)


def _whole(optimizer: str) -> Any:
    return torch.compile(RowNet(optimizer), backend=BACKEND)


REMARK = (
    "only reduce-scatters overlap; the first step is not compiled; where it logs, Python 3.11 fails"
    " under DDP, too: compile an inner module"
)
FEATURES = (
    row(name="torch.compile of the LightningModule", net=_whole, remark=REMARK),
    row(name="torch.compile of an inner module", net=_Inner, remark=REMARK),
    row(name="Module.compile of parts", net=_Parts, remark=REMARK),
)
