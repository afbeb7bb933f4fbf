"""Another codec in mid-run: nothing of what was to be sent is lost, or sent twice."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_dear.compression import Fp32, Int4, Int8, LoCo, OkTopk, RandomK, TopK
from lightning_dear.engine.parameter_gatherer import ParameterGatherer
from lightning_dear.exchange.base import CompressedExchange
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import check_all_alike, run_of
from tests.training.lagging import LaggingTopK
from tests.training.linear import SOMETIMES, Run, gradients_of


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(3,))
def test_a_dense_step_sends_all_that_was_left(gather: str) -> None:
    for codec in (Int4(block_size=64), LoCo(rate=0.5), LaggingTopK(density=0.5)):
        run = Run(ExchangeOptions(gather, compressor=codec))
        for step in range(9):
            run.part.use_compressor(Fp32() if step in (0, 1, 5, 8) else codec)
            run.step(leaves_out=step == 5)
        assert run.error(0.5 if isinstance(codec, LoCo) else 1.0) <= 1e-5, codec
        if isinstance(codec, LoCo):
            continue
        held = run.part.plans.residuals.taken()
        for own in (one for (whose, _), one in held.kept.items() if whose in ("worker", "owner")):
            for number, weight in enumerate(run.model.weights):
                if number != SOMETIMES:
                    assert not own[weight].any()


@distributed(world_sizes=(2,))
def test_densities_may_change_with_gathers_still_under_way() -> None:
    for codec in (TopK(density=0.5), RandomK(density=0.5, decay=1.0)):
        run = Run(ExchangeOptions("gradients", compressor=codec))
        for step in range(12):
            run.part.use_compressor(codec.at_density(1 / (1 + step)))
            run.step()
        assert run.error() <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_ranks_agree_whether_messages_arrive_before_a_change_or_after() -> None:
    """On the shares of owners, too, when a density was in use for no step at all."""
    codec = OkTopk(density=0.05, tau_prime=100)
    run = run_of(codec)
    for step in range(12):
        run.step()
        if step % 4 == 2:
            if dist.get_rank() == 0:
                run.pipeline.complete_parameters()
            run.part.use_compressor(codec.at_density(0.1))
            run.part.use_compressor(codec)
    check_all_alike(run)
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_a_step_is_committed_before_another_thread_may_complete_it() -> None:
    """Reads of any thread complete buckets once gates are closed, and write what commits."""
    calls: list[str] = []

    def noting(kind: type, name: str) -> AbstractContextManager[object]:
        done = getattr(kind, name)

        def call(*args: object) -> None:
            calls.append(name)
            done(*args)

        return patch.object(kind, name, call)

    run = run_of(OkTopk(density=0.05))
    with noting(CompressedExchange, "commit"), noting(ParameterGatherer, "close_gates"):
        for _ in range(3):
            run.step()
    assert calls == ["commit", "close_gates"] * 3


@pytest.mark.parametrize("drops", [False, True], ids=["", "and dropped"])
@distributed(world_sizes=(2,))
def test_a_change_leaves_gradients_on_their_way_alone(drops: bool) -> None:
    """One bucket waits for a gradient that does not come, and its receives are posted."""
    for first, later in (
        (TopK(density=0.5), TopK(density=0.1)),
        (RandomK(density=0.5, decay=1.0), Fp32()),
        (Int8(), Fp32()),
    ):
        run = Run(ExchangeOptions("gradients", compressor=first))
        for _ in range(3):
            run.step()
        run.backward(leaves_out=True)
        run.part.use_compressor(later)
        if drops:
            run.optimizer.zero_grad()
        else:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.count(run.num_steps, leaves_out=True)
        before = run.part.encoding_figures()["compression_ratio"]
        run.num_steps += 1
        for _ in range(3):
            run.step()
        assert run.part.encoding_figures()["compression_ratio"] == before
        assert run.error() <= 1e-5, first
        active = run.part.plans.active
        assert active is not None
        assert {coded.compressor for coded in active.exchange.coded} == {later}


@distributed(world_sizes=(2,))
def test_a_change_waits_for_a_step_of_several_rounds() -> None:
    """Although the last backward is not to be sent yet, as in manual optimisation."""
    run = Run(ExchangeOptions("gradients", compressor=Int8()))
    run.step()
    run.backward()
    run.part.mean.norm()
    with run.pipeline.forward():
        loss = run.model(gradients_of(9, 0))
    with run.pipeline.backward(synchronize=False):
        loss.backward()
    active = run.part.plans.active
    assert active is not None
    run.part.use_compressor(Fp32())
    assert {coded.compressor for coded in active.exchange.coded} == {Int8()}
    run.optimizer.zero_grad()
    assert {coded.compressor for coded in active.exchange.coded} == {Fp32()}


@distributed(world_sizes=(1,))
def test_what_cannot_take_over_is_refused() -> None:
    run = Run(ExchangeOptions("gradients", compressor=TopK(density=0.5)))
    for other in (Int8(), TopK(density=0.5, selector="sampled"), RandomK(density=0.5, decay=1.0)):
        with pytest.raises(ValueError, match=r"cannot replace TopK.*Use fp32"):
            run.part.use_compressor(other)
    plain = Run(ExchangeOptions("gradients"))
    with pytest.raises(ValueError, match="cannot start mid-run"):
        plain.part.use_compressor(Int8())


@distributed(world_sizes=(2,))
def test_another_rate_sends_as_much_of_what_was_left() -> None:
    for codec, other, rate in (
        (LoCo(rate=0.2), Int4(block_size=64), 1.0),
        (TopK(density=0.05), LoCo(rate=0.2), 0.2),
        (LoCo(rate=0.2), LoCo(rate=0.8), 0.8),
    ):
        run, resumed = (Run(ExchangeOptions("gradients", compressor=one)) for one in (codec, other))
        for _ in range(4):
            run.step()
        resumed.resume(run)
        state = copy.deepcopy(run.part.optimizer_state_dict())
        assert run.part.sharded_state_dict()["residuals"]["rates"] == state["residuals"]["rates"]
        resumed.optimizer.load_state_dict(state)
        assert (
            resumed.part.optimizer_state_dict()["residuals"]["rates"]
            == (resumed.part.sharded_state_dict()["residuals"]["rates"])
        )
        for _ in range(3):
            resumed.step()
        assert resumed.error(rate) <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_what_was_left_of_no_known_rate_counts_as_of_ones_own() -> None:
    run = Run(ExchangeOptions("gradients", compressor=LoCo(rate=0.2)))
    other = Run(ExchangeOptions("gradients", compressor=LoCo(rate=0.5)))
    run.step()
    other.step()
    state = copy.deepcopy(run.part.optimizer_state_dict())
    del state["residuals"]["rates"]
    other.optimizer.load_state_dict(state)
    left = [run.part.plans.residuals.taken(), other.part.plans.residuals.taken()]
    for kind in ("worker", "owner"):
        kept, taken = (list(one.kept[kind, "residual"].values()) for one in left)
        for one, same in zip(kept, taken, strict=True):
            assert torch.equal(one, same)
