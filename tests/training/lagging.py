"""Codecs that stay far behind, and say that they do not: what must be right whatever the lag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dear.compression import EFSignSGD, OneBit, TopK
from lightning_dear.compression.codec import Lag


@dataclass(frozen=True, kw_only=True)
class LaggingEFSignSGD(EFSignSGD):
    """May encode differences of parameters."""

    lag: ClassVar[Lag] = "small"


@dataclass(frozen=True, kw_only=True)
class LaggingOneBit(OneBit):
    """May encode differences of parameters."""

    lag: ClassVar[Lag] = "small"


@dataclass(frozen=True, kw_only=True)
class LaggingTopK(TopK):
    """May encode differences of parameters."""

    lag: ClassVar[Lag] = "small"
