"""`fabric.save` and `fabric.load`: between ours and "ddp", and between world sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_dear.checkpoint import folder
from lightning_dear.checkpoint.files import CHECKPOINT_KEY, FORMAT, MASTER_KEY
from lightning_dear.engine.step import OptimizerPipeline
from tests.distributed.harness import distributed, run_ranks
from tests.fabric.running import STRATEGIES, dear, new_fabric
from tests.lightning.fitting import assert_same, assert_same_optimizer, poison_until_waited
from tests.lightning.nets import copies
from tests.training.models import batch, build, distance, loss_of, optimizer_for

NUM_SAMPLES = 6
"""Of a global batch, which every world size splits evenly."""
ROUNDING = 1e-6
"""Of float64 sums in another order, after AdamW has blown up gradients that are nearly zero."""


def _train(
    strategy: str,
    first: int,
    last: int,
    load: Path | None = None,
    save: Path | None = None,
    precision: Any = "64-true",
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Weights and whole optimizer state after the steps from `first` to before `last`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fabric = new_fabric(STRATEGIES[strategy](**options), precision=precision)
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("adamw", raw))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": first}
    with poison_until_waited():
        if load is not None:
            state["step"] = -1
            assert fabric.load(load, state) in ({}, {CHECKPOINT_KEY: {"format": FORMAT}})
            assert state["step"] == first
        for step in range(first, last):
            whole = [torch.cat(parts)[:NUM_SAMPLES] for parts in zip(*_batches(step), strict=True)]
            own = [part[rank::world_size] for part in whole]
            fabric.backward(loss_of(model, own[0].to(next(raw.parameters()).dtype), own[1]))
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            fabric.save(save, {**state, "step": last})
        return copies(raw), optimizer.state_dict()


def _batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch("mlp", step, part) for part in range(2)]


RESUMES = [
    ("dear", 2, "dear", 2),
    ("dear", 2, "ddp", 2),
    ("ddp", 2, "dear", 2),
    ("dear", 2, "dear", 3),
    ("dear", 3, "dear", 1),
    ("dear", 1, "ddp", 2),
    ("ddp", 3, "dear", 2),
]


@pytest.fixture(scope="module")
def uninterrupted() -> Any:
    return run_ranks(_train, 2, "ddp", 0, 6)[0]


@pytest.mark.parametrize(("writer", "before", "reader", "after"), RESUMES)
def test_resume(
    writer: str, before: int, reader: str, after: int, tmp_path: Path, uninterrupted: Any
) -> None:
    file = tmp_path / "some.ckpt"
    run_ranks(_train, before, writer, 0, 3, save=file)
    resumed = run_ranks(_train, after, reader, 3, 6, load=file)
    for weights, state in resumed:
        if before == after == 2:
            assert_same(weights, uninterrupted[0], "weights")
            assert_same_optimizer(state, uninterrupted[1])
        assert distance(weights, uninterrupted[0]) < ROUNDING


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    for strategy in STRATEGIES:
        run_ranks(_train, 2, strategy, 0, 3, save=tmp_path / strategy)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in STRATEGIES)
    assert ours.pop(CHECKPOINT_KEY) == {"format": FORMAT}
    assert list(ours) == list(theirs) == ["model", "optimizer", "step"]
    assert list(ours["model"]) == list(theirs["model"])
    assert_same(ours["model"].values(), theirs["model"].values(), "weights")
    assert_same_optimizer(ours["optimizer"], theirs["optimizer"])


def _save_and_look(file: Path) -> list[bool]:
    """Whether state is on the meta device: for the file, and as one asks for it."""
    asked: list[bool] = []
    whole = OptimizerPipeline.optimizer_state_dict

    def noted(part: OptimizerPipeline, **options: Any) -> dict[str, Any]:
        state = whole(part, **options)
        asked.append(state["state"][0]["exp_avg"].is_meta)
        return state

    with mock.patch.object(OptimizerPipeline, "optimizer_state_dict", noted):
        _train("dear", 0, 1, save=file)
    return asked


def test_a_file_is_whole_on_rank_0_and_what_one_asks_for_is_so_on_all(tmp_path: Path) -> None:
    seen = run_ranks(_save_and_look, 2, tmp_path / "file")
    assert seen == [[False, False], [True, False]]


@distributed(world_sizes=(2,))
def test_a_folder_is_read_too(tmp_path: Path) -> None:
    """As `Trainer(strategy=DearStrategy(save_distributed_checkpoint=True))` writes them."""
    weight = torch.arange(3000.0)
    folder.save(tmp_path / "saved", {"weight": weight, "step": 3})
    content = new_fabric(dear()).load(tmp_path / "saved")
    assert content["step"] == 3
    torch.testing.assert_close(content["weight"], weight)


def test_masters_survive(tmp_path: Path) -> None:
    options = {"precision": "bf16-true"}
    whole = run_ranks(_train, 2, "dear", 0, 6, **options)
    run_ranks(_train, 2, "dear", 0, 3, save=tmp_path / "file", **options)
    resumed = run_ranks(_train, 2, "dear", 3, 6, load=tmp_path / "file", **options)
    assert_same(resumed[0][0], whole[0][0], "weights")
    assert_same_optimizer(resumed[0][1], whole[0][1])
    assert MASTER_KEY in whole[0][1]["state"][0]


def test_masters_that_another_strategy_has_not_stepped_are_forgotten(tmp_path: Path) -> None:
    # 16-bit masters that do not belong to the weights would show by their bits; these do not.
    options = {"precision": "32-true", "compressor": "int8"}
    run_ranks(_train, 2, "dear", 0, 3, save=tmp_path / "ours", **options)
    theirs = {"load": tmp_path / "ours", "save": tmp_path / "theirs"}
    run_ranks(_train, 2, "ddp", 3, 6, **theirs, precision="32-true")
    content = torch.load(tmp_path / "theirs", weights_only=True)
    for state in content["optimizer"]["state"].values():
        del state[MASTER_KEY]
    torch.save(content, tmp_path / "without")
    resumed, expected = (
        run_ranks(_train, 2, "dear", 6, 8, load=tmp_path / name, **options)
        for name in ("theirs", "without")
    )
    assert_same(resumed[0][0], expected[0][0], "weights")


def test_what_ddp_has_kept_in_16_bits_is_fp32_beside_masters(tmp_path: Path) -> None:
    run_ranks(_train, 2, "ddp", 0, 3, save=tmp_path / "theirs", precision="bf16-true")
    resumed = run_ranks(_train, 2, "dear", 3, 6, load=tmp_path / "theirs", precision="bf16-true")
    assert all(
        value.dtype == torch.float32
        for state in resumed[0][1]["state"].values()
        for value in state.values()
    )


@distributed([2])
def test_other_ways_to_load_and_save(tmp_path: Path) -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    # A plain state dict gets no key of ours, so that it loads strictly.
    fabric.save(tmp_path / "raw.pt", model.state_dict())
    _step(fabric, model, optimizer)
    stepped = copies(raw)
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert_same(copies(raw), copies(build("mlp")), "loaded weights")
    fabric.save(tmp_path / "some.pt", {"model": model, "note": "n"}, filter={"model": _no_bias})
    content = fabric.load(tmp_path / "some.pt")
    assert content["note"] == "n"
    assert not any("bias" in name for name in content["model"])
    assert not any(torch.equal(a, b) for a, b in zip(copies(raw), stepped, strict=True))
    _step(fabric, model, optimizer)  # Steps from what was loaded, with the momentum kept.
    assert len(optimizer.state_dict()["state"]) == len(stepped)


def _no_bias(name: str, value: object) -> bool:
    return "bias" not in name


def _step(fabric: Any, model: nn.Module, optimizer: Any) -> None:
    fabric.backward(loss_of(model, *batch("mlp", 0, fabric.global_rank)))
    optimizer.step()
    optimizer.zero_grad()


@distributed([2])
def test_a_later_format_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model = fabric.setup(raw)
    before = copies(raw)
    later = {"model": build("mlp", seed=1).state_dict(), CHECKPOINT_KEY: {"format": FORMAT + 1}}
    torch.save(later, tmp_path / f"{fabric.global_rank}")
    with pytest.raises(ValueError, match=f"lightning_dear format {FORMAT + 1}"):
        fabric.load(tmp_path / f"{fabric.global_rank}", {"model": model})
    assert_same(copies(raw), before, "weights")
