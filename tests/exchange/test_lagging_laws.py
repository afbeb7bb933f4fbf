"""gather="parameters" with encoded differences: masters, replicas and lag, told by the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import Bf16, Codec, Fp16, Int4, Int8, LoCo
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner, NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.test_lagging import masters_of
from tests.training.lagging import LaggingEFSignSGD, LaggingTopK
from tests.training.linear import SHAPES, SOMETIMES, Run
from tests.training.three_ways import SMALL_BUCKETS
from tests.training.wire import Wire, own_norm

CODECS: tuple[Codec, ...] = (
    Fp16(),
    Bf16(),
    Int8(block_size=64),
    Int4(block_size=64),
    LoCo(block_size=64),
    LaggingEFSignSGD(block_size=64),
    LaggingTopK(density=0.1),
)


# --- masters --------------------------------------------------------------------------------------


@distributed(world_sizes=(1, 3))
def test_masters_have_all_gradients_but_what_is_still_to_be_sent() -> None:
    _check_masters(10)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=240)
def test_masters_have_all_gradients_of_fifty_steps_but_what_is_still_to_be_sent() -> None:
    _check_masters(50)


def _check_masters(num_steps: int) -> None:
    """Whatever replicas have of them: masters + residuals = sum of the mean gradients."""
    for codec in CODECS:
        run = Run(ExchangeOptions("parameters", compressor=codec))
        for step in range(num_steps):
            run.step(leaves_out=step % 5 == 3)
        rate = codec.rate if isinstance(codec, LoCo) else 1.0
        masters = masters_of(run.part)
        assert run.error(rate, masters) <= 1e-5, codec
        if dist.get_world_size() > 1:
            # Alone, a rank steps what was encoded already: encoding it again loses nothing.
            pairs = zip(masters, run.model.weights, strict=True)
            assert any(not torch.equal(*pair) for pair in pairs), codec


# --- masters, replicas and the lag between them ---------------------------------------------------


MOMENTUM = 0.5
"""With it the lag is not 0 even where a rank is alone."""


class Law:
    """A run beside what the bytes say, in fp64: masters, replicas, and so the lag.

    m <- momentum m + sum of what came,  master <- master - m,  replica <- replica + what came
    """

    def __init__(self, codec: Codec, fusion: FusionPlanner = SMALL_BUCKETS) -> None:
        self.codec = codec
        options = ExchangeOptions("parameters", compressor=codec)
        self.run = Run(options, fusion, momentum=MOMENTUM)
        self.wire = Wire(self.run)
        self.momenta, self.masters, self.replicas = (
            [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(3)
        )

    def step(self) -> None:
        """One step; the logged lag is that of the run's own masters and replicas."""
        leaves_out = self.run.num_steps % 5 == 3
        self.run.step(leaves_out=leaves_out)
        differences = self.wire.take_differences(self.codec)
        assert any(bool(one.any()) for one in differences)
        for number, difference in enumerate(differences):
            # What nobody has used is not moved, whatever its bytes say.
            if not leaves_out or number != SOMETIMES:
                self.replicas[number].add_(difference)
        for number, mean in enumerate(self.wire.take_means(self.codec)):
            # What nobody has used is not stepped: what came of it goes back to residuals.
            if not leaves_out or number != SOMETIMES:
                self.momenta[number].mul_(MOMENTUM).add_(mean)
                self.masters[number].sub_(self.momenta[number])
        self._check_figure()

    def _check_figure(self) -> None:
        part, weights = self.run.part, list(self.run.model.weights)
        masters = [one.double() for one in masters_of(part)]
        behind = [one - weight.detach() for one, weight in zip(masters, weights, strict=True)]
        lag = own_norm(part, weights, behind) / own_norm(part, weights, masters)
        assert float(part.encoding_figures()["lag"]) == pytest.approx(lag, rel=1e-6, abs=0)

    def check(self) -> None:
        """The run's masters and replicas are those of the bytes; replica + lag = master."""
        part, weights = self.run.part, list(self.run.model.weights)
        masters = [one.double() for one in masters_of(part)]
        whole = _norm(masters)
        lag = [one - other for one, other in zip(self.masters, self.replicas, strict=True)]
        sums = [weight.detach().double() + one for weight, one in zip(weights, lag, strict=True)]
        for ours, theirs in ((self.masters, masters), (self.replicas, weights), (sums, masters)):
            assert _distance(ours, theirs) <= 1e-6 * whole, self.codec
        share = own_norm(part, weights, lag) / own_norm(part, weights, masters)
        assert share > 0, self.codec
        assert float(part.encoding_figures()["lag"]) == pytest.approx(share, rel=0, abs=1e-6)


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([one.double().flatten() for one in tensors]).norm())


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return _norm([a.detach().double() - b.detach().double() for a, b in pairs])


def _check_lag(num_steps: int) -> None:
    for codec in CODECS:
        law = Law(codec)
        for _ in range(num_steps):
            law.step()
        law.check()


@distributed(world_sizes=(1, 3))
def test_the_lag_is_what_differences_have_not_brought() -> None:
    _check_lag(6)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=240)
def test_the_lag_is_what_differences_have_not_brought_in_fifty_steps() -> None:
    _check_lag(50)


@distributed(world_sizes=(2,))
def test_the_lag_stays_what_it_is_with_another_plan() -> None:
    for codec in (Int4(block_size=64), LoCo(block_size=64)):
        law = Law(codec)
        for fusion in (NoFusion(), SingleFusion(), None):
            for _ in range(3):
                law.step()
            if fusion is not None:
                part = law.run.part
                part.replan(fusion.plan(part.tensors, dist.get_world_size()))
        law.check()
