"""A search driven over the steps of a made-up training, with made-up seconds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from lightning_dear.compression import Int8
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import (
    AutoFusion,
    BayesianFusion,
    BucketPlan,
    LinkCost,
    MergeCompFusion,
    MergeCompHeuristicFusion,
    ModelTimes,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
    predict,
)
from lightning_dear.planning.measured import CodecCost, CodecCosts, Linear
from lightning_dear.planning.refine import everything_all_reduced
from lightning_dear.planning.search import (
    NUM_DROPPED_STEPS,
    NUM_MEASURED_STEPS,
    NUM_PROFILED_STEPS,
    STEPS_PER_TRIAL,
    PredictingPlanner,
)
from lightning_dear.tuning import link_cost, tuner
from lightning_dear.tuning.link_cost import measure_link
from lightning_dear.tuning.tuner import Tuning
from tests.checkpoint.test_default_dtype import default_dtype
from tests.planning.models import UNIT, chain

TENSORS, TIMES = chain([(1 << 19) // UNIT] * 16, [0.01] * 16, [0.02] * 16)
FIRST = ThresholdFusion().plan(TENSORS, 2)
LINK_ALPHA_S, LINK_BETA_S = 1e-3, 1e-8
Training = Callable[["_Pipeline"], float]


class _Clock:
    """The moment is set by the training; marks are moments."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, mark: float) -> float:
        return mark


CLOCK = _Clock()


class _Collectives:
    """Rank 0 of two; rank 1 is slower by a tenth."""

    def __init__(self, world_size: int = 2) -> None:
        self.world = World(0, world_size)
        self.ledger = Counter()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, 1.1 * value if isinstance(value, float) else value]

    def scratch_numel(self, numel: int) -> int:
        return numel // 2

    def launch_reduce_scatter(self, buffer: torch.Tensor, *_: Any) -> Work:
        return self.launch_all_gather(buffer)

    def launch_all_reduce(self, buffer: torch.Tensor, *_: Any) -> Work:
        CLOCK.now_s += 0.5 * LINK_ALPHA_S + 3 * LINK_BETA_S * buffer.nbytes
        self.ledger["all_reduce"] += buffer.nbytes
        return Work(lambda: None)

    def launch_all_gather(self, buffer: torch.Tensor, *_: Any) -> Work:
        CLOCK.now_s += LINK_ALPHA_S + LINK_BETA_S * buffer.nbytes / 2
        self.ledger["other"] += buffer.nbytes
        return Work(lambda: None)


@dataclass
class _Part:
    plan: BucketPlan | None = None
    tensors: Sequence[Any] = ()
    timer: Any = field(default_factory=lambda: SimpleNamespace(times=None))
    num_steps: int = 0
    parameters: Sequence[torch.Tensor] = (torch.zeros(1),)
    used: list[BucketPlan] = field(default_factory=list)
    uses_configured_compressor: bool = True
    plans: Any = field(default_factory=lambda: SimpleNamespace(find_plan=None))

    def record(self, tensors: Sequence[Any], start: BucketPlan) -> None:
        self.tensors, self.plan = tensors, self.plans.find_plan(tensors) or start

    def replan(self, plan: BucketPlan) -> None:
        assert self.plan is not None
        self.plan = plan


class _Pipeline:
    def __init__(self, world_size: int = 2) -> None:
        self.collectives = _Collectives(world_size)
        self.parts = [_Part()]
        self.num_measured = 0
        self.training = SimpleNamespace(all_reduce_refusal=None)
        self.options = ExchangeOptions()

    def complete_parameters(self, reason: str) -> None:
        pass

    def measure_next_step(self) -> None:
        self.num_measured += 1


@pytest.fixture(autouse=True)
def _made_up_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuner, link_cost):
        monkeypatch.setattr(module, "clock_of", lambda device: CLOCK)


def _bucket_s(pipeline: _Pipeline) -> float:
    """Best with five buckets."""
    plan = pipeline.parts[0].plan
    assert plan is not None
    return 1.0 + 0.1 * abs(len(plan.buckets) - 5)


def _train(tuner: Tuning, pipeline: _Pipeline, num_steps: int, step_s: Training = _bucket_s) -> int:
    """Steps until there is a plan, `num_steps` at most."""
    part = pipeline.parts[0]
    for step in range(1, num_steps + 1):
        if part.plan is None:
            part.record(TENSORS, FIRST)
        part.used.append(part.plan)
        CLOCK.now_s += step_s(pipeline)
        part.timer.times = TIMES if pipeline.num_measured else None
        part.num_steps += 1
        tuner.before_forward()
        if not tuner.is_searching:
            return step
    return num_steps


def _tuning(planner: Any, world_size: int = 2, found: Any = None) -> tuple[Any, _Pipeline, list]:
    said: list[str] = []
    pipeline = _Pipeline(world_size)
    return Tuning(pipeline, planner, said.append, found), pipeline, said  # type: ignore[arg-type]


COSTS = CodecCosts(CodecCost(encode=Linear(1e-3, 1e-9)))


@pytest.fixture
def _made_up_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "measure_codecs", lambda pipeline: COSTS)
    link = LinkCost(LINK_ALPHA_S, LINK_BETA_S)
    monkeypatch.setattr(tuner, "measure_link", lambda pipeline: link)


def _encoding(planner: Any) -> tuple[Any, _Pipeline, list]:
    tuner, pipeline, said = _tuning(planner)
    pipeline.options = ExchangeOptions(compressor=Int8())
    return tuner, pipeline, said


def _predicted_s(plan: BucketPlan) -> float:
    return predict(plan, TENSORS, TIMES, LinkCost(LINK_ALPHA_S, LINK_BETA_S), COSTS).step_s


@pytest.mark.usefixtures("_made_up_codec")
@pytest.mark.parametrize(
    "planner", [MergeCompFusion(), MergeCompHeuristicFusion()], ids=lambda one: one.name
)
def test_what_no_cost_shows_is_learnt_from_the_starting_plan(planner: Any) -> None:
    tuner, pipeline, said = _encoding(planner)

    def step_s(one: _Pipeline) -> float:
        assert one.parts[0].plan is not None
        return 5.0 + _predicted_s(one.parts[0].plan)

    _train(tuner, pipeline, 100, step_s)
    # Rank 1 is slower by a tenth.
    unseen_s = 1.1 * (5.0 + _predicted_s(FIRST)) - _predicted_s(FIRST)
    found = re.search(r"predicted ([\d.e+]+) ms/step", said[0])
    assert found is not None
    plan = pipeline.parts[0].plan
    assert plan is not None
    expected_ms = 1e3 * (_predicted_s(plan) + unseen_s)
    assert float(found.group(1)) == pytest.approx(expected_ms, rel=0.01)


@pytest.mark.usefixtures("_made_up_codec")
@pytest.mark.parametrize(
    ("planner", "num_trials"),
    [(MergeCompFusion(), 6), (MergeCompHeuristicFusion(), 0), (BayesianFusion(num_trials=4), 4)],
    ids=lambda one: getattr(one, "name", ""),
)
@pytest.mark.parametrize("is_scheduled", [False, True], ids=["", "scheduled"])
def test_no_step_is_measured_that_a_schedule_encodes_otherwise(
    planner: Any, num_trials: int, is_scheduled: bool
) -> None:
    tuner, pipeline, said = _encoding(planner)
    pipeline.parts[0].uses_configured_compressor = not is_scheduled
    num_plans = num_trials + isinstance(planner, PredictingPlanner)
    expected = 1 + NUM_PROFILED_STEPS + STEPS_PER_TRIAL * num_plans * (not is_scheduled)
    assert _train(tuner, pipeline, 100, lambda _: 5.0) == expected
    if is_scheduled and isinstance(planner, MergeCompFusion):
        plan = tuner.plan
        assert plan.name == "mergecomp"
        predicted = f"predicted {1e3 * _predicted_s(plan):.3g} ms/step"
        assert said[0].endswith(f"{predicted}, nothing measured")


@pytest.mark.usefixtures("_made_up_codec")
def test_a_search_ends_when_a_schedule_begins() -> None:
    tuner, pipeline, said = _encoding(MergeCompFusion())
    part = pipeline.parts[0]
    # In the second measurement of what is fastest, after the start's and one of each plan.
    num_steps = 1 + NUM_PROFILED_STEPS + (1 + 3) * STEPS_PER_TRIAL + 2

    def step_s(_: _Pipeline) -> float:
        part.uses_configured_compressor = part.num_steps < num_steps
        return 2.0 if part.plan is not None and part.plan.name == "single" else 3.0

    assert _train(tuner, pipeline, 100, step_s) < num_steps + STEPS_PER_TRIAL
    assert tuner.plan.name == "mergecomp"


@pytest.mark.usefixtures("_made_up_codec")
@pytest.mark.parametrize("fastest", ["mergecomp", "mergecomp_heuristic", "single"])
def test_with_a_codec_the_programmes_plan_stays_unless_a_simpler_one_is_faster(
    fastest: str,
) -> None:
    tuner, pipeline, said = _encoding(MergeCompFusion())

    def step_s(_: _Pipeline) -> float:
        plan = pipeline.parts[0].plan
        assert plan is not None
        return 2.0 if plan.name == fastest else 3.0

    _train(tuner, pipeline, 100, step_s)
    assert tuner.plan.name == fastest
    which = "" if fastest == "mergecomp" else f" of {fastest}"
    assert re.fullmatch(
        rf"mergecomp: \d+ buckets? of [\d.-]+ MiB{which}, predicted [\d.e+]+ ms/step,"
        r" measured 2200 against 3300 of \w+, 3300 of \w+",
        said[0],
    )


@pytest.mark.parametrize("planner", [AutoFusion(), BayesianFusion()], ids=lambda one: one.name)
def test_a_search_ends_within_sixty_steps_with_what_measured_best(planner: Any) -> None:
    tuner, pipeline, said = _tuning(planner)
    assert _train(tuner, pipeline, 100) <= 60
    part = pipeline.parts[0]
    seconds = {len(plan.buckets): 1 + 0.1 * abs(len(plan.buckets) - 5) for plan in part.used}
    assert len(seconds) >= 4
    assert tuner.plan is part.plan
    assert 1 + 0.1 * abs(len(part.plan.buckets) - 5) == min(seconds.values())
    # 1.1: the slower rank's seconds.
    assert f"{1100 * min(seconds.values()):.4g} ms/step" in said[0]
    assert len(said) == 1
    tuner.before_forward()
    assert len(said) == 1


def test_a_planner_without_contest_is_applied_after_the_profile() -> None:
    tuner, pipeline, said = _tuning(MergeCompFusion())
    assert _train(tuner, pipeline, 100) == 4
    assert pipeline.num_measured == 3
    assert tuner.plan.name == "mergecomp" == pipeline.parts[0].plan.name
    assert said[0].startswith("mergecomp: ")


class _Two:
    """Measures one bucket against many."""

    def plan(self, tensors: Any, world_size: int) -> BucketPlan:
        return FIRST

    def search(self, tensors: Any, world_size: int, times: ModelTimes, link: LinkCost) -> Any:
        self.times, self.link, self.told = times, link, []
        self.queue = [one().plan(tensors, world_size) for one in (SingleFusion, NoFusion)]
        return self

    def next(self) -> BucketPlan | None:
        return self.queue[0] if self.queue else None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        assert plan == self.queue.pop(0)
        self.told.append(step_s)

    @property
    def best(self) -> BucketPlan:
        return FIRST

    reason = "done"


def test_steps_after_a_change_are_dropped_and_a_pause_does_not_count() -> None:
    planner = _Two()
    tuner, pipeline, _ = _tuning(planner)
    part = pipeline.parts[0]

    def step_s(_: _Pipeline) -> float:
        age = 0
        for plan in reversed(part.used):
            if plan is not part.used[-1]:
                break
            age += 1
        if age <= NUM_DROPPED_STEPS:
            return 1000.0
        return 500.0 if age == NUM_DROPPED_STEPS + 2 else 2.0

    last = _train(tuner, pipeline, 100, step_s)
    assert planner.told == [pytest.approx(2.2)] * 2
    assert last == 4 + 2 * (NUM_DROPPED_STEPS + NUM_MEASURED_STEPS)
    assert planner.times == TIMES
    assert planner.link.alpha_s == pytest.approx(1.1 * LINK_ALPHA_S)
    assert planner.link.beta_s == pytest.approx(1.1 * LINK_BETA_S)
    assert planner.link.all_reduce.alpha_s == pytest.approx(1.1 * 0.5 * LINK_ALPHA_S)
    assert planner.link.all_reduce.beta_s == pytest.approx(1.1 * 3 * LINK_BETA_S)


def test_the_link_is_measured_in_fp32_within_any_default_dtype() -> None:
    pipeline = _Pipeline()
    with default_dtype(torch.float64):
        link = measure_link(pipeline)  # type: ignore[arg-type]
    assert link.beta_s == pytest.approx(1.1 * LINK_BETA_S)


def test_measuring_the_link_counts_no_bytes() -> None:
    pipeline = _Pipeline()
    measure_link(pipeline)  # type: ignore[arg-type]
    assert pipeline.collectives.ledger.total() == 0


class _OverlappingStarts(_Collectives):
    """A start delays what it starts, and not what is on the link meanwhile."""

    free_s = 0.0

    def launch_all_gather(self, buffer: torch.Tensor, *_: Any) -> Work:
        begin_s = max(self.free_s, CLOCK.now_s + LINK_ALPHA_S)
        end_s = self.free_s = begin_s + LINK_BETA_S * buffer.nbytes / 2

        def arrive() -> None:
            CLOCK.now_s = max(CLOCK.now_s, end_s)

        return Work(arrive)


def test_starts_that_overlap_with_other_exchanges_cost_little() -> None:
    pipeline = _Pipeline()
    pipeline.collectives = _OverlappingStarts()
    pipeline.parts[0].tensors = TENSORS
    link = measure_link(pipeline)  # type: ignore[arg-type]
    assert link.alpha_s < 0.01 * LINK_ALPHA_S
    assert link.beta_s == pytest.approx(1.1 * LINK_BETA_S)
    assert link.all_reduce is not None
    assert link.all_reduce.alpha_s == pytest.approx(1.1 * 0.5 * LINK_ALPHA_S)


class _UnevenEnds(_Collectives):
    """The last rank has all of a train 1 ms late, or 4 if it was of more than 4 MB."""

    train_bytes = 0

    def launch_all_gather(self, buffer: torch.Tensor, *_: Any) -> Work:
        CLOCK.now_s += LINK_ALPHA_S + LINK_BETA_S * buffer.nbytes / 2
        self.train_bytes += buffer.nbytes
        return Work(self._end)

    def _end(self) -> None:
        if self.train_bytes:
            CLOCK.now_s += 4e-3 if self.train_bytes > 4e6 else 1e-3
        self.train_bytes = 0


def test_uneven_ends_of_trains_hardly_count() -> None:
    pipeline = _Pipeline()
    pipeline.collectives = _UnevenEnds()
    pipeline.parts[0].tensors = [replace(TENSORS[0], numel=25_000_000)]
    link = measure_link(pipeline)  # type: ignore[arg-type]
    # From trains of an eighth of the model it would be 6 % more.
    assert link.beta_s == pytest.approx(1.1 * LINK_BETA_S, rel=0.02)


class _SetUp(_Collectives):
    """The first exchange of every size sets something up."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of_size: dict[int, int] = {}

    def launch_all_reduce(self, buffer: torch.Tensor, *_: Any) -> Work:
        CLOCK.now_s += 0.0 if buffer.nbytes in self.bytes_of_size else 1.0
        self.bytes_of_size.setdefault(buffer.nbytes, 0)
        self.bytes_of_size[buffer.nbytes] += buffer.nbytes
        return super().launch_all_reduce(buffer)


@pytest.mark.parametrize(
    ("numel", "train_mb", "long_mb"), [(1, 0.25, 0.25), (25 << 18, 3.125, 12.5), (1 << 30, 16, 64)]
)
def test_trains_have_limits_and_do_not_count_what_a_size_sets_up(
    numel: int, train_mb: float, long_mb: float
) -> None:
    pipeline = _Pipeline()
    pipeline.collectives = collectives = _SetUp()
    pipeline.parts[0].tensors = [replace(TENSORS[0], numel=numel)]
    link = measure_link(pipeline)  # type: ignore[arg-type]
    assert link.all_reduce is not None
    assert link.all_reduce.beta_s == pytest.approx(1.1 * 3 * LINK_BETA_S)
    # What is sent first of each size comes on top.
    sizes = collectives.bytes_of_size
    counted = {size / 2**20: (total - size) / 2**20 for size, total in sizes.items()}
    assert counted[train_mb / 4] >= 3 * train_mb
    assert counted[long_mb / 8] >= long_mb
    assert max(sizes) / 2**20 == max(train_mb / 4, long_mb / 8)


def test_one_rank_keeps_its_plan() -> None:
    tuner, pipeline, said = _tuning(AutoFusion(), world_size=1)
    assert _train(tuner, pipeline, 10) == 1
    assert tuner.plan is None
    assert pipeline.parts[0].plan is FIRST
    assert said == []


def test_a_plan_found_before_is_used_at_once() -> None:
    first, pipeline, _ = _tuning(MergeCompFusion())
    assert first.found is None
    _train(first, pipeline, 100)
    again, pipeline, said = _tuning(AutoFusion(), found=first.found)
    assert _train(again, pipeline, 100) == 1
    assert again.plan == first.plan == pipeline.parts[0].plan
    assert again.found == first.found
    assert said == ["The plan found before is used again: mergecomp"]
    # From the first step on: the starting plan would lose other bits.
    assert pipeline.parts[0].used == [first.plan]


def test_a_plan_for_other_ranks_is_searched_for_anew() -> None:
    found = NoFusion().plan(TENSORS, 3).to_dict(TENSORS)
    tuner, pipeline, said = _tuning(MergeCompFusion(), found=found)
    assert _train(tuner, pipeline, 100) == 4
    assert "for 3 ranks, and there are 2" in said[0]
    assert tuner.plan.name == "mergecomp"


def test_all_reduces_are_planned_only_where_they_are_allowed() -> None:
    everything = AutoFusion(all_reduced_share=1)
    reducing = everything_all_reduced(TENSORS, 2)
    found = reducing.to_dict(TENSORS)
    tuner, pipeline, _ = _tuning(everything, found=found)
    _train(tuner, pipeline, 100)
    assert tuner.plan == reducing
    other, pipeline, _ = _tuning(everything, found=found)
    pipeline.training.all_reduce_refusal = "gathered"
    _train(other, pipeline, 100)
    assert other.plan == replace(reducing, all_reduced=())
    for share in (0, 0.5):
        other, pipeline, said = _tuning(AutoFusion(all_reduced_share=share), found=found)
        _train(other, pipeline, 100)
        assert other.plan.all_reduced_share <= share
        assert f"100% of all elements, more than all_reduced_share={share}" in said[0]
        assert len(said) == 2
    last, pipeline, said = _tuning(everything)
    pipeline.training.all_reduce_refusal = "gradients are gathered"
    _train(last, pipeline, 100)
    assert not any(plan.all_reduced for plan in pipeline.parts[0].used)


def test_other_parameters_bring_another_search() -> None:
    tuner, pipeline, said = _tuning(MergeCompFusion())
    _train(tuner, pipeline, 100)
    part = pipeline.parts[0]
    part.record(TENSORS[:-1], ThresholdFusion().plan(TENSORS[:-1], 2))
    part.num_steps += 1
    tuner.before_forward()
    assert tuner.is_searching
    assert tuner.plan is tuner.found is None
    _train(tuner, pipeline, 100)
    assert sum(len(bucket.slices) for bucket in tuner.plan.buckets) == len(TENSORS) - 1
    assert len(said) == 3
    assert "is not used, another one is searched for" in said[1]


def test_the_same_parameters_recorded_again_need_no_other_search() -> None:
    tuner, pipeline, _ = _tuning(MergeCompFusion())
    _train(tuner, pipeline, 100)
    part, found = pipeline.parts[0], tuner.plan
    part.record(list(TENSORS), FIRST)
    part.num_steps += 1
    tuner.before_forward()
    assert not tuner.is_searching
    assert part.plan == tuner.plan == found


def test_steps_that_were_left_out_do_not_count() -> None:
    pipeline = _Pipeline()
    tuner = Tuning(pipeline, AutoFusion(), lambda line: None)
    part = pipeline.parts[0]
    part.record(TENSORS, FIRST)
    part.num_steps = 1
    tuner.before_forward()
    for _ in range(3):
        tuner.before_forward()
    assert pipeline.num_measured == 1
    part.num_steps += 1
    part.timer.times = TIMES
    tuner.before_forward()
    assert pipeline.num_measured == 2
