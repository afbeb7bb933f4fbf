"""fp16 and bf16."""

from __future__ import annotations

from hypothesis import given, settings
from torch import Tensor

from lightning_dear.compression.floats import Bf16
from tests.compression.battery import check_all, check_contracts
from tests.compression.inputs import rows


@settings(max_examples=200, deadline=None)
@given(rows())
def test_bf16(some: Tensor) -> None:
    check_all(Bf16(), some)
    check_contracts(Bf16(), some)
