"""What a checkpoint and another plan take beside what is there anyway, in memory and in bytes."""

from __future__ import annotations

import ctypes
import gc
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.checkpoint import moving, optimizer_state
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import Int8
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.pieces import SpreadState
from lightning_dear.planning import BucketPlan, NoFusion, SingleFusion, ThresholdFusion
from tests.distributed.harness import distributed
from tests.training.models import build, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS, new_native, new_pipeline, train_steps

_MMAP_THRESHOLD = -3
"""Of mallopt: larger blocks go back to the system when they are freed."""

_STATE_BYTES = 8
"""AdamW's, of an element."""


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_memory_of_a_checkpoint_and_of_other_plans() -> None:
    _check_peaks(width=1000, num_layers=10, bucket_cap_mb=8)


@pytest.mark.slow
@distributed(world_sizes=(2,), keeps_ranks=False)
def test_memory_for_a_hundred_million_parameters() -> None:
    _check_peaks(width=2000, num_layers=25, bucket_cap_mb=25)


def _check_peaks(width: int, num_layers: int, bucket_cap_mb: float) -> None:
    """Of linear layers in fp32 with AdamW; prints what it has found."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    fusion = ThresholdFusion(bucket_cap_mb=bucket_cap_mb)
    pipeline = new_pipeline(model, torch.optim.AdamW(model.parameters(), lr=1e-5), fusion)
    part = pipeline.parts[0]

    def train() -> None:
        with pipeline.forward():
            loss = model(torch.ones(1, width)).square().mean()
        part.optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        part.optimizer.step()
        pipeline.complete_parameters()

    train()
    train()
    rank, num_parameters = dist.get_rank(), width * width * num_layers
    bucket_bytes = max(bucket.nbytes for bucket in part.plan.buckets)
    whole_bytes = num_parameters * _STATE_BYTES
    peak_bytes = _peak_bytes(lambda: part.optimizer_state_dict(on_rank_0=True))
    _tell("checkpoint", peak_bytes)
    assert peak_bytes <= (whole_bytes if rank == 0 else 0) + 2 * bucket_bytes
    larger = ThresholdFusion(bucket_cap_mb=2 * bucket_cap_mb)
    for name, other in {"larger": larger, "one": SingleFusion(), "as before": fusion}.items():
        plan, received = other.plan(part.tensors, dist.get_world_size()), _Received(part)
        peak_bytes = _peak_bytes(lambda plan=plan: part.replan(plan))
        _tell(f"{name}, which moves {received.nbytes / 2**20:.1f} MiB here", peak_bytes)
        assert peak_bytes <= 2 * bucket_bytes
        train()
    pipeline.detach()


def _tell(what: str, peak_bytes: int) -> None:
    print(f"{what}: rank {dist.get_rank()} {peak_bytes / 2**20:+.1f} MiB above before")


def _peak_bytes(do: Callable[[], object]) -> int:
    """How much more memory of this process was resident at the worst moment than before."""
    gc.collect()
    dist.barrier()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    kept = do()
    peak_bytes = _resident_bytes("VmHWM") - before
    del kept
    return peak_bytes


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class _Received:
    """Counts bytes of state that come to this rank from others, from now on."""

    def __init__(self, part: OptimizerPipeline) -> None:
        self.nbytes = 0
        collectives: Any = part._training.collectives
        launch = type(collectives).launch_parts

        def counted(outgoing: Any, incoming: Any, number: int) -> Any:
            self.nbytes += incoming[0].nbytes
            return launch(collectives, outgoing, incoming, number)

        collectives.launch_parts = counted


def _owners(plan: BucketPlan, numel_of: Sequence[int]) -> list[Tensor]:
    """Who steps each element of each tensor."""
    owners = [torch.empty(numel, dtype=torch.int64) for numel in numel_of]
    for bucket in plan.buckets:
        size = bucket.padded_numel // plan.world_size
        for part in bucket.slices:
            places = torch.arange(part.offset, part.offset + part.numel)
            owners[part.tensor][part.start : part.stop] = places // size
    return owners


@distributed(world_sizes=(1, 2, 3))
def test_another_plan_moves_what_changes_owner_and_nothing_else() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("adamw", model))
    train_steps(pipeline, model, [0])
    part, rank, world_size = pipeline.parts[0], dist.get_rank(), dist.get_world_size()
    numels = [tensor.numel for tensor in part.tensors]
    for step, fusion in enumerate((SMALL_BUCKETS, NoFusion(), SingleFusion(), SMALL_BUCKETS), 1):
        plan, received = fusion.plan(part.tensors, world_size), _Received(part)
        before, after = _owners(part.plan, numels), _owners(plan, numels)
        comes = sum(
            int(((old != new) & (new == rank)).sum())
            for old, new in zip(before, after, strict=True)
        )
        state = part.optimizer_state_dict()["state"]
        received.nbytes = 0
        part.replan(plan)
        assert received.nbytes == comes * _STATE_BYTES
        again = part.optimizer_state_dict()["state"]
        assert state.keys() == again.keys()
        for number, entries in state.items():
            assert list(entries) == list(again[number])
            assert all(torch.equal(value, again[number][key]) for key, value in entries.items())
        train_steps(pipeline, model, [step])
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_others_than_rank_0_keep_descriptions_of_what_a_checkpoint_takes() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("adamw", model))
    train_steps(pipeline, model, [0])
    part = pipeline.parts[0]
    received = _Received(part)
    state = part.optimizer_state_dict(on_rank_0=True)
    whole = part.optimizer_state_dict()
    values = [state["state"][number]["exp_avg"] for number in state["state"]]
    if dist.get_rank() == 0:
        for number, value in enumerate(values):
            assert torch.equal(value, whole["state"][number]["exp_avg"])
    else:
        assert received.nbytes < sum(value.nbytes for value in values) * 2 * 2
        assert all(value.is_meta for value in values)
        with pytest.raises(TypeError, match="whole on rank 0 alone"):
            pickle.dumps(state)
        with pytest.raises(TypeError, match="whole on rank 0 alone"):
            part.optimizer.load_state_dict(state)
    train_steps(pipeline, model, [1])
    pipeline.detach()


def _said(do: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_sizes=(1, 2))
def test_another_training_with_the_same_optimizer_goes_on_from_the_shards(
    dtype: torch.dtype,
) -> None:
    ends = []
    for num_trainings in (1, 2):
        model = build("mlp", dtype=dtype)
        optimizer = optimizer_for("adamw", model)
        pipeline = new_pipeline(model, optimizer)
        train_steps(pipeline, model, range(2))
        if num_trainings == 2:
            pipeline.detach()
            before, pipeline = pipeline.parts[0], new_pipeline(model, optimizer)
            part = pipeline.parts[0]
            saved, received = before.optimizer_state_dict(), _Received(part)
            part.inherit([before])
            assert not part.stepper.outside.plain
            received.nbytes = 0
            train_steps(pipeline, model, [2])
            assert received.nbytes == 0
            assert len(saved["state"]) == len(list(model.parameters()))
        else:
            train_steps(pipeline, model, [2])
        train_steps(pipeline, model, [3])
        state = pipeline.parts[0].optimizer_state_dict()
        pipeline.detach()
        ends.append((weights(model), state["state"]))
    _assert_same(*ends)


@distributed(world_sizes=(2,))
def test_what_a_training_has_left_is_saved_before_the_next_one_steps() -> None:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    pipeline.detach()
    before, pipeline = pipeline.parts[0], new_pipeline(model, optimizer)
    saved = before.optimizer_state_dict()
    part = pipeline.parts[0]
    part.inherit([before])
    _assert_same(part.optimizer_state_dict(), saved)
    # What is loaded counts, and nothing of before.
    fresh = {**saved, "state": {0: saved["state"][0]}}
    optimizer.load_state_dict(fresh)
    assert list(part.optimizer_state_dict()["state"]) == [0]
    train_steps(pipeline, model, [2])
    steps = {n: one["step"].item() for n, one in part.optimizer_state_dict()["state"].items()}
    assert steps == {number: 3 if number == 0 else 1 for number in saved["state"]}
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_what_is_loaded_between_two_trainings_is_all_there_is() -> None:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(2))
    pipeline.detach()
    optimizer.load_state_dict(optimizer_for("adamw", model).state_dict())
    before, pipeline = pipeline.parts[0], new_pipeline(model, optimizer)
    part = pipeline.parts[0]
    part.inherit([before])
    train_steps(pipeline, model, [2])
    assert {one["step"].item() for one in part.optimizer_state_dict()["state"].values()} == {1}
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_what_is_written_to_lagging_weights_between_two_trainings_stays() -> None:
    ends = []
    for offset in (0.0, 1.0):
        model = build("mlp")
        optimizer = optimizer_for("adamw", model)
        options = ExchangeOptions("parameters", compressor=Int8())
        pipeline = new_pipeline(model, optimizer, options=options)
        train_steps(pipeline, model, range(2))
        pipeline.detach()
        with torch.no_grad():
            list(model.parameters())[-1].add_(offset)
        before, pipeline = pipeline.parts[0], new_pipeline(model, optimizer, options=options)
        said = _said(lambda pipeline=pipeline, before=before: pipeline.parts[0].inherit([before]))
        assert len(said) == (offset > 0 and dist.get_rank() == 0)
        train_steps(pipeline, model, [2])
        pipeline.detach()
        ends.append(weights(model)[-1])
    assert (ends[1] - ends[0] - 1).abs().max() < 0.1


@distributed(world_sizes=(1, 2))
def test_state_of_another_memory_format_is_refused() -> None:
    """It lies in the order of the parameters' storage."""
    model = build("conv")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0], "conv")
    pipeline.detach()
    model.to(memory_format=torch.channels_last)
    before, pipeline = pipeline.parts[0], new_pipeline(model, optimizer)
    pipeline.parts[0].inherit([before])
    with pytest.raises(ValueError, match="another shape or memory format"):
        train_steps(pipeline, model, [1], "conv")


@distributed(world_sizes=(2,))
def test_no_state_is_saved_once_moving_it_has_failed() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("adamw", model))
    train_steps(pipeline, model, [0])
    part = pipeline.parts[0]
    plan = NoFusion().plan(part.tensors, dist.get_world_size())
    failing = mock.patch.object(optimizer_state, "move", side_effect=MemoryError)
    with failing, pytest.raises(MemoryError):
        part.replan(plan)
    with pytest.raises(RuntimeError, match="no consistent state to save"):
        part.optimizer_state_dict()


def test_what_is_taken_of_spread_state_takes_its_chunks_along() -> None:
    weight = nn.Parameter(torch.zeros(3))
    one, other = (torch.empty(3, device="meta") for _ in range(2))
    chunks = [(like, [moving.Chunk(0, torch.ones(3))]) for like in (one, other)]
    spread = SpreadState({weight: {"mean": one, "master": other}}, list(chunks))
    taken = spread.take("master", {weight})
    assert taken.entries == {weight: {"master": other}}
    assert [*taken.chunks, *spread.chunks] == [chunks[1], chunks[0]]


@distributed(world_sizes=(2,))
def test_parameters_that_are_in_no_plan_any_more_keep_their_state() -> None:
    """Whole, in `optimizer.state`, until they are trained again."""
    model = build("mlp")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    part = pipeline.parts[0]
    before = part.optimizer_state_dict()["state"]
    group = optimizer.param_groups[0]
    group["params"] = parameters[2:]
    train_steps(pipeline, model, [1])
    assert list(part.stepper.outside.plain) == parameters[:2]
    for number, parameter in enumerate(parameters[:2]):
        _assert_same(optimizer.state[parameter], before[number])
    group["params"] = parameters
    train_steps(pipeline, model, [2])
    assert not part.stepper.outside.plain
    steps = [one["step"].item() for one in part.optimizer_state_dict()["state"].values()]
    assert steps == [2, 2, *[3] * len(parameters[2:])]
    pipeline.detach()


def _assert_same(left: object, right: object) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
        assert left.dtype == right.dtype
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            _assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("backend", ["gloo", "native"])
@distributed(world_sizes=(2, 3))
def test_parts_of_several_types_travel_together(backend: str) -> None:
    """In any cuts, twice had or not at all, in more rounds than one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cpu = torch.device("cpu")
    collectives = new_collectives(cpu) if backend == "gloo" else new_native(cpu)
    dtypes = (torch.float32, torch.uint8, torch.float64, torch.bool, torch.bfloat16)
    items, made = [], []
    for number, dtype in enumerate(dtypes):
        whole = (torch.arange(1000 + number) % 7).to(dtype)
        cuts = [0, 10, 500 + number, 700] if world_size == 3 else [0, 333, 600]
        have = [moving.Chunk(cuts[rank], whole[cuts[rank] : cuts[rank + 1]].clone())]
        room = torch.zeros(200, dtype=dtype)
        items.append(moving.Item(dtype, have, [moving.Wanted(450, 650, lambda room=room: room)]))
        expected = torch.zeros(1000 + number, dtype=dtype)
        expected[: cuts[-1]] = whole[: cuts[-1]]
        made.append((room, expected[450:650]))
    with mock.patch.object(moving, "BATCH_BYTES", 256):
        moving.move(items, collectives, cpu)
    for room, expected in made:
        assert torch.equal(room, expected)
    assert not any(item.have for item in items)
