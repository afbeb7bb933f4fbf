"""Plans are found while Lightning trains: on real ranks, without a bit of difference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

from lightning_dear.callbacks import fusion_tuner
from lightning_dear.callbacks.fusion_tuner import FusionTuner, description_of
from lightning_dear.compression import TopK
from lightning_dear.planning import (
    AutoFusion,
    BucketPlan,
    MergeCompFusion,
    MergeCompHeuristicFusion,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
)
from lightning_dear.planning.predict import StepModel
from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import WeightRecorder, assert_ranks_agree, assert_same, dear, fit
from tests.lightning.nets import Net, copies
from tests.lightning.test_sharded_saving import StepNet

SMALL = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
NUM_STEPS = 4 + 2 * 7 + 2


class _Small:
    """Measures a bucket a tensor and one bucket in all; the faster is used."""

    name = "small"

    def plan(self, tensors: Any, world_size: int) -> BucketPlan:
        return SMALL.plan(tensors, world_size)

    def search(self, tensors: Any, world_size: int, times: Any, link: Any) -> Any:
        assert times.forward_s > 0
        assert times.backward_s > 0
        # Trains that noise makes equally long are fitted by zeros.
        assert min(link.alpha_s, link.beta_s) >= 0
        assert link.all_reduce is not None
        self.queue = [one().plan(tensors, world_size) for one in (NoFusion, SingleFusion)]
        self.told: list[tuple[float, str]] = []
        self.plans = {plan.name: plan for plan in self.queue}
        return self

    def next(self) -> BucketPlan | None:
        return self.queue[0] if self.queue else None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        assert step_s > 0
        assert plan == self.queue.pop(0)
        self.told.append((step_s, plan.name))

    @property
    def best(self) -> BucketPlan:
        return self.plans[min(self.told)[1]]

    @property
    def reason(self) -> str:
        return f"small: {self.best.name}"


def _tuned(
    planner: Any, net: Net, *callbacks: Any, compressor: Any = "none", **options: Any
) -> tuple[FusionTuner, Any]:
    strategy = dear(fusion=planner, compressor=compressor)
    tuner = FusionTuner(planner)
    options = {"num_samples": 4 * NUM_STEPS, "max_steps": NUM_STEPS, **options}
    fit(strategy, net, tuner, *callbacks, **options)
    return tuner, strategy


@pytest.mark.parametrize("accumulate", [1, 2])
@distributed(world_sizes=[2], keeps_ranks=False)
def test_weights_do_not_depend_on_the_search(accumulate: int) -> None:
    said: list[str] = []
    fusion_tuner.rank_zero_info = said.append  # type: ignore[assignment]
    options = {"accumulate_grad_batches": accumulate, "max_epochs": accumulate}
    net, plain = Net("mlp", "adamw"), Net("mlp", "adamw")
    tuner, strategy = _tuned(_Small(), net, **options)
    assert tuner.plan is not None
    assert tuner.plan.name in ("none", "single")
    assert strategy.plan == tuner.plan
    fit(dear(), plain, num_samples=4 * NUM_STEPS, max_steps=NUM_STEPS, **options)
    assert_same(net.losses, plain.losses, "loss")
    assert_same(copies(net), copies(plain), "weights")
    assert_ranks_agree([copies(net)])
    assert said == [f"small: {tuner.plan.name}"]


@pytest.mark.parametrize(
    ("planner", "compressor"),
    [
        (MergeCompFusion(), "int8"),
        (MergeCompFusion(), TopK(density=0.05)),
        (MergeCompHeuristicFusion(), "int8"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
@distributed(world_sizes=[2], keeps_ranks=False)
def test_a_plan_is_found_with_a_compressor(planner: Any, compressor: Any) -> None:
    said: list[str] = []
    fusion_tuner.rank_zero_info = said.append  # type: ignore[assignment]
    found: list[StepModel] = []
    best_plan = type(planner).best_plan

    def noted(self: Any, model: StepModel) -> BucketPlan:
        found.append(model)
        return best_plan(self, model)

    net = Net("mlp", "adamw")
    with mock.patch.object(type(planner), "best_plan", noted):
        # Found after 4 steps, 7 of the starting plan, and 6 times 7 of plans that are compared.
        max_steps = 4 + 7 + (42 if planner.name == "mergecomp" else 0) + 2
        tuner, strategy = _tuned(
            planner, net, compressor=compressor, max_steps=max_steps, max_epochs=-1
        )
    assert tuner.plan is not None
    assert strategy.plan == tuner.plan
    assert_ranks_agree([copies(net)])
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, tuner.plan)
    assert plans[0] == plans[1]
    assert said[0].startswith(f"{planner.name}: ")
    if dist.get_rank() == 0:
        (model, *_), times, codecs = found, found[0].times, found[0].codecs
        assert (model.world_size, times.allows_all_reduce) == (2, False)
        assert times.allows_cuts is (compressor == "int8")
        assert times.backward_s > 0
        assert codecs.may_mix
        # 4 + 4 bytes of one number in 20.
        assert codecs.compressed.reduce_bytes.beta < 1.5
        assert codecs.compressed.encode.of(1 << 16) > 0
        predicted = model.predict(tuner.plan)
        assert times.forward_s + times.backward_s < predicted.step_s < 10.0


def test_a_plan_is_described_with_its_compressor() -> None:
    assert description_of(MergeCompFusion()) == "MergeCompFusion(max_pieces=128)"
    described = description_of(MergeCompFusion(), TopK(density=0.05))
    assert described.startswith("MergeCompFusion(max_pieces=128) for TopK(")
    assert "density=0.05" in described


@distributed(world_sizes=[2], keeps_ranks=False)
def test_auto_finds_a_plan_on_real_steps() -> None:
    net = Net("gpt", "sgd")
    tuner, strategy = _tuned(
        AutoFusion(), net, model="gpt", num_samples=4 * 62, max_steps=62, max_epochs=1
    )
    assert tuner.plan is not None
    assert strategy.plan == tuner.plan
    assert_ranks_agree([copies(net)])


def _save(folder: Path) -> str:
    callback = ModelCheckpoint(folder, "last", every_n_train_steps=NUM_STEPS)
    tuner, _ = _tuned(_Small(), Net(), callback, enable_checkpointing=True)
    assert tuner.plan is not None
    return tuner.plan.name


def _resume(folder: Path, planner: Any) -> tuple[str | None, str, list[str]]:
    said: list[str] = []
    fusion_tuner.rank_zero_info = said.append  # type: ignore[assignment]
    tuner, strategy = _tuned(
        planner,
        Net(),
        max_steps=NUM_STEPS + 6,
        max_epochs=2,
        ckpt_path=str(folder / "last.ckpt"),
    )
    return tuner.plan and tuner.plan.name, strategy.plan.name, said


def test_a_resumed_run_takes_the_plan_found_or_finds_another_for_other_ranks(
    tmp_path: Path,
) -> None:
    found = run_ranks(_save, 2, tmp_path)
    assert len(set(found)) == 1
    said = [f"The plan found before is used again: {found[0]}"]
    assert run_ranks(_resume, 2, tmp_path, _Small()) == [(found[0], found[0], said)] * 2
    for _, _, said in run_ranks(_resume, 3, tmp_path, _Small()):
        assert "made for 2 ranks, and there are 3" in said[0]


class _SmallWithCodecs(_Small):
    plans_for_codecs = True

    def search(self, tensors: Any, world_size: int, times: Any, link: Any, codecs: Any = 0) -> Any:
        return super().search(tensors, world_size, times, link)


@distributed(world_sizes=[2], keeps_ranks=False)
def test_a_run_resumed_with_a_compressor_has_the_same_bits(tmp_path: Path) -> None:
    """Which numbers share a block hangs on the plan: the first step has to have it already."""
    whole, resumed = WeightRecorder(), WeightRecorder()
    options: dict[str, Any] = {"max_steps": NUM_STEPS + 3, "max_epochs": -1, "compressor": "int8"}
    saver = ModelCheckpoint(tmp_path, "last", every_n_train_steps=NUM_STEPS)
    _tuned(_SmallWithCodecs(), StepNet(), whole, saver, enable_checkpointing=True, **options)
    path = str(tmp_path / "last.ckpt")
    _tuned(_SmallWithCodecs(), StepNet(), resumed, ckpt_path=path, **options)
    assert len(resumed.seen) == 3
    assert_same(resumed.seen, whole.seen[NUM_STEPS:], "weights")


def test_a_plan_found_by_another_planner_is_not_used(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path)
    for used, active, said in run_ranks(_resume, 2, tmp_path, MergeCompFusion(max_pieces=9)):
        assert used == active == "mergecomp"
        assert "found with _Small(), and this is MergeCompFusion(max_pieces=9" in said[0]


@distributed(world_sizes=[2], keeps_ranks=False)
def test_a_training_that_is_too_short_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner, strategy = _tuned(_Small(), Net(), max_steps=7)
    told = [str(one.message) for one in caught if "still measuring plans" in str(one.message)]
    assert len(told) == (1 if strategy.global_rank == 0 else 0)
    assert tuner.plan is None
    assert tuner.state_dict() == {"plan": None, "planner": "_Small()"}


class _TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        return [SGD(part, lr=0.1) for part in (parameters[:1], parameters[1:])]


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@distributed(world_sizes=[1])
def test_several_optimizers_and_manual_optimisation_are_told_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"one optimizer, and there are 2\. Use fusion"):
        _tuned(_Small(), _TwoOptimizers())
    with pytest.warns(UserWarning, match="finds no plan under manual optimisation"):
        tuner, _ = _tuned(_Small(), _Manual(), max_steps=2)
    assert tuner.plan is None
