"""Setting up again, letting go, and the end of a program."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_dear.collectives.work import reusable_groups
from lightning_dear.fabric.module import DearModule
from tests.distributed.harness import distributed
from tests.fabric.running import dear, new_fabric
from tests.lightning.fitting import (
    assert_differ,
    assert_ranks_agree,
    assert_same,
    assert_same_optimizer,
    poison_until_waited,
)
from tests.lightning.nets import copies
from tests.training.models import batch, build, loss_of, optimizer_for

ROOT = Path(__file__).parents[2]


def _train(fabric: Fabric, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        fabric.backward(loss_of(model, *batch("mlp", step, fabric.global_rank)))
        optimizer.step()
        optimizer.zero_grad()


@distributed([1, 2])
def test_setting_up_again_goes_on() -> None:
    fabric = new_fabric(dear(), precision="bf16-true")
    with poison_until_waited():
        raw = build("mlp")
        model, optimizer = fabric.setup(raw, optimizer_for("adamw", raw))
        _train(fabric, model, optimizer, range(6))
        whole, state = copies(raw), optimizer.state_dict()

        raw = build("mlp")
        plain = optimizer_for("adamw", raw)
        model, optimizer = fabric.setup(raw, plain)
        _train(fabric, model, optimizer, range(3))
        model, optimizer = fabric.setup(raw, plain)
        _train(fabric, model, optimizer, range(3, 6))
        assert_same(copies(raw), whole, "weights")
        assert_same_optimizer(optimizer.state_dict(), state)


@distributed([2])
def test_another_optimizer_takes_over() -> None:
    fabric = new_fabric(dear())
    with poison_until_waited():
        raw = build("mlp")
        model, before = fabric.setup(raw, optimizer_for("sgd", raw))
        _train(fabric, model, before, range(2))
        model, after = fabric.setup(raw, optimizer_for("adamw", raw))
        _train(fabric, model, after, range(2))
        with pytest.raises(RuntimeError, match="SGD's parameters has ended"):
            before.step()
        assert len(before.state_dict()["state"]) == len(copies(raw))
        assert_ranks_agree([copies(raw)])


@distributed([2])
def test_the_module_is_an_ordinary_one_afterwards() -> None:
    fabric = new_fabric(dear())
    with poison_until_waited():
        raw = build("mlp")
        held = list(raw.parameters())
        model, optimizer = fabric.setup(raw, optimizer_for("adamw", raw))
        _train(fabric, model, optimizer, range(3))
        del model
        assert_ranks_agree([held])
        with pytest.raises(RuntimeError, match="what fabric.setup returned for the model is gone"):
            optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(held)
        before = copies(raw)
        if fabric.global_rank == 0:  # Alone: nothing of it is communicated.
            plain = torch.optim.SGD(raw.parameters(), lr=0.1)
            loss_of(raw, *batch("mlp", 0, 0)).backward()
            plain.step()
            assert_differ(copies(raw), before)


@distributed([2])
def test_calling_the_plain_module_is_refused() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    optimizer = fabric.setup(raw, optimizer_for("sgd", raw))[1]
    fabric.backward(loss_of(raw, *batch("mlp", 0, fabric.global_rank)))
    with pytest.raises(RuntimeError, match="and use both of them"):
        optimizer.step()


def _collect_on(fabric: Fabric, rank: int) -> None:
    if fabric.global_rank == rank:
        with pytest.warns(UserWarning, match="deleted between backward and step"):
            gc.collect()


@distributed([2])
def test_a_model_deleted_in_mid_step_launches_nothing() -> None:
    fabric = new_fabric(dear())
    gc.disable()

    def set_up() -> tuple[Any, Any]:
        raw = build("mlp")
        return fabric.setup(raw, optimizer_for("sgd", raw))

    first = set_up()
    _train(fabric, *first, range(2))
    pruned = set_up()
    _train(fabric, *pruned, range(2))
    fabric.backward(loss_of(pruned[0], *batch("mlp", 2, fabric.global_rank)), model=pruned[0])
    cycle: list[Any] = [*pruned]
    cycle.append(cycle)
    del pruned, cycle
    _collect_on(fabric, 0)
    # The first model's groups are those of the deleted one. The third model gets new ones.
    _train(fabric, *first, range(2, 5))
    third = set_up()
    _train(fabric, *third, range(2))
    _collect_on(fabric, 1)
    _train(fabric, *third, range(2, 5))
    fourth = set_up()
    _train(fabric, *fourth, range(5))
    assert_same(copies(third[0]), copies(first[0]), "weights")
    assert_same(copies(fourth[0]), copies(first[0]), "weights")
    assert_ranks_agree([copies(first[0])])


@distributed([2])
def test_a_model_deleted_after_a_step_that_raised_leaves_nothing_to_the_next() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    _train(fabric, model, optimizer, range(2))
    fabric.backward(loss_of(model, *batch("mlp", 2, fabric.global_rank)))
    with (
        mock.patch("torch.optim.sgd.sgd", side_effect=ArithmeticError),
        suppress(ArithmeticError),
    ):
        optimizer.step()
    del model, optimizer, raw
    gc.collect()
    assert not reusable_groups
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    _train(fabric, model, optimizer, range(2))


@distributed([2])
def test_everything_can_be_deleted() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    _train(fabric, model, optimizer, range(2))
    alive = [weakref.ref(one) for one in (raw, optimizer.optimizer, model._forward_module)]
    del model, optimizer, raw
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    fabric.backward(torch.ones(1, requires_grad=True).sum())


@distributed([2])
def test_a_copy_is_for_inference() -> None:
    fabric = new_fabric(dear())
    with poison_until_waited():
        raw = build("mlp")
        model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
        _train(fabric, model, optimizer, range(2))
        wrapped = model._forward_module
        assert isinstance(wrapped, DearModule)
        twin = copy.deepcopy(wrapped)
        assert twin.pipeline is None
        assert_same(copies(twin), copies(raw), "weights")
        _train(fabric, model, optimizer, range(2))
        assert_differ(copies(twin), copies(raw))


@distributed([2])
def test_whole_gradients_can_be_changed() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy
    with poison_until_waited():
        raw = build("mlp")
        model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=1.0))
        fabric.backward(loss_of(model, *batch("mlp", 0, fabric.global_rank)))
        before = copies(raw)
        norm = strategy.grad_norm()
        with strategy.whole_gradients():
            gradients = [p.grad.clone() for p in raw.parameters() if p.grad is not None]
            for parameter in raw.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
        optimizer.step()
        torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]).norm(), norm)
        changed = [w - 2 * g for w, g in zip(before, gradients, strict=True)]
        assert_same(copies(raw), changed, "weights")
    assert strategy.statistics.wire_bytes > 0


@distributed([2])
def test_compiling() -> None:
    fabric = new_fabric(dear())
    weights = []
    for compiles in (False, True):
        raw = build("mlp")
        if compiles:
            raw.compile(backend="eager")
        model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
        with poison_until_waited():
            _train(fabric, model, optimizer, range(3))
            weights.append(copies(raw))
    assert_same(*weights, "weights")
    raw = build("mlp")
    model, optimizer = fabric.setup(torch.compile(raw, backend="eager"), optimizer_for("sgd", raw))
    with pytest.raises(RuntimeError, match=r"call model\.compile\(\)"):
        _train(fabric, model, optimizer, range(1))


SCRIPT = """
import torch
from lightning.fabric import Fabric
import lightning_dear

def main(fabric):
    model = torch.nn.Linear(2000, 500)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        fabric.backward(model(torch.randn(4, 2000)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {{fabric.global_rank}} is done", flush=True)
    {ending}

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="{strategy}").launch(main)
"""
SPAWNING = ("dear_spawn", "dear_fork")
WRONG = re.compile(r"Traceback|Error|[Aa]bort|terminate|Warning|Exception|leak")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dear", *SPAWNING])
def test_a_program_may_end_right_after_a_step(strategy: str, tmp_path: Path) -> None:
    ending = "globals()['kept'] = model, optimizer"
    done = _run(SCRIPT.format(strategy=strategy, ending=ending), tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d is done", done.stdout)) == [
        f"rank {r} is done" for r in (0, 1)
    ]
    assert not WRONG.search(done.stderr), done.stderr


@pytest.mark.slow
def test_a_program_that_fails_ends(tmp_path: Path) -> None:
    ending = "raise ValueError('on purpose')"
    done = _run(SCRIPT.format(strategy="dear", ending=ending), tmp_path)
    assert done.returncode != 0
    assert "on purpose" in done.stderr
    assert not re.search(r"[Aa]borted|terminate", done.stderr), done.stderr


def _run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(source)
    command = [sys.executable, "-W", "error::UserWarning:lightning_dear", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env=environment,
    )
