"""The way of a device's messages through the host: measured, and told to users."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives import factory
from lightning_dear.collectives.staged import StagedCollectives
from lightning_dear.collectives.streams import Pairs, Streams
from lightning_dear.tuning.host_path import HostPath, measure_host_path
from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts

MB = 1e6


def test_an_exchange_by_hand() -> None:
    # Of 100 MB each of 4 ranks sends 75 MB a half, adds 75 MB, and copies 250 MB.
    path = HostPath(network_s=1e-8, bus_s=1e-10, sum_s=2e-10)
    assert path.exchange_s(100 * MB, 4) == pytest.approx((1.5, 1.5 + 0.025 + 0.015))


@pytest.mark.parametrize(
    ("path", "nccl_s", "words"),
    [
        (HostPath(1e-8, 1e-10, 1e-10), None, "NCCL at least 1.5 s, predicted. That is no real"),
        (HostPath(1e-9, 1e-9, 1e-10), None, "Up to 63% less with process_group_backend='nccl'."),
        (
            HostPath(1e-8, 1e-10, 1e-10),
            3.0,
            "NCCL 3 s. Up to 49% less with process_group_backend='g",
        ),
    ],
)
def test_both_figures_are_told(path: HostPath, nccl_s: float | None, words: str) -> None:
    said = path.described(100 * MB, 4, nccl_s)
    assert words in said
    assert f"at most {path.exchange_s(100 * MB, 4)[1]:.3g} s through the host's memory" in said


class _SlowBus(Streams):
    """Copies take 20 ms down and 40 ms up."""

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        return lambda: time.sleep(0.02)

    @override
    def copy_up(self, pairs: Pairs) -> Callable[[], None]:
        return lambda: time.sleep(0.04)


@distributed((2, 4))
def test_it_is_measured_beside_any_backend(world_size: int) -> None:
    before = torch.get_rng_state()
    with on_hosts(world_size // 2):
        collectives = factory.new_collectives(torch.device("cpu"), timedelta(seconds=30))
    # Where parameters lie on a device, the doctor measures with other collectives.
    with mock.patch.object(collectives.streams, "device", torch.device("meta")):
        host = factory.on_host(collectives)
    assert host is not collectives
    assert host.hops == world_size // 2
    path = measure_host_path(host, _SlowBus(), 1 << 20)
    assert path.bus_s * (1 << 20) == pytest.approx(0.04, rel=0.5)
    assert 0 < path.network_s < 1e-6
    assert 0 < path.sum_s < 1e-7
    assert {*host.all_gather_object(path)} == {path}
    assert not host.ledger
    assert torch.equal(torch.get_rng_state(), before)


def test_collectives_of_the_host_are_used_as_they_are() -> None:
    alone = factory.new_collectives(torch.device("cpu"))
    assert factory.on_host(alone) is alone
    staged = StagedCollectives(alone, Streams(torch.device("meta")))
    assert factory.on_host(staged) is staged
