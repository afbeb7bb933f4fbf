"""Rows: hooks of torch that look at `.grad`, registered at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.lightning.matrix.gradients import CLIP, GATHERED
from tests.lightning.matrix.nets import ManualNet, RowNet
from tests.lightning.matrix.rows import SEVERAL, Feature
from tests.lightning.matrix.seen import Seen

LATE_BATCH = 3
row = partial(Feature, section="Hooks of torch")


class _Hooked(RowNet):
    """Notes and clips every gradient in hooks of its own, each registered at another time."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.nodes: list[Any] = []
        self.hook_parameters(0)

    def on_fit_start(self) -> None:
        self.hook_parameters(1)

    def on_train_start(self) -> None:
        self.hook_parameters(2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == LATE_BATCH:
            self.hook_parameters(3)
        return super().training_step(batch, batch_idx)

    def hook_parameters(self, when: int) -> None:
        """Those whose number ends in `when`, by fours."""
        for number, parameter in enumerate(self.parameters()):
            if number % 4 == when:
                self.hook(number, parameter)

    def hook(self, number: int, parameter: Any) -> None:
        def clip(one: Tensor) -> None:
            self.note(f"accumulated {number}", [one.grad])
            one.grad.clamp_(-CLIP, CLIP)

        parameter.register_post_accumulate_grad_hook(clip)


class _HookedInAllWays(_Hooked):
    """Hooks of tensors, of several tensors, and of their `AccumulateGrad` nodes."""

    def hook(self, number: int, parameter: Any) -> None:
        def note(what: str, *gradients: Tensor) -> None:
            self.note(f"{what} {number}", [one for one in gradients if one is not None])

        def look(*_: Any) -> None:
            note("behind the node", parameter.grad)
            if number == 0:
                # Registered before the fit; DDP does not see what a later one changes.
                parameter.grad.clamp_(-CLIP, CLIP)

        parameter.register_hook(lambda gradient: gradient * 0.5)
        register_multi_grad_hook([parameter], lambda ones: note("several", *ones))
        self.nodes.append(get_gradient_edge(parameter).node)
        self.nodes[-1].register_prehook(lambda ones: note("before the node", *ones))
        self.nodes[-1].register_hook(look)


class _Clearing(RowNet):
    """Clears a gradient in its hook, on all ranks or on one, by turns."""

    def on_train_start(self) -> None:
        self.net.layers[2].weight.register_post_accumulate_grad_hook(self._clear)

    def _clear(self, parameter: Tensor) -> None:
        if self.global_rank == 0 or self.trainer.global_step % 2 == 0:
            parameter.grad = None


class _StepNotes:
    """Hooks of steps: what the weights in the optimizer's groups are."""

    def __init__(self, note: Callable[[str, Iterable[Tensor]], None]) -> None:
        self.note = note
        self.handles: list[Any] = []

    def look(self, name: str, change: Callable[[list[Any]], object] | None = None) -> Any:
        """A hook that notes, and then changes the parameters' gradients."""

        def hook(optimizer: Optimizer, *_: Any) -> None:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            self.note(f"weights {name}", [one.detach() for one in parameters])
            if change is not None:
                change(parameters)

        return hook

    def register(self, optimizer: Any, when: str) -> None:
        """In front of the optimizer's steps and behind them."""
        optimizer.register_step_pre_hook(self.look(f"before, {when}"))
        optimizer.register_step_post_hook(self.look(f"behind, {when}"))

    def register_common(self) -> None:
        """In front of all optimizers' steps and behind them, until `remove`."""
        before, behind = self.look("before all"), self.look("behind all")
        self.handles.append(register_optimizer_step_pre_hook(before))
        self.handles.append(register_optimizer_step_post_hook(behind))

    def remove(self) -> None:
        """Takes the common hooks away."""
        for handle in self.handles:
            handle.remove()


class _StepHooked(RowNet):
    """Automatic optimisation: pre-hooks come before the closure."""

    def configure_optimizers(self) -> Any:
        self.notes = _StepNotes(self.note)
        optimizer = super().configure_optimizers()
        self.notes.register(optimizer, "from the start")
        return optimizer

    def on_train_start(self) -> None:
        self.notes.register(self.optimizers(), "at the start of training")
        self.notes.register_common()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATE_BATCH:
            self.notes.register(self.optimizers(), "late")

    def on_train_end(self) -> None:
        self.notes.remove()


class _Scaling(_StepHooked):
    """Changes, while gradients accumulate, this rank's own sums."""

    def on_train_start(self) -> None:
        super().on_train_start()
        halve = self.notes.look("halved", lambda ones: [one.grad.mul_(0.5) for one in ones])
        self.optimizers().register_step_pre_hook(halve)


class _ClosureFirst(RowNet):
    """Calls the closure, clips, and lets the step's hook clip once more."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.note("between", [one.grad for one in self.parameters()])
        clip_grad_value_(self.parameters(), CLIP)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        notes = _StepNotes(self.note)
        optimizer = super().configure_optimizers()
        look = notes.look("before", lambda ones: clip_grad_norm_(ones, CLIP))
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(notes.look("behind"))
        return optimizer


class _Manual(ManualNet):
    """Sums of this rank in a blocked backward, then a step with hooks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx == 0:
            self.notes = _StepNotes(self.note)
            for number, parameter in enumerate(self.parameters()):
                look = partial(self._accumulated, number)
                parameter.register_post_accumulate_grad_hook(look)
        with self.trainer.strategy.block_backward_sync():
            self.backward_of(batch)
        self.backward_of(batch)
        if batch_idx == LATE_BATCH:
            self.notes.register(optimizer, "late")
        optimizer.step()

    def _accumulated(self, number: int, parameter: Any) -> None:
        self.note(f"accumulated {number}", [parameter.grad])
        parameter.grad.clamp_(-CLIP, CLIP)


class _ManualSteps(ManualNet):
    """Step hooks of one optimizer and of all that look and clip; one of rank 0 alone."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        optimizer.step()

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.optimizers().register_step_pre_hook(self._look)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATE_BATCH:
            self.optimizers().register_step_pre_hook(self._clip)
            self.common = register_optimizer_step_pre_hook(self._look)

    def on_train_end(self) -> None:
        self.common.remove()

    def _look(self, *_: Any) -> None:
        self.note("gradients", [one.grad for one in self.parameters()])

    def _clip(self, *_: Any) -> None:
        clip_grad_norm_(self.parameters(), CLIP)


def _clipped(seen: Seen) -> None:
    hooked = [entries for name, entries in seen.series.items() if name.startswith("accumulated")]
    assert len(hooked) == 6
    assert any(one.abs().max() > CLIP for entries in hooked for (one,) in entries)


FEATURES = (
    row(
        name="register_post_accumulate_grad_hook that clips, at any time",
        net=_Hooked,
        check=_clipped,
        remark="`.grad` of other parameters may be None",
    ),
    row(
        name="register_post_accumulate_grad_hook while accumulating",
        net=_Hooked,
        trainer={"accumulate_grad_batches": 2},
        num_steps=3,
    ),
    row(
        name="register_hook, register_multi_grad_hook and hooks of AccumulateGrad, at any time",
        net=_HookedInAllWays,
        remark="what a hook of AccumulateGrad changes counts; DDP may overwrite it",
    ),
    row(
        name="register_post_accumulate_grad_hook that clears .grad",
        net=_Clearing,
        world_sizes=SEVERAL,
    ),
    row(
        name="hooks before and after the optimizer's step, of one or of all, at any time",
        net=_StepHooked,
        remark="before the closure and behind the step `.grad` is None, with a warning",
    ),
    row(
        name="a step's pre-hook that changes gradients while accumulating",
        net=_Scaling,
        trainer={"accumulate_grad_batches": 2},
        num_steps=3,
        remark="it finds this rank's own sums, as under DDP",
    ),
    row(
        name="optimizer_step that calls the closure first, and clips in between and in a pre-hook",
        net=_ClosureFirst,
        remark=GATHERED,
    ),
    row(
        name="a step's pre-hooks that read and clip gradients in manual optimisation",
        net=_ManualSteps,
        remark=GATHERED,
    ),
    row(
        name="hooks of gradients that clip, and of steps, in manual optimisation",
        net=_Manual,
        check=_clipped,
    ),
)
