"""Ok-Topk against its own words: what arrives, what is left, and that ranks stay the same."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives import new_collectives
from lightning_dear.compression import Fp32, OkTopk
from lightning_dear.exchange.sparse_bucket import SparseBucket
from lightning_dear.exchange_options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.engine.linear import SHAPES, Known, Run, gradients_of, unscale
from tests.engine.sparse_reference import Reference
from tests.engine.training import new_pipeline

NO_CAPS: dict[str, Any] = {"message_cap": math.inf, "owner_cap": math.inf}


def run_of(codec: OkTopk, **options: Any) -> Run:
    return Run(ExchangeOptions("gradients", codec=codec, **options), SingleFusion())


def buckets_of(run: Run) -> list[SparseBucket]:
    assert run.part._active is not None
    coded = run.part._active.exchange.coded
    assert all(isinstance(one, SparseBucket) for one in coded)
    return list(coded)  # type: ignore[arg-type]


def in_bucket(run: Run, tensors: list[Tensor | None]) -> Tensor:
    """What stands in tensors, as it lies in the only bucket, fp32."""
    assert run.part.plan is not None
    (spec,) = run.part.plan.buckets
    flat = torch.zeros(spec.padded_numel)
    places = {id(parameter): at for at, parameter in enumerate(run.model.weights)}
    for piece in spec.slices:
        one = tensors[places[id(run.part.parameters[piece.tensor])]]
        if one is not None:
            flat[piece.offset : piece.offset + piece.numel] = one.detach().flatten()
    return flat


def check_all_alike(run: Run) -> None:
    """All ranks hold the same weights, bit for bit."""
    run.pipeline.complete_parameters()
    flat = torch.cat([weight.detach().flatten() for weight in run.model.weights])
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        OkTopk(density=0.05, tau_prime=1, **NO_CAPS),
        OkTopk(density=0.05, tau_prime=1),
        OkTopk(density=0.05, tau_prime=4, tau=3),
    ],
    ids=["no caps", "exact", "reused"],
)
@distributed(world_sizes=(3,))
def test_bits_are_those_of_the_reference(codec: OkTopk) -> None:
    _check_reference(codec, 12)


@pytest.mark.slow
@distributed(world_sizes=(2, 3, 4), timeout_s=240)
def test_bits_are_those_of_the_reference_over_many_steps() -> None:
    for codec in (
        OkTopk(density=0.05, tau_prime=1, **NO_CAPS),
        OkTopk(density=0.05, tau_prime=1),
        OkTopk(density=0.05, tau_prime=8),
        OkTopk(density=0.02, tau_prime=100, **NO_CAPS),
        OkTopk(density=0.3, tau_prime=5, message_cap=1.0, owner_cap=1.0),
    ):
        _check_reference(codec, 80)


def _check_reference(codec: OkTopk, num_steps: int) -> None:
    run, world_size = run_of(codec), dist.get_world_size()
    reference: Reference | None = None
    for step in range(num_steps):
        before = [weight.detach().clone() for weight in run.model.weights]
        run.step()
        run.pipeline.complete_parameters()
        if reference is None:
            (one,) = buckets_of(run)
            reference = Reference(one.numel, one.spec.padded_numel, world_size, codec)
        gradients = [in_bucket(run, gradients_of(step, rank)) for rank in range(world_size)]
        u = reference.step(torch.stack(gradients) * (1.0 / world_size))
        weights = in_bucket(run, list(run.model.weights))
        assert torch.equal(weights, in_bucket(run, list(before)) - u), step
        residual = buckets_of(run)[0].worker.kept["residual"]
        assert torch.equal(residual, reference.residuals[dist.get_rank()]), step
        check_all_alike(run)


@distributed(world_sizes=(1, 3))
def test_a_density_of_one_is_dense() -> None:
    """Every number of every rank is sent and selected: the same sums, in the same order."""
    _check_a_density_of_one_is_dense()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_a_density_of_one_is_dense_on_other_numbers_of_ranks() -> None:
    _check_a_density_of_one_is_dense()


def _check_a_density_of_one_is_dense() -> None:
    all_of_it = OkTopk(density=1.0, tau_prime=1)
    sparse, dense = run_of(replace(all_of_it, **NO_CAPS)), run_of(all_of_it)
    plain = Run(ExchangeOptions("gradients"), SingleFusion())
    for _ in range(4):
        for run in (sparse, dense, plain):
            run.step()
    for run in (sparse, dense):
        run.pipeline.complete_parameters()
    plain.pipeline.complete_parameters()
    for one, other, expected in zip(
        sparse.model.weights, dense.model.weights, plain.model.weights, strict=True
    ):
        assert torch.equal(one, expected)
        # Regions of equal counts, but for rounding: no cap binds.
        assert torch.equal(other, expected)
    assert buckets_of(sparse)[0].is_sparse == (dist.get_world_size() > 1)


# --- nothing is lost ------------------------------------------------------------------------------


@distributed(world_sizes=(1, 3))
def test_every_number_arrives_or_is_left_to_the_bit() -> None:
    """Of numbers that add up without rounding, whatever is due in a step and whatever binds."""
    _check_every_number_arrives_or_is_left_to_the_bit()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_every_number_arrives_or_is_left_to_the_bit_on_other_numbers_of_ranks() -> None:
    _check_every_number_arrives_or_is_left_to_the_bit()


def _check_every_number_arrives_or_is_left_to_the_bit() -> None:
    world_size = dist.get_world_size()
    for caps in ({}, NO_CAPS, {"message_cap": 1.0, "owner_cap": 1.0}):
        run = run_of(OkTopk(density=0.05, tau_prime=3, tau=5, **caps))
        before = [weight.detach().clone() for weight in run.model.weights]
        expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(15):
            generator = torch.Generator().manual_seed(step)
            of_ranks = [
                [torch.randint(-64, 65, shape, generator=generator) / 8 for shape in SHAPES]
                for _ in range(world_size)
            ]
            with run.pipeline.forward():
                # A multiple of the number of ranks, of which 1/P is exact.
                own = [one * world_size for one in of_ranks[dist.get_rank()]]
                loss = run.model(own)
            with run.pipeline.backward():
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            for number, ones in enumerate(zip(*of_ranks, strict=True)):
                expected[number] += sum(ones)
            run.pipeline.complete_parameters()
            pairs = zip(before, run.model.weights, strict=True)
            moved = sum(int((old != new).sum()) for old, new in pairs)
            before = [weight.detach().clone() for weight in run.model.weights]
            (one,) = buckets_of(run)
            # Of numbers of which many are equal.
            assert not one.is_sparse or caps is NO_CAPS or moved <= one.k
            held = run.part._residuals._taken().worker["residual"]
            for weight, whole in zip(run.model.weights, expected, strict=True):
                left = held[weight].double()
                dist.all_reduce(left)
                assert torch.equal(left.view(weight.shape) - weight.double(), whole), step


@distributed(world_sizes=(1, 3))
def test_nothing_is_lost_whatever_happens_in_between() -> None:
    """Unused parameters, other plans, dense steps, another density, a step that is not made."""
    _check_nothing_is_lost_whatever_happens_in_between()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_nothing_is_lost_whatever_happens_in_between_on_other_numbers_of_ranks() -> None:
    _check_nothing_is_lost_whatever_happens_in_between()


def _check_nothing_is_lost_whatever_happens_in_between() -> None:
    codec = OkTopk(density=0.1, tau_prime=4)
    run = Run(ExchangeOptions("gradients", codec=codec))
    for step in range(24):
        if step in (6, 12):
            fusion = NoFusion() if step == 6 else SingleFusion()
            run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
        if step in (3, 15):
            run.part.use_codec(Fp32())
        if step in (5, 17):
            run.part.use_codec(codec.at_density(0.2 if step == 5 else 0.05))
        if step == 9:
            # Gradients of a step that is not made.
            run.backward(step=999)
            run.optimizer.zero_grad()
        run.step(leaves_out=step % 5 == 3)
        check_all_alike(run)
    assert run.error() <= 1e-5
    assert max(run.errors()) <= 1e-4


@distributed(world_sizes=(2,))
def test_a_loss_scale_changes_nothing() -> None:
    plain, scaled = (run_of(OkTopk(density=0.05, tau_prime=3)) for _ in range(2))
    for step in range(8):
        plain.step()
        scale = 2.0 ** (step + 3)
        scaled.part.loss_scale = partial(torch.tensor, scale)
        scaled.step(before=partial(unscale, scaled, scale), scale=scale)
    for run in (plain, scaled):
        run.pipeline.complete_parameters()
    for one, other in zip(plain.model.weights, scaled.model.weights, strict=True):
        assert torch.equal(one, other)


@distributed(world_sizes=(3,))
def test_gradients_of_several_backwards_add_up() -> None:
    """Some of them after the first were sent: another round, in which nothing is sent twice."""
    run = run_of(OkTopk(density=0.05, tau_prime=3))
    for step in range(8):
        for number in range(3):
            run.backward(step=10 * step + number)
            run.count(10 * step + number)
            if number == 1:
                run.part.reduce()
        run.optimizer.step()
        run.optimizer.zero_grad()
        check_all_alike(run)
    assert run.error() <= 1e-5
    assert max(run.errors()) <= 1e-4


@distributed(world_sizes=(3,))
def test_momentum_is_kept_until_it_arrives() -> None:
    """u = m u + g, acc = u + residual: nothing of acc is lost, and u is 0 where acc has arrived."""
    run, world_size = run_of(OkTopk(density=0.05, tau_prime=3, momentum=0.9)), dist.get_world_size()
    run.step()
    for step in range(1, 8):
        (one,) = buckets_of(run)
        run.pipeline.complete_parameters()
        before = {name: kept.clone() for name, kept in one.worker.kept.items()}
        weights = in_bucket(run, list(run.model.weights))
        run.step()
        run.pipeline.complete_parameters()
        gradient = in_bucket(run, gradients_of(step, dist.get_rank())) * (1.0 / world_size)
        velocity = before["momentum"] * 0.9 + gradient
        waiting = (before["residual"] + velocity).double()
        after, arrived = one.worker.kept, (after_zero(one.worker.kept["residual"], waiting))
        assert torch.equal(after["momentum"] == 0, arrived | (velocity == 0))
        torch.testing.assert_close(after["momentum"][~arrived], velocity[~arrived])
        moved = (weights - in_bucket(run, list(run.model.weights))).double()
        left = after["residual"].double()
        for total in (waiting, left):
            dist.all_reduce(total)
        assert (waiting - left - moved).norm() <= 1e-5 * waiting.norm()
        check_all_alike(run)


def after_zero(residual: Tensor, waiting: Tensor) -> Tensor:
    """Where something waited and nothing is left."""
    return (residual == 0) & (waiting != 0)


@distributed(world_sizes=(3,))
def test_xi_is_that_of_the_formula() -> None:
    run, world_size = run_of(OkTopk(density=0.05, tau_prime=3, xi_every=2)), dist.get_world_size()
    residual: Tensor | None = None
    for step in range(5):
        old = [weight.detach().clone() for weight in run.model.weights]
        before = run.pipeline.collectives.ledger.total_bytes
        run.step()
        sent = run.pipeline.collectives.ledger.total_bytes - before
        run.pipeline.complete_parameters()
        (one,) = buckets_of(run)
        assert sent < 4 * one.numel, "what measures counts"
        gradient = in_bucket(run, gradients_of(step, dist.get_rank())) / world_size
        total = gradient.clone() if residual is None else gradient + residual
        for numbers in (total, gradient):
            dist.all_reduce(numbers)
        u = in_bucket(run, list(old)) - in_bucket(run, list(run.model.weights))
        places = total.abs().topk(one.k).indices
        expected = torch.zeros_like(total)
        expected[places] = total[places]
        figures = run.part.encoding_figures()
        # What was measured last.
        assert "xi" in figures
        if step % 2 == 0:
            xi = (expected - u).norm() / gradient.norm()
            assert figures["xi"] == pytest.approx(float(xi), rel=1e-4)
        residual = one.worker.kept["residual"].clone()


@distributed(world_sizes=(3,))
def test_two_optimizers_are_those_of_one() -> None:
    codec = OkTopk(density=0.1, tau_prime=2)
    options = ExchangeOptions("gradients", codec=codec)
    model, own = Known(), slice(0, 1)
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in (model.weights[own], model.weights[1:])]
    pipeline = new_pipeline(
        model, optimizers[0], SingleFusion(), more=optimizers[1:], options=options
    )
    total = torch.zeros(SHAPES[0], dtype=torch.float64)
    for step in range(6):
        with pipeline.forward():
            loss = model(gradients_of(step, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            first = gradients_of(step, rank)[0]
            assert first is not None
            total += first.double() / dist.get_world_size()
    pipeline.complete_parameters()
    left = pipeline.parts[0]._residuals._taken().worker["residual"][model.weights[0]].double()
    dist.all_reduce(left)
    arrived = left.view(SHAPES[0]) - model.weights[0].detach().double()
    assert (arrived - total).norm() <= 1e-5 * total.norm()
    for weight in model.weights:
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, weight.detach().numpy().tobytes())
        assert len(set(digests)) == 1


# --- what hooks and norms see -------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_norms_and_clipping_are_of_what_is_stepped() -> None:
    run = run_of(OkTopk(density=0.05))
    for _ in range(3):
        before = [weight.detach().clone() for weight in run.model.weights]
        run.backward()
        norm = run.part.clip_by_norm(1e-3)
        assert torch.equal(run.part.grad_norm(), run.part.grad_norm())
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.num_steps += 1
        run.pipeline.complete_parameters()
        pairs = zip(before, run.model.weights, strict=True)
        moved = torch.cat([(old - new.detach()).flatten() for old, new in pairs])
        assert norm > 1.0
        assert moved.norm() == pytest.approx(1e-3, rel=1e-3)
        check_all_alike(run)


@distributed(world_sizes=(3,))
def test_hooks_see_what_is_stepped_and_may_scale_it() -> None:
    run, other = (run_of(OkTopk(density=0.05)) for _ in range(2))

    def halve() -> None:
        run.part.expose_gradients()
        for weight in run.model.weights:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

    for _ in range(4):
        run.step(before=halve)
        other.step()
    for one in (run, other):
        one.pipeline.complete_parameters()
    for halved, whole in zip(run.model.weights, other.model.weights, strict=True):
        assert torch.equal(2 * halved, whole)


@distributed(world_sizes=(2,))
def test_hooks_may_not_make_it_dense() -> None:
    run = run_of(OkTopk(density=0.05))

    def add() -> None:
        run.part.expose_gradients()
        for weight in run.model.weights:
            assert weight.grad is not None
            weight.grad.add_(1.0)

    with pytest.raises(RuntimeError, match="elements of the mean gradient that were 0.*'oktopk'"):
        run.step(before=add)


@distributed(world_sizes=(2,))
def test_gradients_that_are_not_finite_are_refused_and_leave_no_trace() -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        run, other = (run_of(OkTopk(density=0.05, tau_prime=2)) for _ in range(2))
        for step in range(6):
            run.backward(scale=wrong if dist.get_rank() == 0 else 1.0, step=100 + step)
            with pytest.raises(RuntimeError, match="nan or inf in them.*'oktopk'"):
                run.optimizer.step()
            run.optimizer.zero_grad()
            run.step()
            other.step()
        assert run.error() <= 1e-5
        assert other.error() <= 1e-5


# --- checkpoints ------------------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_a_resumed_run_has_the_same_bits() -> None:
    """Between two exact thresholds, with regions that have moved."""
    for steps_before in (1, 6):
        run, resumed = (run_of(OkTopk(density=0.05, tau_prime=4)) for _ in range(2))
        for _ in range(steps_before):
            run.step()
        state = copy.deepcopy(run.part.optimizer_state_dict())
        resumed.resume(run)
        resumed.optimizer.load_state_dict(state)
        for _ in range(5):
            run.step()
            resumed.step()
        for one in (run, resumed):
            one.pipeline.complete_parameters()
        pairs = zip(run.model.weights, resumed.model.weights, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert resumed.error() <= 1e-5


@distributed(world_sizes=(3,))
def test_a_plan_with_the_same_bucket_goes_on_as_before() -> None:
    run, other = (run_of(OkTopk(density=0.05, tau_prime=4)) for _ in range(2))
    for _ in range(6):
        run.step()
        other.step()
    before = buckets_of(run)[0].steering
    run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    assert torch.equal(buckets_of(run)[0].steering, before)
    for _ in range(3):
        run.step()
        other.step()
    for one in (run, other):
        one.pipeline.complete_parameters()
    pairs = zip(run.model.weights, other.model.weights, strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)


# --- when what is due is done -----------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_periods_are_of_steps() -> None:
    """However many backwards they have, and whether or not they are made."""
    run = run_of(OkTopk(density=0.05))
    for step in range(4):
        run.backward(step=100 + step)
        run.part.reduce()
        run.backward(step=200 + step)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(step=300 + step)
        run.optimizer.zero_grad()
        (one,) = buckets_of(run)
        assert one.counts["reduce"] == step + 1


@distributed(world_sizes=(3,))
def test_a_threshold_is_known_where_caps_leave_fewer_than_k() -> None:
    run = run_of(OkTopk(density=0.05, owner_cap=1.0))
    for _ in range(3):
        run.step()
        run.pipeline.complete_parameters()
        (one,) = buckets_of(run)
        assert one.tally.num_kept < one.k
        assert one.global_threshold > 0


@distributed(world_sizes=(3,))
def test_a_new_plan_has_regions_after_its_first_step() -> None:
    """However many steps have been made."""
    run = Run(ExchangeOptions("gradients", codec=OkTopk(density=0.1)))
    run.step()
    for one in buckets_of(run):
        one.counts["reduce"] = 100
    run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    assert not buckets_of(run)[0].has_regions
    run.step()
    (one,) = buckets_of(run)
    assert one.has_regions
    assert one.regions != one._shards


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\]"),
        ({"tau": 0}, "tau of oktopk must be an integer >= 1"),
        ({"tau_prime": 1.5}, "tau_prime of oktopk must be an integer >= 1"),
        ({"boundaries": "median"}, "Unknown boundaries 'median' of oktopk; valid names: histogram"),
        ({"message_cap": 0.9}, "message_cap of oktopk must be at least 1"),
        ({"owner_cap": math.nan}, "owner_cap of oktopk must be at least 1"),
        ({"owner_cap": None}, "owner_cap of oktopk must be a number"),
        ({"error_feedback": False}, "oktopk without error feedback"),
        ({"xi_every": -1}, "xi_every of oktopk must be an integer of at least 0"),
        ({"momentum": 1.0}, r"momentum of oktopk must be in \[0, 1\)"),
        (
            {"momentum": 0.9, "error_feedback": False, "allow_biased": True},
            "keeps momentum of what it has not sent",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OkTopk(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gather": "parameters"}, "'parameters' has no use for these: set gather='gradients'"),
        ({"gather": "gradients", "decouple": False}, "Leave out one of them"),
    ],
)
def test_exchanges_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExchangeOptions(codec=OkTopk(), **options)


@distributed(world_sizes=(2,))
def test_messages_may_be_shorter_than_the_memory_that_waits_for_them() -> None:
    """What gloo is relied on for, with receives that come before a send, and after it."""
    collectives = new_collectives(torch.device("cpu"))
    for number, length in enumerate((1, 7, 50_000)):
        for lane in ("reduce_scatter", "all_gather"):
            incoming = torch.full((2, 100_000), -1, dtype=torch.int32)
            if collectives.rank:
                collectives.expect_messages(lane, incoming, number)
            message = torch.arange(length, dtype=torch.int32) + collectives.rank
            messages = {0: message, 1: message}
            work = collectives.launch_messages(lane, messages, (0, 1), incoming, number)
            work.wait()
            other = 1 - collectives.rank
            assert torch.equal(incoming[other, :length], torch.arange(length) + other)
            assert (incoming[other, length:] == -1).all()
            assert (incoming[collectives.rank] == -1).all()
    assert collectives.ledger.metadata_bytes == 4 * 6
    assert collectives.ledger.reduce_scatter_bytes == 4 * (6 + 49_999)
    assert collectives.ledger.all_gather_bytes == 4 * (6 + 49_999)
