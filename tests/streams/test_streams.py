"""Programs that use more streams than one, and other things that users of NCCL do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.streams import CudaStreams
from lightning_dear.compression import Bf16, Codec, Int8, RandomK
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import ThresholdFusion
from lightning_dear.telemetry.clock import StreamClock
from tests.streams.device import DEVICE, Cuda, Stream, here
from tests.streams.ranks import Found, Rank, on_simulated_cuda
from tests.streams.test_trainings import check, coded
from tests.streams.trainings import (
    FIRST_STEADY,
    NUM_STEPS,
    OnDevice,
    Training,
    reference,
    run,
    train,
)
from tests.training.models import batch, weights

CUDA: Any = Cuda()


class _RunsOn(torch.autograd.Function):
    """The backward of what was computed before runs on a stream, as autograd sees to on CUDA.

    A CPU's autograd knows no streams.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, stream: Stream) -> Tensor:
        context.stream = stream
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        device = here()
        # Behind whoever made the gradient; the head of the model, which is on the first stream.
        context.stream.wait_stream(device.default)
        device.current = context.stream
        return gradient, None


class _Branches(nn.Module):
    """Two layers, each of which may run on a stream of its own."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 40) for _ in streams)
        self.head = nn.Linear(40, 3)
        self._streams = streams

    def forward(self, x: Tensor) -> Tensor:
        main, outputs = CUDA.current_stream(), []
        for stream in self._streams:
            stream.wait_stream(main)
        for layer, stream in zip(self.layers, self._streams, strict=True):
            with CUDA.stream(stream):
                outputs.append(_RunsOn.apply(layer(x), stream))
        for stream in self._streams:
            main.wait_stream(stream)
        return self.head(sum(outputs))


def check_order(found: Found[Any]) -> None:
    """As `check`, but for memory of one stream that another one uses, which is users' care."""
    assert not found.races, found.races
    assert found.other_order is None, found.other_order


def _train_branches(rank: Rank, *, num_streams: int, keeps: bool = False) -> list[Tensor]:
    """With branches on as many streams, of both of which one bucket has parameters.

    Args:
        rank: See `Rank`.
        num_streams: See above.
        keeps: Whether somebody else has all gradients, too, so that each is copied at once.
    """
    torch.manual_seed(0)
    streams = [rank.device.default, *(CUDA.Stream() for _ in range(num_streams - 1))]
    model = _Branches([streams[0], streams[-1]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank.device.put(*model.parameters())
    fusion = ThresholdFusion(bucket_cap_mb=25, first_bucket_cap_mb=1e-6)
    clock = StreamClock(DEVICE, CUDA)
    pipeline = Pipeline(model, [optimizer], rank.collectives(), fusion, clock=clock)
    kept: list[Tensor | None] = []
    for one in model.parameters() if keeps else ():
        one.register_post_accumulate_grad_hook(lambda one: kept.append(one.grad))
    for step in range(NUM_STEPS):
        inputs, targets = batch("mlp", step, rank.number)
        rank.device.put(inputs, targets)
        with pipeline.forward():
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
            # As autograd does at the end.
            rank.device.current = streams[0]
            streams[0].wait_stream(streams[-1])
        optimizer.step()
    pipeline.detach()
    return weights(model)


def test_branches_on_one_stream() -> None:
    on_simulated_cuda(lambda rank: _train_branches(rank, num_streams=1), 3).check()


@pytest.mark.parametrize("keeps", [False, True])
def test_branches_on_two_streams_that_share_a_bucket(keeps: bool) -> None:
    found = on_simulated_cuda(partial(_train_branches, num_streams=2, keeps=keeps), 2)
    check_order(found)
    # Nor is a gradient free while it is copied on another stream.
    assert not [what for what in found.frees if "foreach" in what]


def _average_weights(rank: Rank) -> list[Tensor]:
    """Reads weights on a second stream between a step and the next forward."""
    trained, beside = OnDevice(Training(), rank), CUDA.Stream()
    pipeline, optimizer = trained.pipeline, trained.optimizers[0]
    for step in range(NUM_STEPS):
        beside.wait_stream(CUDA.current_stream())
        with CUDA.stream(beside):
            for parameter in trained.model.parameters():
                parameter.detach() * 0.1
        with pipeline.forward():
            loss = trained.loss(step)
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        # What it reads must not change yet, as users must see to under any strategy.
        CUDA.current_stream().wait_stream(beside)
        optimizer.step()
    return trained.end()


def test_weights_that_are_averaged_on_another_stream() -> None:
    on_simulated_cuda(_average_weights, 2).check()


CODED = ExchangeOptions("parameters", compressor=Int8())


@pytest.mark.parametrize("options", [None, CODED], ids=["dense", "int8"])
def test_state_that_is_saved_in_inference_mode_after_it_was_loaded(
    options: ExchangeOptions | None,
) -> None:
    training = Training(options=options)

    def load_and_save(trained: OnDevice, step: int) -> None:
        part = trained.pipeline.parts[0]
        if step == FIRST_STEADY:
            part.optimizer.load_state_dict(part.optimizer_state_dict())
            with torch.inference_mode():
                part.optimizer_state_dict()

    found: Found[list[Tensor]] = on_simulated_cuda(
        lambda rank: train(training, rank, hook=load_and_save), 2
    )
    found.check()
    if options is None:
        assert all(map(torch.equal, found.results[0], reference(training, 2)))


@pytest.mark.parametrize("codec", [Bf16(), Int8()], ids=lambda one: one.name)
def test_nan_of_one_rank_shows_in_all_weights_of_an_optimizer_that_steps_by_signs(
    codec: Codec,
) -> None:
    training = Training(optimizer="signs", options=ExchangeOptions("parameters", compressor=codec))

    def spoil(trained: OnDevice, step: int) -> None:
        if step == FIRST_STEADY and trained.rank.number:
            for parameter in trained.model.parameters():
                parameter.register_hook(lambda gradient: gradient * torch.nan)

    found = on_simulated_cuda(lambda rank: train(training, rank, hook=spoil), 2)
    for found_weights in found.results:
        assert all(bool(one.isnan().all()) for one in found_weights)


def test_what_is_sent_once_lives_until_it_has_been_sent() -> None:
    """With a timeline; `test_trainings.py` trains without one."""
    check(run(replace(coded("oktopk", "mlp"), has_timeline=True), 2))


ALONE = {
    "int8": CODED,
    "randomk": ExchangeOptions("gradients", compressor=RandomK(density=0.3)),
    "gradients": ExchangeOptions("gradients", compressor=Int8()),
}


@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_the_host_of_one_rank_waits_for_nothing(options: ExchangeOptions) -> None:
    """Without a compressor the flags are what nothing but `test_accelerator.py` sees."""

    def body(rank: Rank) -> list[Tensor]:
        collectives = PairwiseCollectives(None, None, None)
        collectives.streams = CudaStreams(DEVICE, CUDA)
        return train(Training(optimizer="plain", options=options), rank, collectives)

    assert not on_simulated_cuda(body, 1).syncs


class _Shared(nn.Module):
    """Both of two streams read the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.side = nn.Linear(7, 3), CUDA.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = CUDA.current_stream()
        self.side.wait_stream(main)
        left = self.layer(x)
        with CUDA.stream(self.side):
            right = self.layer(x)
        main.wait_stream(self.side)
        return left + right


def _train_shared(rank: Rank, *, changes: bool) -> None:
    model = _Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank.device.put(*model.parameters())
    clock = StreamClock(DEVICE, CUDA)
    how: Any = {"clock": clock, "audit": changes}
    pipeline = Pipeline(model, [optimizer], rank.collectives(), ThresholdFusion(), **how)
    for step in range(NUM_STEPS):
        inputs, targets = batch("mlp", step, rank.number)
        rank.device.put(inputs, targets)
        if changes and step == FIRST_STEADY:
            model.side = CUDA.Stream()
        with pipeline.forward():
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.detach()


def test_a_layer_that_two_streams_read_is_waited_for_by_both() -> None:
    check_order(on_simulated_cuda(lambda rank: _train_shared(rank, changes=False), 2))


def test_a_stream_that_the_first_forward_has_not_used_is_refused_where_reads_are_audited() -> None:
    with pytest.raises(RuntimeError, match=r"was read on a CUDA stream.*complete_parameters"):
        on_simulated_cuda(lambda rank: _train_shared(rank, changes=True), 2)


def test_between_two_hops_the_compute_stream_goes_on() -> None:
    def body(rank: Rank) -> bool:
        collectives, numbers = rank.collectives(), torch.zeros(8)
        received = torch.zeros(collectives.scratch_numel(8))
        rank.device.put(numbers, received)
        within = next(one for one in rank.device.streams.values() if "within" in one.name)

        def encode(sums: Tensor) -> Tensor:
            return sums.view(torch.uint8)

        place = numbers, received, encode, torch.zeros((2, 8), dtype=torch.uint8)
        work, end = collectives.launch_sums_of_host(*place, 0)
        others = [
            collectives.launch_reduce_scatter(numbers, received, torch.zeros(2), 1),
            collectives.launch_all_gather(numbers, 2),
        ]
        goes_on = within.number not in CUDA.current_stream().clock
        end()
        follows = within.number in CUDA.current_stream().clock
        for one in (work, *others):
            one.wait()
        return goes_on and follows

    found = on_simulated_cuda(body, 4, ranks_a_host=2, is_checked=False)
    assert all(found.results)
