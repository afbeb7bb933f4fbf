"""Local steps with what users do besides: accumulation, masters, several optimizers, groups."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW

from lightning_dear import DearStrategy
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.local_steps import LocalSteps, outer_half
from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import dear, new_trainer
from tests.lightning.test_local_steps import (
    NESTEROV,
    Module,
    assert_same,
    batch_of,
    fit,
    loader,
    new_net,
    reference_of,
    same_on_all_ranks,
    steps,
    weights,
)
from tests.local_steps.reference import Law, Reference


@distributed(world_sizes=(2,))
def test_accumulated_batches_are_one_step() -> None:
    module = Module()
    fit(dear(local_steps=steps()), module, 22, accumulate_grad_batches=2)
    law = Law(4, [["0", "1"], ["2", "3"]], 1, 0.5, NESTEROV)
    reference = Reference(new_net(), partial(AdamW, lr=0.01), dist.get_world_size(), law)

    def step(model: Any, inner: Any, rank: int, number: int) -> None:
        for index in (2 * number - 2, 2 * number - 1):
            (model(batch_of(rank, index)).square().mean() / 2).backward()
        inner.step()
        inner.zero_grad()

    reference.run(11, step)
    reference.flush()
    assert_same(weights(module), reference.anchor)


@distributed(world_sizes=(2, 3))
def test_clipping_is_by_each_ranks_own_norm() -> None:
    module = Module()
    fit(dear(local_steps=steps()), module, 9, gradient_clip_val=0.05)
    law = Law(4, [["0", "1"], ["2", "3"]], 1, 0.5, NESTEROV)
    reference = Reference(new_net(), partial(AdamW, lr=0.01), dist.get_world_size(), law)

    def step(model: Any, inner: Any, rank: int, number: int) -> None:
        model(batch_of(rank, number - 1)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        inner.step()
        inner.zero_grad()

    reference.run(9, step)
    reference.flush()
    for name, value in reference.anchor.items():
        assert torch.allclose(weights(module)[f"net.{name}"], value, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(2,))
def test_16_bit_parameters_train_by_masters() -> None:
    class Narrow(Module):
        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch.bfloat16()).square().mean()

        def validation_step(self, batch: Tensor, _: int) -> None:
            self.losses.append(self.net(batch.bfloat16()).square().mean())

    module = Narrow()
    trainer = fit(dear(local_steps=steps()), module, 11, precision="bf16-true")
    del trainer
    assert same_on_all_ranks(weights(module))
    assert all(one.dtype == torch.bfloat16 for one in module.parameters())
    assert float(module.losses[-1]) < float(new_net()(batch_of(0, 1)).square().mean())


class Two(Module):
    """Two optimizers, each of one half, stepped in turn."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        self.manual_backward(self.net(batch).square().mean())
        optimizer.step()
        for one in self.optimizers():
            one.zero_grad()

    def configure_optimizers(self) -> Any:
        halves = [*self.net[:2].parameters()], [*self.net[2:].parameters()]
        return [AdamW(half, lr=0.01) for half in halves]


@pytest.mark.parametrize("fragments", [None, 2, [["net.0"], ["net.1", "net.2", "net.3"]]], ids=str)
@distributed(world_sizes=(2, 3))
def test_several_optimizers_count_apart(fragments: Any) -> None:
    module = Two()
    fit(dear(local_steps=steps(fragments=fragments)), module, 19)
    assert same_on_all_ranks(weights(module))
    assert not torch.equal(weights(module)["net.0.weight"], new_net()[0].weight)


@distributed(world_sizes=(1, 2))
def test_dense_steps_come_first() -> None:
    """They are dear's, bit by bit, and optimizer state goes on."""

    class Look(Callback):
        def __init__(self) -> None:
            self.same: list[bool] = []
            self.state: Any = None

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            trainer.strategy.complete_parameters()
            self.same.append(same_on_all_ranks(weights(module)))
            if trainer.global_step == 6:
                (optimizer,) = trainer.optimizers
                state = trainer.strategy.optimizer_state(optimizer, on_all_ranks=True)
                self.state = [one["exp_avg"].clone() for one in state["state"].values()]

    ours, theirs, look, other = Module(), Module(), Look(), Look()
    fit(dear(local_steps=steps(dense_steps=6)), ours, 6, look)
    fit(dear(), theirs, 6, other)
    assert_same({f"net.{n}": v for n, v in weights(ours.net).items()}, weights(theirs.net))
    assert all(map(torch.equal, look.state, other.state))
    again, look = Module(), Look()
    fit(dear(local_steps=steps(dense_steps=6)), again, 13, look)
    one_rank = dist.get_world_size() == 1
    assert look.same == [*[True] * 6, *[one_rank] * 6, True]
    assert same_on_all_ranks(weights(again))


@distributed(world_sizes=(2,))
def test_optimizer_state_goes_over() -> None:
    counts: list[int] = []

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            state = trainer.strategy.optimizer_state(optimizer, on_all_ranks=True)["state"]
            counts.append(int(state[0]["step"]))

    fit(dear(local_steps=steps(dense_steps=3)), Module(), 6, Counts())
    assert counts == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("every", "delay"), [(2, None), (4, 3), (14, 7)])
@distributed(world_sizes=(2, 3))
def test_parameters_that_come_later_are_exchanged(every: int, delay: int | None) -> None:
    """With several fragments under way, those that were sent before are merged early.

    In a round of 14 steps nothing is merged before the end, and validation follows it.
    """

    class Grows(Module):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 5:
                self.trainer.optimizers[0].add_param_group({"params": self.net[3].parameters()})

        def configure_optimizers(self) -> Any:
            self.net[3].requires_grad_(True)
            return AdamW(self.net[:3].parameters(), lr=0.01)

    module = Grows()
    fit(dear(local_steps=LocalSteps(every=every, fragments=2, delay=delay)), module, 13)
    assert same_on_all_ranks(module.seen[0])
    assert same_on_all_ranks(weights(module))
    assert not torch.equal(weights(module)["net.3.weight"], new_net()[3].weight)


@distributed(world_sizes=(2, 3))
def test_what_a_compressor_has_left_out_is_kept_when_parameters_change() -> None:
    def by_name(rounds: Any) -> dict[Any, Tensor]:
        names = {p: n for one in rounds.fragments for n, p in _shadows(one)}
        taken = [one.residuals.taken().kept for one in rounds.fragments]
        kinds = [(kind, own) for kept in taken for kind, own in kept.items()]
        return {(kind, names[p]): value for kind, own in kinds for p, value in own.items()}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, out: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                (rounds,) = trainer.strategy._outer._parts
                rounds.settle()
                before = by_name(rounds)
                exact = dict(_exact(rounds))
                group = {"params": module.net[3].parameters()}
                trainer.optimizers[0].add_param_group(group)
                rounds._follow()
                after = by_name(rounds)
                assert len(rounds.fragments) == 2
                assert len(before) == 6
                assert sum(float(one.norm()) for one in before.values()) > 0
                for name, value in before.items():
                    assert torch.equal(after[name], value), name
                for name, own in _exact(rounds):
                    assert name not in exact or torch.equal(exact[name], own), name

    class Grows(Module):
        def configure_optimizers(self) -> Any:
            return AdamW(self.net[:3].parameters(), lr=0.01)

    module, how = Grows(), LocalSteps(every=2, fragments=2)
    fit(dear(local_steps=how, compressor="int8"), module, 9, Look())
    assert same_on_all_ranks(weights(module))


def _exact(rounds: Any) -> Any:
    """Pairs (name, owners' values) of the anchor, which may be ahead of the replicas of it."""
    for fragment in rounds.fragments:
        for bucket in fragment._buffers.buckets:
            flat = torch.empty_like(bucket.parameters)
            shards = [torch.empty_like(bucket.shard) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, bucket.shard)
            torch.cat(shards, out=flat)
            for part in bucket.spec.slices:
                values = flat[part.offset : part.offset + part.numel]
                yield (fragment.names[part.tensor], part.start), values


def _shadows(fragment: Any) -> Any:
    return zip(fragment.names, fragment.stepper.shards.parameters, strict=True)


@distributed(world_sizes=(2,))
def test_whole_tensor_optimizers_train_inside_and_forget_nan() -> None:
    """Their state is whole on each rank, and is emptied where a rank's weights are not finite."""

    class Whole(Module):
        def configure_optimizers(self) -> Any:
            return Adafactor(self.net.parameters(), lr=0.01)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 6 and dist.get_rank() == 1:
                with torch.no_grad():
                    self.net[1].weight.fill_(float("nan"))
            if self.global_step >= 9:
                assert all(bool(one.isfinite().all()) for one in self.parameters())

    module = Whole()
    fit(dear(local_steps=steps()), module, 16)
    assert same_on_all_ranks(weights(module))
    assert not torch.equal(weights(module)["net.0.weight"], new_net()[0].weight)


class Shared(Module):
    """Another process would read its memory as it was before the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.net.share_memory()
        self.memory = {name: one.detach() for name, one in self.net.named_parameters()}
        self.num_compared = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.compare()

    def on_validation_start(self) -> None:
        self.compare()

    def compare(self) -> None:
        for name, one in self.net.named_parameters():
            assert torch.equal(self.memory[name], one)
        self.num_compared += 1


@pytest.mark.parametrize("delay", [0, 1])
@distributed(world_sizes=(2,))
def test_shared_memory_has_what_the_module_has(delay: int) -> None:
    module = Shared()
    fit(dear(local_steps=steps(delay=delay)), module, 9, val_check_interval=3)
    module.compare()
    assert module.num_compared == 9 + 3 + 1


class Apart(Module):
    """A parameter that no optimizer of the training holds, and a frozen one."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.scale, self.follows = torch.nn.Parameter(torch.ones(9)), follows
        self.teacher = torch.nn.Linear(9, 9).requires_grad_(False)
        self.said: list[str] = []
        self.num_said: list[int] = []

    def hear(self, said: object, *_: Any, **__: Any) -> None:
        if "no optimizer of the training" in str(said):
            self.said.append(str(said))

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_said.append(len(self.said))
        if self.follows:
            with torch.no_grad():
                self.scale.lerp_(self.net[0].bias, 0.5)


@pytest.mark.parametrize(
    ("follows", "every", "num_said"),
    [(True, 4, [0, 1, 1, 1, 1]), (True, 8, [0, 0, 1]), (False, 4, [0] * 9)],
    ids=str,
)
@distributed(world_sizes=(2, 3))
def test_parameters_that_are_not_exchanged_are_named(
    follows: bool, every: int, num_said: list[int]
) -> None:
    """After the first merge, half a round from the start, or at the end if there was none."""
    module = Apart(follows)
    module.teacher.load_state_dict(new_net()[1].state_dict())
    with mock.patch.object(outer_half.warnings, "warn", module.hear):
        fit(dear(local_steps=steps(every=every)), module, len(num_said))
    assert module.num_said == num_said
    assert len(module.said) == follows
    assert all("different values of 'scale' (1 such parameters)" in one for one in module.said)


@distributed(world_sizes=(2,))
def test_an_outer_optimizer_of_whole_tensors_is_refused() -> None:
    strategy = dear(local_steps=steps(outer=partial(Adafactor, lr=0.1)))
    with pytest.raises(ValueError, match="made Adafactor, which is not element-wise"):
        fit(strategy, Module(), 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fragments": 8}, "more than the 4 modules"),
        ({"fragments": [["net.0"]]}, "is in no fragments"),
        ({"outer": partial(Adafactor, lr=0.1)}, "not element-wise"),
    ],
)
@distributed(world_sizes=(2,))
def test_refusals_do_not_wait_for_the_end_of_dense_steps(
    options: dict[str, Any], said: str
) -> None:
    class Untouched(Module):
        def training_step(self, *_: Any) -> Tensor:
            raise AssertionError("training began")

    strategy = dear(local_steps=LocalSteps(every=8, dense_steps=3, **options))
    with pytest.raises(ValueError, match=said):
        fit(strategy, Untouched(), 4)


@distributed(world_sizes=(2,))
def test_ranks_with_other_options_are_refused() -> None:
    strategy = dear(local_steps=LocalSteps(every=4 + 4 * dist.get_rank()))
    with pytest.raises(ValueError, match="different local steps"):
        fit(strategy, Module(), 4)


@distributed(world_sizes=(2,))
def test_other_learning_rates_are_named() -> None:
    class Differs(Module):
        def configure_optimizers(self) -> Any:
            return SGD(self.net.parameters(), lr=0.01)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 + 0.01 * dist.get_rank()

    with pytest.raises(ValueError, match="lr is 0.01 on rank 0 and 0.02 on rank 1"):
        fit(dear(local_steps=LocalSteps(every=2)), Differs(), 4)


def _stopped(folder: Path) -> tuple[object, int, dict[str, Tensor]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Kills(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    module, saver = Module(), OnExceptionCheckpoint(folder)
    trainer = new_trainer(
        dear(local_steps=steps()), Kills(), saver, enable_checkpointing=True, max_epochs=1
    )
    try:
        trainer.fit(module, loader(12), loader(2))
    except SystemExit as end:
        return end.code, trainer.global_step, weights(module)
    return "nothing", trainer.global_step, weights(module)


def test_a_stop_request_acts_at_the_merge_that_carried_it(tmp_path: Path) -> None:
    seen = run_ranks(_stopped, 2, tmp_path, init_process_group=False)
    # Sent with the fragment after step 5, which is merged after step 6.
    assert [(code, number) for code, number, _ in seen] == [(None, 6)] * 2
    assert all(torch.equal(seen[0][2][name], seen[1][2][name]) for name in seen[0][2])
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert all(torch.equal(saved["state_dict"][n], v) for n, v in seen[0][2].items())


def _failing(rank: int, at: int) -> tuple[str, dict[str, Tensor]]:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == at and trainer.global_rank == rank:
                raise KeyError("spoilt batch")

    module = Module()
    try:
        # The rank that has failed keeps its connections open here, unlike one that has ended.
        strategy = DearStrategy(local_steps=steps(), timeout=timedelta(seconds=4))
        fit(strategy, module, 12, Fails())
    except BaseException as error:
        return f"{type(error).__name__}: {error}", weights(module)
    return "nothing", weights(module)


def _anchors(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    return [reference_of(number).anchor for number in numbers]


@pytest.mark.parametrize("at", [3, 4])
def test_after_a_failure_weights_are_the_last_merged_anchor(at: int) -> None:
    """Without a message, since other ranks may be gone. One rank may have merged once more."""
    (said, after), (own, other) = run_ranks(_failing, 2, 1, at, init_process_group=False)
    assert "spoilt batch" in own
    assert said != "nothing"
    (anchors, _) = run_ranks(_anchors, 2, [2, 4, 6])
    for values in (after, other):
        assert any(
            all(torch.equal(values[f"net.{name}"], one) for name, one in anchor.items())
            for anchor in anchors
        )


class _Reports(Callback):
    def __init__(self) -> None:
        self.is_on: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.is_on.append(trainer.strategy._outer.is_on)


@distributed(world_sizes=(2,))
def test_auto_finds_a_round_where_steps_wait(tmp_path: Path) -> None:
    """And goes on with it from a checkpoint, without measuring again."""

    def late(*args: Any) -> Work:
        return launch(*args).then(partial(sleep, 0.05))

    launch, seen = PairwiseCollectives.launch_max, _Reports()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=20)
    strategy = dear(local_steps="auto")
    with mock.patch.object(PairwiseCollectives, "launch_max", late):
        fit(strategy, Module(), 20, seen, saver, enable_checkpointing=True)
    assert seen.is_on == [*[False] * 8, *[True] * 12]
    found = strategy._local.steps
    assert found.every >= 4
    dist.barrier()
    path = str(next(tmp_path.glob("*.ckpt")))
    again, seen = dear(local_steps="auto"), _Reports()
    fit(again, Module(), 20, seen, ckpt_path=path, max_epochs=2)
    assert again._local.steps == found
    assert seen.is_on == [True] * 20


def _end_early() -> tuple[str, float]:
    begin_s = perf_counter()
    number = 12 if dist.get_rank() == 0 else 9
    try:
        fit(dear(local_steps=LocalSteps(every=4, fragments=2, delay=0)), Module(), number)
    except Exception as error:
        return str(error), perf_counter() - begin_s
    return "", 0.0


def test_a_rank_that_ends_early_is_named() -> None:
    """Before the timeout, which is 40 s."""
    ends = run_ranks(_end_early, 2)
    assert any("different numbers of local steps" in said for said, _ in ends), ends
    assert all(said and seconds < 30 for said, seconds in ends), ends
