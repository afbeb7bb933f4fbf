"""Other codecs for some tensors: in buckets of their own, and under the same laws."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear import DearStrategy
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.compression import (
    DGC,
    QSGD,
    Bf16,
    Codec,
    Fp32,
    Int4,
    Int8,
    LoCo,
    PowerSGD,
    SignSGD,
    TopK,
    resolve_compressor,
)
from lightning_dear.compression.groups import (
    VECTORS,
    Groups,
    check_groups,
    codec_for,
    split,
    unused_group,
)
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import BucketPlan, NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.training.linear import SHAPES, Run, gradients_of
from tests.training.models import weights

ALONE = PairwiseCollectives(None, None, None)


def groups_of(patterns: dict[str, Any]) -> Groups:
    return tuple((pattern, one or Fp32()) for pattern, one in patterns.items())


NONE_FOR_VECTORS = groups_of({VECTORS: None})


def _options(codec: Codec, gather: str = "gradients") -> ExchangeOptions:
    return ExchangeOptions(gather, compressor=codec, groups=NONE_FOR_VECTORS)


def _buckets(run: Run) -> dict[str, set[int]]:
    """Codec -> numbers of the tensors that it encodes."""
    found: dict[str, set[int]] = {}
    for coded in run.part.plans.active.exchange.coded:  # type: ignore[union-attr]
        tensors = {piece.tensor for piece in coded.spec.slices}
        found.setdefault(coded.compressor.name, set()).update(tensors)  # type: ignore[attr-defined]
    return found


@distributed(world_sizes=(1, 2))
def test_vectors_travel_as_they_are_and_nothing_is_lost() -> None:
    for codec in (TopK(density=0.05), Int4(block_size=64)):
        run = Run(_options(codec), SingleFusion())
        for step in range(6):
            run.step(leaves_out=step == 3)
        assert run.error() <= 1e-5
        assert _buckets(run) == {codec.name: {0, 2}, "fp32": {1, 3, 4}}
        for number in (1, 3, 4):
            _assert_all_arrived(run, number, range(6))


def _assert_all_arrived(run: Run, number: int, steps: range) -> None:
    total = torch.zeros(SHAPES[number])
    for step in steps:
        for rank in range(dist.get_world_size()):
            own = gradients_of(step, rank)[number]
            assert isinstance(own, Tensor)
            total += own / dist.get_world_size()
    torch.testing.assert_close(-run.model.weights[number].detach(), total, rtol=1e-4, atol=1e-3)


@distributed(world_sizes=(2,))
def test_a_schedule_and_another_plan_keep_the_groups() -> None:
    groups = (("weights.2", Int8(block_size=64)), *NONE_FOR_VECTORS)
    run = Run(ExchangeOptions("gradients", compressor=TopK(density=0.05), groups=groups))
    run.step()
    run.pipeline.use_compressor(Fp32())
    assert _buckets(run) == {"fp32": {0, 1, 2, 3, 4}}
    run.step()
    run.pipeline.use_compressor(TopK(density=0.1))
    run.step()
    run.part.replan(NoFusion().plan(run.part.tensors, dist.get_world_size()))
    run.step()
    assert _buckets(run) == {"topk": {0}, "int8": {2}, "fp32": {1, 3, 4}}
    (sparse,) = (
        coded.compressor
        for coded in run.part.plans.active.exchange.coded  # type: ignore[union-attr]
        if isinstance(coded.compressor, TopK)  # type: ignore[attr-defined]
    )
    assert sparse.density == 0.1
    assert run.error() <= 1e-5


def _leaving_the_first(run: Run) -> BucketPlan:
    plan = NoFusion().plan(run.part.tensors, dist.get_world_size())
    return replace(plan, uncompressed=(0,))


@distributed(world_sizes=(2,))
def test_a_plan_leaves_buckets_as_they_are() -> None:
    run = Run(ExchangeOptions("gradients", compressor=Int4(block_size=64)))
    run.step()
    assert _buckets(run) == {"int4": {0, 1, 2, 3, 4}}
    plan = _leaving_the_first(run)
    run.part.replan(plan)
    for _ in range(3):
        run.step()
    (left,) = plan.buckets[0].slices
    others = set(range(len(SHAPES))) - {left.tensor}
    assert _buckets(run) == {"fp32": {left.tensor}, "int4": others}
    assert run.error() <= 1e-5
    _assert_all_arrived(run, left.tensor, range(4))

    low_rank = Run(ExchangeOptions("gradients", compressor=PowerSGD(rank=2)))
    low_rank.step()
    low_rank.part.replan(_leaving_the_first(low_rank))
    assert left.tensor in _buckets(low_rank)["fp32"]
    voting = Run(ExchangeOptions("gradients", compressor=SignSGD()))
    voting.step()
    with pytest.raises(ValueError, match="signsgd sends votes in others"):
        voting.part.replan(_leaving_the_first(voting))
    voting.step()


@distributed(world_sizes=(2,))
def test_what_a_plan_leaves_as_it_is_has_its_own_feedback() -> None:
    """Not that of the compressor, which has another rate, or none."""
    groups = (("*", LoCo(block_size=64, rate=0.5)),)
    for codec in (Int4(block_size=64), QSGD()):
        run = Run(ExchangeOptions("gradients", compressor=codec, groups=groups))
        run.step()
        plan = NoFusion().plan(run.part.tensors, dist.get_world_size())
        run.part.replan(replace(plan, uncompressed=tuple(range(len(plan.buckets)))))
        for _ in range(2):
            run.step()
        assert run.error(0.5) <= 1e-5


@distributed(world_sizes=(2,))
def test_nothing_is_kept_of_what_is_never_encoded() -> None:
    for codec, names in (
        (Int4(block_size=64), ()),
        (DGC(density=0.1, selector="exact"), ("momentum", "residual")),
    ):
        run = Run(_options(codec), NoFusion())
        run.step()
        for coded in run.part.plans.active.exchange.coded:  # type: ignore[union-attr]
            is_vector = coded.spec.slices[0].tensor in (1, 3, 4)
            assert coded.owner.names == (() if is_vector else ("residual",))
            assert coded.worker.names == (names if is_vector else coded.worker.names)
            assert coded.worker.names or is_vector


@distributed(world_sizes=(2,))
def test_what_was_left_of_what_is_not_encoded_any_more_is_named() -> None:
    run = Run(ExchangeOptions("gradients", compressor=Int4(block_size=64)))
    for _ in range(2):
        run.step()
    state = copy.deepcopy(run.part.optimizer_state_dict())
    resumed = Run(_options(Int4(block_size=64)))
    resumed.optimizer.load_state_dict(state)
    is_first = dist.get_rank() == 0
    with (
        pytest.warns(UserWarning, match="residual, owner's residual.* is dropped")
        if is_first
        else (nullcontext())
    ):
        resumed.step()


@distributed(world_sizes=(2,))
def test_with_parameters_gathered_only_the_others_lag() -> None:
    run = Run(_options(Bf16(), "parameters"), SingleFusion(), momentum=0.5)
    for _ in range(4):
        run.step()
    run.pipeline.complete_parameters()
    lags = {
        bucket.spec.slices[0].tensor: float((bucket.shard - bucket.replica).abs().max())
        for bucket in run.part.plans.active.flat.buckets  # type: ignore[union-attr]
    }
    assert lags.pop(0) > 0
    assert set(lags.values()) == {0.0}


@distributed(world_sizes=(2,))
def test_what_dgc_leaves_out_has_its_momentum() -> None:
    codec = DGC(density=1.0, selector="exact", momentum=0.5)
    mixed, alike = Run(_options(codec)), Run(ExchangeOptions("gradients", compressor=codec))
    alike.pipeline.use_compressor(Fp32())
    for _ in range(4):
        mixed.step()
        alike.step()
    mixed.pipeline.complete_parameters()
    alike.pipeline.complete_parameters()
    for one, other in zip(weights(mixed.model)[1:2], weights(alike.model)[1:2], strict=True):
        torch.testing.assert_close(one, other)


def test_the_first_match_counts() -> None:
    groups = groups_of({"head.*": Int8(), "*.bias": None, VECTORS: Bf16()})
    assert codec_for(groups, Int4(), "head.bias", 1) == Int8()
    assert codec_for(groups, Int4(), "body.bias", 1) == Fp32()
    assert codec_for(groups, Int4(), "body.norm", 1) == Bf16()
    assert codec_for(groups, Int4(), "body.weight", 2) == Int4()


@distributed(world_sizes=(1,))
def test_a_pattern_that_nothing_matches_is_refused() -> None:
    for patterns in ({"weight.*": None}, {"*": None, "weights.2": None}):
        options = ExchangeOptions("gradients", compressor=Int8(), groups=groups_of(patterns))
        with pytest.raises(ValueError, match=r"no name matches.* such as 'weights\.0'"):
            Run(options)


def test_a_pattern_may_name_what_is_frozen_yet() -> None:
    codec = {"compressor": Int8(), "groups": groups_of({"0.*": None})}
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    Pipeline(model, [optimizer], ALONE, NoFusion(), options=ExchangeOptions(**codec)).detach()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="The optimizer holds no parameter"):
        Pipeline(model, [optimizer], ALONE, NoFusion(), options=ExchangeOptions(**codec))


def test_without_parameters_no_name_is_an_example() -> None:
    assert unused_group(groups_of({"head.*": None}), []) is not None


@distributed(world_sizes=(2,))
def test_a_resumed_run_and_another_plan_go_on_drawing() -> None:
    """Buckets that travel as they are count otherwise than those that are encoded."""
    run = Run(ExchangeOptions("gradients", compressor=QSGD(), groups=NONE_FOR_VECTORS))
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    file = run.part.optimizer_state_dict()["residuals"]["counts"]
    folder = run.part.sharded_state_dict()["residuals"]["counts"]
    assert file == folder == {"reduce": 3, "gather": 3}
    run.part.replan(NoFusion().plan(run.part.tensors, dist.get_world_size()))
    counts = {tuple(coded.counts.values()) for coded in run.part.plans.active.exchange.coded}  # type: ignore[union-attr]
    assert counts == {(3, 3)}


def test_what_cannot_stand_beside_another_is_refused() -> None:
    for codec, other, message in (
        (None, None, "none cannot leave any out"),
        (PowerSGD(), None, "powersgd cannot leave any out"),
        (SignSGD(), None, "need different learning rates"),
        (Int8(), SignSGD(), "needs an optimizer of its own"),
        (DGC(), Int8(), "needs an optimizer of its own"),
        (Int8(), Int4(halves="reduce"), "Set the same in both"),
    ):
        with pytest.raises(ValueError, match=message):
            check_groups(groups_of({"*": other}), codec)
    with pytest.raises(ValueError, match="cannot compress only some parameters"):
        split({"head.*": resolve_compressor("powersgd"), "*": Int8()})
    with pytest.raises(ValueError, match="set gather='gradients'"):
        ExchangeOptions("parameters", compressor=Bf16(), groups=groups_of({"*.bias": TopK()}))


def test_a_mapping_gives_the_compressor_and_groups() -> None:
    int8, bf16 = Int8(), Bf16()
    assert split({"*": int8}) == (int8, ())
    others, groups = split({"a": None, "b": bf16, "*": int8})
    assert (others, [name for name, _ in groups]) == (int8, ["a", "b"])
    assert isinstance(groups[0][1], Fp32)
    # One that is used stands for all, and the others go as they are.
    others, groups = split({"a": int8, "*": None})
    assert (others, groups[0], groups[1][0]) == (int8, ("a", int8), "*")
    assert isinstance(groups[1][1], Fp32)
    assert split({"a": None, "*": None}) == (None, ())
    # fp32 for all others means the same, and no schedule takes it for the compressor.
    fp32, topk = Fp32(), TopK()
    for patterns in ({"a": topk, "*": fp32}, {"b": fp32, "a": topk, "*": None}):
        others, some = split(patterns)
        assert others is topk
        assert some[-1] == ("*", Fp32())
    assert split({"a": fp32, "*": fp32}) == (fp32, (("a", fp32),))
    assert codec_for(groups, int8, "b", 2) is groups[1][1]


def test_a_stand_in_for_all_is_not_compared_with_itself() -> None:
    assert DearStrategy(compressor={"*.weight": "dgc", "*": "none"}) is not None
    with pytest.raises(ValueError, match="leaves parameters uncompressed beside signsgd"):
        DearStrategy(compressor={"*.weight": "signsgd", "*": "none"})


@pytest.mark.parametrize("patterns", [{}, {"a": "int8"}, {"*": "int8", "a": "none"}])
def test_a_mapping_ends_with_all_others(patterns: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"needs '\*' as its last pattern, for all other"):
        DearStrategy(compressor=patterns)
    with pytest.raises(ValueError, match="Unknown compressor 'int9'; valid names"):
        DearStrategy(compressor={"a": "int9", "*": "int8"})
