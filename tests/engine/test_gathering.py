"""gather="gradients", its limit on gathers in flight, and all-reduced buckets: DDP's weights."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.training.delays import Delays
from tests.training.models import batch, build, distance, loss_of
from tests.training.three_ways import SMALL_BUCKETS, train_steps
from tests.training.whole_tensor import MAKE, train

GRADIENTS = ExchangeOptions("gradients")
ALL_REDUCED = ExchangeOptions("gradients", decouple=False)
LATE = Delays(before_all_gather_s=0.01, after_all_gather_s=0.005)


@distributed(world_sizes=(1, 2))
def test_every_optimizer_has_the_bits_of_ddp() -> None:
    for make in MAKE:
        print(make)
        theirs = train(None, make)
        for options in (GRADIENTS, ALL_REDUCED) if make != "muon" else (GRADIENTS,):
            ours = train(options, make)
            assert_equal(ours, theirs)
            assert_equal_on_all_ranks(ours)


@pytest.mark.parametrize("model", ["gpt", pytest.param("conv", marks=pytest.mark.slow)])
@distributed(world_sizes=(2,))
def test_any_depth_has_the_bits_of_ddp_however_late_gathers_come(model: str) -> None:
    theirs = train(None, "adamw", model_name=model)
    for options in (
        GRADIENTS,
        ExchangeOptions("gradients", depth=1),
        ExchangeOptions("gradients", depth=2),
        ExchangeOptions("parameters", depth=1),
        ALL_REDUCED,
    ):
        ours = train(options, "adamw", model_name=model, delays=LATE)
        assert_equal(ours, theirs)
        assert ours[1] == theirs[1]


@distributed(world_sizes=(3,))
def test_three_ranks_in_double_precision() -> None:
    for make in ("lars",):
        theirs = train(None, make, dtype=torch.float64)
        for options in (GRADIENTS, ALL_REDUCED):
            ours = train(options, make, dtype=torch.float64)
            assert distance(ours[0][-1], theirs[0][-1]) <= 1e-9
            assert_equal_on_all_ranks(ours)


class _Counting(PairwiseCollectives):
    """Counts the all-gathers in flight, and notes which threads launch them, and while what."""

    def __init__(self, own: PairwiseCollectives) -> None:
        groups = own.reduce_group, own.gather_group, own.object_group
        super().__init__(*groups, own.rank, own.world_size)
        self.lock = threading.Lock()
        self.num_in_flight = self.most_in_flight = 0
        self.during_forward: set[str] = set()
        self.is_in_forward = False

    def launch_all_gather(self, buffer: torch.Tensor, bucket: int) -> Work:
        with self.lock:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            if self.is_in_forward:
                self.during_forward.add(threading.current_thread().name)
        work = super().launch_all_gather(buffer, bucket)

        def arrive() -> None:
            work.wait()
            with self.lock:
                self.num_in_flight -= 1

        return Work(arrive)


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(2,))
def test_a_thread_keeps_to_the_depth(gather: str) -> None:
    for depth, most in ((1, 1), (2, 2), (None, 6)):
        model = build("mlp")
        own = new_collectives(torch.device("cpu"))
        assert isinstance(own, PairwiseCollectives)
        collectives = _Counting(own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = ExchangeOptions(gather, depth)
        pipeline = Pipeline(model, [optimizer], collectives, NoFusion(), options=options)
        for step in range(3):
            collectives.is_in_forward = True
            with pipeline.forward():
                loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
            collectives.is_in_forward = False
            with pipeline.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        pipeline.complete_parameters()
        assert collectives.num_in_flight == 0
        assert collectives.most_in_flight == most
        assert collectives.during_forward <= {"dear gathers"}
        pipeline.detach()
    deadline = threading.Event()
    for _ in range(100):
        if not any(thread.name == "dear gathers" for thread in threading.enumerate()):
            return
        deadline.wait(0.02)
    raise AssertionError("a thread was left behind")


@distributed(world_sizes=(3,))
def test_bytes_follow_the_formula(world_size: int) -> None:
    for options in (GRADIENTS, ALL_REDUCED):
        model = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collectives = new_collectives(torch.device("cpu"))
        pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=options)
        train_steps(pipeline, model, range(2))
        pipeline.detach()
        plan, ledger = pipeline.parts[0].plan, collectives.ledger
        share = 2 * plan.padded_numel * 4 * (world_size - 1) // world_size
        is_decoupled = options.decouple
        assert ledger.reduce_scatter_bytes == (share if is_decoupled else 0)
        assert ledger.all_gather_bytes == (share if is_decoupled else 0)
        assert ledger.all_reduce_bytes == (0 if is_decoupled else 2 * share)


@distributed(world_sizes=(2,))
def test_a_norm_of_all_reduced_gradients_counts_each_once(world_size: int) -> None:
    model, plain = build("mlp"), build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = new_collectives(torch.device("cpu"))
    pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=ALL_REDUCED)
    for step in range(2):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
        for rank in range(world_size):
            (loss_of(plain, *batch("mlp", step, rank)) / world_size).backward()
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(pipeline.parts[0].clip_by_norm(0.1), total)
        optimizer.step()
        # As under gather="parameters": what a step has used is gone, but for one rank's own.
        assert world_size == 1 or all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)
