"""Sums of 16-bit gradients on simulated NCCL: in fp32 with `reduce_dtype`, as on gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dear.compression import Int8
from lightning_dear.exchange.options import ExchangeOptions
from tests.streams import trainings
from tests.streams.test_trainings import check
from tests.streams.trainings import Training, reference, run

IN_FP32 = ExchangeOptions(reduce_dtype="fp32")


def _added(total: Tensor | None, own: Tensor | None) -> Tensor | None:
    """Adds in fp32, as gloo's sums do."""
    given = [one.float() for one in (total, own) if one is not None]
    return sum(given[1:], given[0]) if given else None


def _expected(dtype: torch.dtype, size: int) -> Sequence[Tensor]:
    with mock.patch.object(trainings, "_added", _added):
        return reference(Training(dtype=dtype, options=IN_FP32), size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_16_bits_are_summed_in_fp32(dtype: torch.dtype, size: int) -> None:
    found = run(Training(dtype=dtype, options=IN_FP32), size)
    check(found)
    assert all(map(torch.equal, found.results[0], _expected(dtype, size)))
    by_backend = run(Training(dtype=dtype), size)
    # The backend rounds after each addition.
    assert not all(map(torch.equal, found.results[0], by_backend.results[0]))
    num_sums = [
        sum("all-to-all" in launch or "reduce-scatter" in launch for launch in one.launches)
        for one in (found.devices[0], by_backend.devices[0])
    ]
    assert num_sums[0] == num_sums[1]


def test_fp32_is_summed_as_before() -> None:
    with pytest.warns(UserWarning, match="reduce_dtype has no effect on fp32"):
        found = run(Training(options=IN_FP32), 3)
    check(found)
    assert all(map(torch.equal, found.results[0], reference(Training(), 3)))
    assert not any("all-to-all" in launch for launch in found.devices[0].launches)


@pytest.mark.filterwarnings("ignore:reduce_dtype has no effect")
def test_hops_within_a_host_are_refused() -> None:
    with pytest.raises(ValueError, match="hops=2 works only with gloo. Use hops=1"):
        run(Training(options=IN_FP32), 4, ranks_a_host=2)


@pytest.mark.parametrize(
    "options", [{"decouple": False, "gather": "gradients"}, {"compressor": Int8()}]
)
def test_sums_that_are_made_elsewhere_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reduce_dtype='fp32' sums gradients at the owners"):
        ExchangeOptions(reduce_dtype="fp32", **options)
