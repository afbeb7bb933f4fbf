"""Folders of local steps: as many ranks go on bit for bit, and any others from the anchor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import environments
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lightning_dear.checkpoint import storage
from lightning_dear.checkpoint.files import CHECKPOINT_KEY, LOCAL_KEY
from lightning_dear.checkpoint.folder import convert, load
from lightning_dear.compression import RandomK
from lightning_dear.local_steps import LocalSteps
from lightning_dear.strategy import local
from tests.checkpoint.test_distributed_checkpoint import assert_equal
from tests.distributed.calls import Died
from tests.distributed.harness import distributed, observe_ranks, run_ranks
from tests.lightning.fitting import ddp, dear
from tests.lightning.test_local_steps import NESTEROV, Module, batch_of, fit, weights

NUM_STEPS = 16


class ByIndex(Module):
    """Takes its batches by index, since Lightning serves an epoch's first ones after resuming."""

    width = 24

    def __init__(self, *, norm: bool = False, two: bool = False) -> None:
        super().__init__(norm=norm)
        self.automatic_optimization = not two
        torch.manual_seed(2)
        # Wide enough for tensors that ranks write themselves, and narrow ones beside them.
        self.net = nn.Sequential(
            nn.Linear(9, self.width),
            nn.BatchNorm1d(self.width) if norm else nn.Tanh(),
            nn.Linear(self.width, self.width),
            nn.Linear(self.width, 40),
            nn.Linear(40, 40),
            nn.Linear(40, 9),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch_of(dist.get_rank(), batch_idx).to(next(self.parameters()).dtype)
        loss: Tensor = self.net(batch).float().square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for number, optimizer in enumerate(self.optimizers()):
                if number == 0 or batch_idx % 2:
                    optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return super().configure_optimizers()
        halves = self.net[:3], self.net[3:]
        return [AdamW(one.parameters(), lr=0.01 * n) for n, one in enumerate(halves, 1)]

    def validation_step(self, batch: Tensor, _: int) -> None:
        return None


def steps(**options: Any) -> LocalSteps:
    return LocalSteps(**{"every": 8, "mix": 0.5, "outer": NESTEROV, "fragments": 2, **options})


def folders(how: LocalSteps | None, **options: Any) -> Any:
    return dear(**{"local_steps": how, "save_distributed_checkpoint": True, **options})


class Options(dict[str, Any]):
    """Options of a fit: of the strategy, the module, and the trainer."""

    def strategy(self) -> Any:
        return folders(self["steps"], **self.get("strategy", {}))

    def trainer(self) -> dict[str, Any]:
        made = {name: make() for name, make in self.get("made", {}).items()}
        return {**self.get("trainer", {}), **made}


def train(path: Path, how: Options, num_batches: int = NUM_STEPS) -> dict[str, Tensor]:
    """Trains to the end, and saves a folder after each step."""
    module = ByIndex(**how.get("module", {}))
    saver = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(how.strategy(), module, num_batches, saver, enable_checkpointing=True, **how.trainer())
    dist.barrier()
    return weights(module)


def go_on(
    path: Path, step: int, how: Options, *callbacks: Callback, num_batches: int = NUM_STEPS
) -> dict[str, Tensor]:
    module = ByIndex(**how.get("module", {}))
    path = path / f"step={step}.ckpt"
    fit(how.strategy(), module, num_batches, *callbacks, ckpt_path=str(path), **how.trainer())
    return weights(module)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: object = "") -> None:
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), (what, name)


def check(path: Path, how: Options, *numbers: int) -> None:
    end = train(path, how)
    for step in numbers:
        assert_same(go_on(path, step, how), end, f"step {step}")


EACH = [*range(1, 16)]


@pytest.mark.parametrize(
    ("fragments", "delay", "numbers"),
    [(2, 0, [3, 4]), (2, 3, [2, 9]), (2, 6, [3, 9]), (4, 0, [4, 5]), (4, 3, [1, 10]), (4, 6, EACH)],
)
@distributed(world_sizes=(2,))
def test_a_folder_goes_on_bit_for_bit(
    tmp_path: Path, fragments: int, delay: int, numbers: list[int]
) -> None:
    how = Options(steps=steps(fragments=fragments, delay=delay))
    check(tmp_path, how, *numbers)
    if numbers is EACH:
        unsaved = ByIndex()
        fit(dear(local_steps=how["steps"]), unsaved, NUM_STEPS)
        assert_same(weights(unsaved), go_on(tmp_path, 15, how), "a run that saves nothing")


def scaled() -> Any:
    """Ranks have other loss scales, which overflow after other steps."""
    scale = 2.0 ** (20 if dist.get_rank() == 0 else 12)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return [environments.TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)]


VARIANTS = {
    "int8": Options(steps=steps(delay=6), strategy={"compressor": "int8"}),
    "randomk": Options(
        steps=steps(delay=6), strategy={"compressor": RandomK(density=0.5, halves="reduce")}
    ),
    "BatchNorm": Options(steps=steps(delay=3), module={"norm": True}),
    "own buffers": Options(
        steps=steps(delay=3), module={"norm": True}, strategy={"broadcast_buffers": False}
    ),
    "bf16": Options(steps=steps(delay=3), trainer={"precision": "bf16-true"}),
    "accumulation": Options(steps=steps(delay=1, every=4), trainer={"accumulate_grad_batches": 2}),
    "dense steps": Options(steps=steps(delay=3, dense_steps=5)),
    "two optimizers": Options(steps=steps(delay=3, every=4), module={"two": True}),
    "scaler": Options(steps=steps(delay=3, every=4), made={"plugins": scaled}),
}


@pytest.mark.parametrize("name", VARIANTS)
@distributed(world_sizes=(2,))
def test_so_does_one_with(tmp_path: Path, name: str) -> None:
    check(tmp_path, VARIANTS[name], 4, 7)


@pytest.mark.parametrize("name", ["int8", "BatchNorm"])
@distributed(world_sizes=(3,))
def test_three_ranks_do(tmp_path: Path, name: str) -> None:
    check(tmp_path, VARIANTS[name], 7, 9)


class SavesFirst(Callback):
    """Saves a folder before the first step of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


class Saves(Callback):
    """Saves a folder after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Look(Callback):
    """What a rank has before the first step: weights, counts, and rates of outer optimizers."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.counts: list[int] = []
        self.rates: list[float] = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        self.first = weights(module)
        self.counts = [part.count for part in strategy._outer._parts]
        outer = [one.stepper.optimizer for one in strategy._outer.fragments]
        self.rates = [one.param_groups[0]["lr"] for one in outer]


@distributed(world_sizes=(2,))
def test_what_is_saved_again_is_the_same(tmp_path: Path) -> None:
    how = VARIANTS["int8"]
    train(tmp_path, how)
    again = tmp_path / "again"
    first, last = SavesFirst(again / "step=7.ckpt"), Saves(again / "step=15.ckpt", 15)
    go_on(tmp_path, 7, how, first, last)
    dist.barrier()
    for step in (7, 15):
        name, reader = f"step={step}.ckpt", (dist.get_rank(), 2)
        saved = [load(path / name, reader=reader) for path in (tmp_path, again)]
        for key in ("state_dict", "optimizer_states", CHECKPOINT_KEY):
            assert_equal(saved[1][key], saved[0][key])


@pytest.mark.parametrize(("delay", "compressor"), [(6, "none"), (0, "int8")])
@distributed(world_sizes=(2,))
def test_an_outer_optimizer_without_state_goes_on(
    tmp_path: Path, delay: int, compressor: str
) -> None:
    how = steps(delay=delay, outer=partial(SGD, lr=0.7))
    check(tmp_path, Options(steps=how, strategy={"compressor": compressor}), 7)


@distributed(world_sizes=(2,))
def test_an_outer_optimizer_goes_on_before_its_first_step(tmp_path: Path) -> None:
    """Its state then has masters alone, of which Adam knows nothing."""
    how = Options(steps=steps(outer=KINDS["adam"]), strategy={"compressor": "int8"})
    check(tmp_path, how, 1)


KINDS = {"sgd": NESTEROV, "plain": partial(SGD, lr=1.0), "adam": partial(Adam, lr=0.01)}


@pytest.mark.parametrize(("saved", "other"), [("sgd", "adam"), ("adam", "sgd")])
@pytest.mark.parametrize("is_folder", [True, False])
@distributed(world_sizes=(2,))
def test_another_outer_optimizer_is_refused(
    tmp_path: Path, saved: str, other: str, is_folder: bool
) -> None:
    how = Options(strategy={"save_distributed_checkpoint": is_folder})
    train(tmp_path, Options(how, steps=steps(outer=KINDS[saved])), 8)
    name = {"sgd": "SGD", "adam": "Adam"}[saved]
    with pytest.raises(ValueError, match=f"the state of {name}, the outer optimizer, .*Train with"):
        go_on(tmp_path, 8, Options(how, steps=steps(outer=KINDS[other])))


@distributed(world_sizes=(2,))
def test_an_outer_optimizer_of_the_same_class_may_have_momentum_later(tmp_path: Path) -> None:
    train(tmp_path, Options(steps=steps(outer=KINDS["plain"])), 8)
    end = go_on(tmp_path, 8, Options(steps=steps(outer=KINDS["sgd"])))
    assert all(bool(one.isfinite().all()) for one in end.values())


@distributed(world_sizes=(2,))
def test_options_of_the_outer_optimizer_are_those_of_the_fit(tmp_path: Path) -> None:
    how, look = Options(steps=steps(delay=3)), Look()
    train(tmp_path, how, 7)
    other = partial(SGD, lr=0.25, momentum=0.5, nesterov=True)
    end = go_on(tmp_path, 7, Options(steps=steps(delay=3, outer=other)), look)
    assert set(look.rates) == {0.25}
    assert look.counts == [7]
    assert any(not torch.equal(one, end[name]) for name, one in go_on(tmp_path, 7, how).items())


class Spoils(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 5 and dist.get_rank() == 1:
            with torch.no_grad():
                module.net[0].weight.fill_(float("nan"))


@distributed(world_sizes=(2,))
def test_an_exchange_that_is_left_out_stays_so(tmp_path: Path) -> None:
    how = Options(steps=steps(delay=6))
    module = ByIndex()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(how.strategy(), module, NUM_STEPS, Spoils(), saver, enable_checkpointing=True)
    dist.barrier()
    saved = load(tmp_path / "step=7.ckpt", reader=(0, 2))[CHECKPOINT_KEY][LOCAL_KEY]
    assert [one["bad"] for one in saved["fragments"]] == [2, 0]
    assert_same(go_on(tmp_path, 7, how), weights(module))


@distributed(world_sizes=(2,))
def test_masters_are_saved_before_the_first_step(tmp_path: Path) -> None:
    how = VARIANTS["bf16"]
    end = train(tmp_path, how)
    again = tmp_path / "again"
    assert_same(go_on(tmp_path, 7, how, SavesFirst(again / "step=7.ckpt")), end)
    dist.barrier()
    assert_same(go_on(again, 7, how), end)


class Kills(Saves):
    """Ends the process when the folder is there."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module)
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


KILLED = Options(steps=steps(delay=3), strategy={"compressor": "int8"})


def _killed(path: Path, step: int) -> None:
    fit(KILLED.strategy(), ByIndex(), NUM_STEPS, Kills(path / f"step={step}.ckpt", step))


def _in_one_go() -> dict[str, Tensor]:
    module = ByIndex()
    fit(KILLED.strategy(), module, NUM_STEPS)
    return weights(module)


def _resumed(path: Path, step: int) -> dict[str, Tensor]:
    return go_on(path, step, KILLED)


@pytest.mark.parametrize("step", [8, 14])
def test_killed_processes_go_on_bit_for_bit(tmp_path: Path, step: int) -> None:
    """After step 8 nothing is under way; what was sent after step 13 is merged after step 16."""
    assert all(isinstance(one, Died) for one in observe_ranks(_killed, 2, tmp_path, step))
    ends = zip(run_ranks(_resumed, 2, tmp_path, step), run_ranks(_in_one_go, 2), strict=True)
    for rank, (ours, theirs) in enumerate(ends):
        assert_same(ours, theirs, f"rank {rank}")


# --- without local state ----------------------------------------------------------------------

PLAIN = Options(steps=steps(delay=3), module={"norm": True})


def said_in(run: Any) -> list[str]:
    seen: list[str] = []
    with patch.object(local, "rank_zero_info", seen.append):
        run()
    return [one for one in seen if "bit for bit" in one or "MiB" in one]


def new_head(_: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.5.bias"].zero_()


def goes_on_from_the_anchor(
    path: Path, how: Options, why: str | None, load: Callable[[Path], Any] = load
) -> None:
    look, anchor = Look(), load(path / "step=7.ckpt")["state_dict"]
    said = said_in(lambda: go_on(path, 7, how, look))
    assert_same(look.first, anchor)
    assert [one for one in said if "bit for bit" in one and str(why) in one] == said
    assert len(said) == (why is not None)
    assert set(look.counts) == ({0} if why else set())


def _train_plain(path: Path) -> None:
    said = said_in(lambda: train(path, PLAIN))
    assert len(said) == 1
    assert "of 2 ranks" in said[0]
    without = Options(PLAIN, steps=steps(delay=3, local_state=False))
    said = said_in(lambda: train(path / "without", without, 7))
    assert not said
    goes_on_from_the_anchor(path / "without", PLAIN, "no local state")
    files = Options(PLAIN, strategy={"save_distributed_checkpoint": False})
    train(path / "file", files, 8)
    folder = load(path / "step=7.ckpt")
    file = torch.load(path / "file" / "step=7.ckpt", weights_only=True)
    for key in ("state_dict", "optimizer_states", CHECKPOINT_KEY):
        assert_equal(folder[key], file[key])
    goes_on_from_the_anchor(path / "file", PLAIN, "no local state", load=torch.load)
    goes_on_from_the_anchor(path, Options(PLAIN, steps=steps(delay=2)), "other fragments")
    with patch.object(ByIndex, "on_load_checkpoint", new_head):
        said = said_in(lambda: go_on(path, 7, PLAIN))
    assert sum("other fragments" in one for one in said) == 1
    goes_on_from_the_anchor(path, Options(PLAIN, steps=None), None)


def _go_on_elsewhere(path: Path, why: str | None) -> None:
    goes_on_from_the_anchor(path, PLAIN, why)


def _ddp(path: Path) -> None:
    """DDP and dear without local steps are the same, from the same weights and inner state."""
    ours, theirs = ByIndex(norm=True), ByIndex(norm=True)
    fit(ddp(), theirs, NUM_STEPS, ckpt_path=str(path / "file.ckpt"))
    fit(dear(), ours, NUM_STEPS, ckpt_path=str(path / "step=7.ckpt"))
    for name, value in weights(theirs).items():
        assert torch.allclose(weights(ours)[name], value, atol=1e-6), name


def names_read(path: Path, reader: tuple[int, int] | None) -> tuple[list[str], list[str]]:
    """Names of the tensors that are read from a folder: of single ranks, and others."""
    seen: list[str] = []
    read = storage.read_tensors

    def spy(folder: Path, stand_ins: Any, *rest: Any) -> Any:
        seen.extend(stand_ins)
        return read(folder, stand_ins, *rest)

    with patch.object(storage, "read_tensors", spy):
        load(path, reader=reader)
    is_own = f"{CHECKPOINT_KEY}.{LOCAL_KEY}.ranks."
    return [one for one in seen if one.startswith(is_own)], [
        one for one in seen if not one.startswith(is_own)
    ]


def test_others_go_on_from_the_anchor(tmp_path: Path) -> None:
    run_ranks(_train_plain, 2, tmp_path)
    run_ranks(_go_on_elsewhere, 3, tmp_path, "as many ranks")
    run_ranks(_go_on_elsewhere, 1, tmp_path, None)
    ours, others = names_read(tmp_path / "step=7.ckpt", (1, 2))
    assert {name.split(".")[3] for name in ours} == {"1"}
    assert len(others) > 4
    assert not any(names_read(tmp_path / "step=7.ckpt", reader)[0] for reader in (None, (1, 3)))
    convert(tmp_path / "step=7.ckpt", tmp_path / "file.ckpt")
    file = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert LOCAL_KEY not in file[CHECKPOINT_KEY]
    run_ranks(_ddp, 2, tmp_path)
