"""Encoded exchanges that another number of ranks goes on with: nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.compression import (
    Bf16,
    Compressor,
    EFSignSGD,
    Fp16,
    Int4,
    Int8,
    LoCo,
    OkTopk,
    OneBit,
    PowerSGD,
    TopK,
)
from tests.distributed.harness import run_ranks
from tests.exchange.test_coded import coded
from tests.exchange.test_lagging import masters_of
from tests.training.lagging import LaggingEFSignSGD
from tests.training.linear import Run

OF_GRADIENTS: tuple[Compressor, ...] = (
    Int4(block_size=64),
    TopK(density=0.05),
    LoCo(block_size=64),
    EFSignSGD(block_size=64),
    OneBit(block_size=64),
    PowerSGD(rank=1, min_saving=1.0),
    OkTopk(density=0.1),
)
OF_DIFFERENCES: tuple[Compressor, ...] = (
    Fp16(),
    Bf16(),
    Int8(block_size=64),
    Int4(block_size=64),
    LoCo(block_size=64),
    LaggingEFSignSGD(block_size=64),
)
MOVES = [(2, 3), (3, 2), (2, 1)]
LONG_MOVES = [(1, 4), (4, 2), (3, 4), (4, 1)]


def _rate(codec: Compressor) -> float:
    return codec.rate if isinstance(codec, LoCo) else 1.0


def _steps(run: Run, num_steps: int) -> None:
    for _ in range(num_steps):
        run.step(leaves_out=run.num_steps % 5 == 3)
    run.pipeline.complete_parameters()


def _save(run: Run, path: Path) -> None:
    """The run's state, and what should have arrived."""
    state = run.part.optimizer_state_dict()
    sums = {"expected": run.expected, "magnitudes": run.magnitudes, "num_steps": run.num_steps}
    if dist.get_rank() == 0:
        torch.save((state, run.model.state_dict(), sums), path)


def _load(run: Run, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's and the model's state, which `run` has now."""
    state, model, sums = torch.load(path)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(state)
    vars(run).update(sums)
    return state, model


def _assert_total(run: Run, saved: dict[str, Any]) -> None:
    """Between backward and step: workers keep as much in all as before, owners the same bits."""
    now = run.part.optimizer_state_dict()["residuals"]
    before = saved["residuals"]
    assert now["worker"].keys() == before["worker"].keys()
    assert now["owner"].keys() == before["owner"].keys()
    for name, kept in before["worker"].items():
        for number, rows in kept.items():
            total = rows.double().sum(0)
            assert len(now["worker"][name][number]) == dist.get_world_size() // run.together
            moved = now["worker"][name][number].double().sum(0)
            largest = float(rows.abs().max())
            torch.testing.assert_close(moved, total, rtol=1e-6, atol=1e-6 * largest)
    for name, kept in before["owner"].items():
        for number, numbers in kept.items():
            assert torch.equal(now["owner"][name][number], numbers)


# --- of gradients ---------------------------------------------------------------------------------


def _save_gradients(folder: Path, num_steps: int) -> None:
    for number, codec in enumerate(OF_GRADIENTS):
        run = Run(coded(codec))
        _steps(run, num_steps)
        _save(run, folder / f"{number}.pt")


def _go_on_with_gradients(folder: Path, num_steps: int) -> None:
    for number, codec in enumerate(OF_GRADIENTS):
        run = Run(coded(codec))
        state, _ = _load(run, folder / f"{number}.pt")
        run.step(before=lambda run=run, state=state: _assert_total(run, state))
        _steps(run, num_steps - 1)
        assert run.error(_rate(codec)) <= 1e-5, codec
        assert max(run.errors(_rate(codec))) <= 1e-4, codec


def _check_gradients(folder: Path, before: int, after: int, num_steps: int) -> None:
    run_ranks(_save_gradients, before, folder, num_steps, timeout_s=120)
    run_ranks(_go_on_with_gradients, after, folder, num_steps, timeout_s=120)


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_nothing_is_lost_where_other_ranks_go_on(tmp_path: Path, before: int, after: int) -> None:
    _check_gradients(tmp_path, before, after, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), LONG_MOVES)
def test_nothing_is_lost_where_other_ranks_go_on_for_fifty_steps(
    tmp_path: Path, before: int, after: int
) -> None:
    _check_gradients(tmp_path, before, after, 25)


# --- of parameters --------------------------------------------------------------------------------


def _save_masters(folder: Path, num_steps: int) -> None:
    for number, codec in enumerate(OF_DIFFERENCES):
        run = Run(coded(codec, "parameters"))
        _steps(run, num_steps)
        _save(run, folder / f"{number}.pt")


def _assert_moved(run: Run, state: dict[str, Any], model: dict[str, Any]) -> None:
    """Masters and replicas have the bits they had, so that the lag is what it was."""
    _assert_total(run, state)
    assert "residual" not in state["residuals"]["owner"]
    for number, master in enumerate(masters_of(run.part)):
        assert torch.equal(master, state["state"][number]["master_weight"])
    for weight, replica in zip(run.model.weights, model.values(), strict=True):
        assert torch.equal(weight, replica)


def _go_on_with_masters(folder: Path, num_steps: int) -> None:
    for number, codec in enumerate(OF_DIFFERENCES):
        run = Run(coded(codec, "parameters"))
        state, model = _load(run, folder / f"{number}.pt")
        run.step(before=lambda run=run, loaded=(state, model): _assert_moved(run, *loaded))
        _steps(run, num_steps - 1)
        assert run.error(_rate(codec), masters_of(run.part)) <= 1e-5, codec


def _check_masters(folder: Path, before: int, after: int, num_steps: int) -> None:
    run_ranks(_save_masters, before, folder, num_steps, timeout_s=120)
    run_ranks(_go_on_with_masters, after, folder, num_steps, timeout_s=120)


def test_masters_move_where_other_ranks_go_on(tmp_path: Path) -> None:
    _check_masters(tmp_path, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*LONG_MOVES, (3, 2)])
def test_masters_move_where_other_ranks_go_on_for_fifty_steps(
    tmp_path: Path, before: int, after: int
) -> None:
    _check_masters(tmp_path, before, after, 25)
