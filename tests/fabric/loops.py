"""Training loops as users of Fabric write them; each runs under any strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fabric.running import NUM_STEPS, Run
from tests.training.models import UnevenMLP, build, loss_of, optimizer_for

CLIP = 0.05
OVERFLOW_STEP = 2


def _set_up(run: Run, model: str) -> tuple[nn.Module, Any, Any]:
    raw = build(model)
    return raw, *run.fabric.setup(raw, optimizer_for(run.optimizer, raw))


def _train(run: Run, name: str) -> Iterator[tuple[int, Any, Any]]:
    """Forward and backward; whoever iterates does the rest before the step."""
    raw, model, optimizer = _set_up(run, name)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *run.data(name, step))
        run.fabric.backward(loss)
        run.note("losses", loss)
        yield step, model, optimizer
        optimizer.step()
        run.see(raw)
    run.end(raw)


def mlp(run: Run) -> None:
    """The plainest loop."""
    list(_train(run, "mlp"))


def conv(run: Run) -> None:
    """With buffers."""
    list(_train(run, "conv"))


def writes_buffers(run: Run) -> None:
    """Writes buffers between steps, other values on each rank."""
    for _, model, _ in _train(run, "conv"):
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.5 + 0.1 * run.fabric.global_rank)


def uses_state(run: Run) -> None:
    """Resets the optimizer's state in between, and scales the rest of it where it may be read."""
    strategy = run.fabric.strategy
    on_shards = getattr(strategy, "on_shards", lambda _: nullcontext())
    for step, _, optimizer in _train(run, "mlp"):
        if step == 2:
            optimizer.state.clear()
        if step == 3:
            optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)
        if step > 3:
            with on_shards(optimizer):
                for own in list(optimizer.state.values()):
                    for key in own.keys() & {"exp_avg", "momentum_buffer"}:
                        own[key].mul_(0.5)


def gpt(run: Run) -> None:
    """With a shared weight."""
    list(_train(run, "gpt"))


def clips_norm(run: Run) -> None:
    """Clips by the 2-norm."""
    for _, model, optimizer in _train(run, "mlp"):
        run.note("norms", run.fabric.clip_gradients(model, optimizer, max_norm=CLIP))


def clips_largest(run: Run) -> None:
    """Clips by the largest element."""
    for _, model, optimizer in _train(run, "mlp"):
        norm = run.fabric.clip_gradients(model, optimizer, max_norm=1e-3, norm_type="inf")
        run.note("norms", norm)


def clips_value(run: Run) -> None:
    """Clips every element."""
    for _, model, optimizer in _train(run, "mlp"):
        run.fabric.clip_gradients(model, optimizer, clip_val=1e-3)


def hooks(run: Run) -> None:
    """Clips in hooks of gradients; hooks of steps are registered after the setup and in between."""
    raw, model, optimizer = _set_up(run, "mlp")

    def clip(parameter: Any) -> None:
        parameter.grad.clamp_(-CLIP, CLIP)

    def look(*_: Any) -> None:
        run.note("weights around steps", nn.utils.parameters_to_vector(held))

    held = list(raw.parameters())
    for parameter in held:
        parameter.register_post_accumulate_grad_hook(clip)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.fabric.backward(loss_of(model, *run.data("mlp", step)))
        if step == 1:
            optimizer.register_step_pre_hook(look)
        if step == 2:
            optimizer.register_step_post_hook(look)
        optimizer.step()
        run.see(raw)
    run.end(raw)


def clips_in_hooks(run: Run) -> None:
    """Clips in a hook before the step, which is registered before the setup or later."""
    raw = build("mlp")
    raw_optimizer = optimizer_for(run.optimizer, raw)

    def clip(*_: Any) -> None:
        run.note("gradients", nn.utils.parameters_to_vector([one.grad for one in raw.parameters()]))
        nn.utils.clip_grad_value_(raw.parameters(), 1e-3)

    model, optimizer = run.fabric.setup(raw, raw_optimizer)
    for step in range(NUM_STEPS):
        if step == 1:
            optimizer.register_step_pre_hook(clip)
        optimizer.zero_grad()
        run.fabric.backward(loss_of(model, *run.data("mlp", step)))
        optimizer.step()
        run.see(raw)
    run.end(raw)


def steps_apart(run: Run) -> None:
    """A parameter of the model has an optimizer that was not set up; two micro-batches a step."""
    raw = build("mlp")
    raw.scale = nn.Parameter(torch.ones(3))
    raw.register_forward_hook(lambda *said: said[2] * raw.scale)
    held = [one for one in raw.parameters() if one is not raw.scale]
    model, optimizer = run.fabric.setup(raw, torch.optim.AdamW(held, lr=0.01))
    own = torch.optim.SGD([raw.scale], lr=0.1)
    for step in range(2 * NUM_STEPS):
        is_last = step % 2 == 1
        with run.fabric.no_backward_sync(model, enabled=not is_last):
            run.fabric.backward(loss_of(model, *run.data("mlp", step)) / 2)
        if is_last:
            run.note("gradients", raw.scale.grad)
            own.step()
            own.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            run.see(raw)
    run.end(raw)


def accumulates(run: Run) -> None:
    """Two micro-batches per step, the first without communication."""
    raw, model, optimizer = _set_up(run, "mlp")
    for step in range(2 * NUM_STEPS):
        is_last = step % 2 == 1
        with run.fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model, *run.data("mlp", step))
            run.fabric.backward(loss / 2)
        run.note("losses", loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            run.see(raw)
    run.end(raw)


def backward_twice(run: Run) -> None:
    """Two backwards per step that both communicate."""
    raw, model, optimizer = _set_up(run, "mlp")
    for step in range(NUM_STEPS):
        for part in range(2):
            run.fabric.backward(loss_of(model, *run.data("mlp", 2 * step + part)))
        optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
    run.end(raw)


def forward_twice(run: Run) -> None:
    """Two forwards and one backward per step."""
    raw, model, optimizer = _set_up(run, "mlp")
    for step in range(NUM_STEPS):
        losses = [loss_of(model, *run.data("mlp", 2 * step + part)) for part in range(2)]
        run.fabric.backward(losses[0] + losses[1])
        optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
    run.end(raw)


def drops(run: Run) -> None:
    """Drops the gradients of every third backward."""
    raw, model, optimizer = _set_up(run, "mlp")
    for step in range(2 * NUM_STEPS):
        loss = loss_of(model, *run.data("mlp", step))
        run.fabric.backward(loss)
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
    run.end(raw)


def closure(run: Run) -> None:
    """Everything in a closure."""
    raw, model, optimizer = _set_up(run, "mlp")
    for step in range(NUM_STEPS):

        def work(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *run.data("mlp", step))
            run.fabric.backward(loss)
            return loss

        run.note("losses", optimizer.step(work))
        run.see(raw)
    run.end(raw)


def evaluates(run: Run) -> None:
    """Evaluates on all ranks right after a step, and on rank 0 alone."""
    raw, model, optimizer = _set_up(run, "conv")
    for step in range(NUM_STEPS):
        run.fabric.backward(loss_of(model, *run.data("conv", step)))
        optimizer.step()
        optimizer.zero_grad()
        run.note("evaluated", _evaluate(run, model, step))
        if run.fabric.global_rank == 0 and run.fabric.world_size < 3:
            # Under DDP a forward may broadcast buffers; the plain module's does not.
            run.note("evaluated by rank 0", _evaluate(run, raw, step))
    run.end(raw)


@torch.no_grad()
def _evaluate(run: Run, model: nn.Module, step: int) -> Tensor:
    model.eval()
    loss = loss_of(model, *run.data("conv", 100 + step)).double()
    model.train()
    return loss


def trains_in_eval_mode(run: Run) -> None:
    """A module in eval mode that is trained."""
    raw, model, optimizer = _set_up(run, "conv")
    model.eval()
    for step in range(NUM_STEPS):
        run.fabric.backward(loss_of(model, *run.data("conv", step)))
        optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
    run.end(raw)


def overflows(run: Run) -> None:
    """One infinite element of one gradient, in one step, on the last rank alone."""
    raw, model, optimizer = _set_up(run, "mlp")
    is_last = run.fabric.global_rank == run.fabric.world_size - 1
    for step in range(NUM_STEPS):
        loss = loss_of(model, *run.data("mlp", step))
        if step == OVERFLOW_STEP and is_last:
            loss = loss + raw.layers[2].bias[0] * float("inf")
        run.fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
        run.note("scales", torch.tensor(run.fabric._precision.scaler.get_scale()))
    run.end(raw)


def masters(run: Run) -> None:
    """Reference for 16-bit weights: float32 copies take the steps, and are rounded.

    Gradients are scaled by 1/P and summed in float32 by rank, as ours are.
    """
    raw, model, _ = _set_up(run, "mlp")
    copy = build("mlp").to(torch.bfloat16).float()
    optimizer = optimizer_for(run.optimizer, copy)
    for step in range(NUM_STEPS):
        raw.zero_grad()
        with run.fabric.no_backward_sync(model):
            loss = loss_of(model, *run.data("mlp", step))
            run.fabric.backward(loss)
        run.note("losses", loss)
        with torch.no_grad():
            for own, master in zip(raw.parameters(), copy.parameters(), strict=True):
                parts = run.fabric.all_gather(own.grad / run.fabric.world_size)
                parts = parts.view(run.fabric.world_size, *own.shape)
                master.grad = sum(part.float() for part in parts)
            optimizer.step()
            for own, master in zip(raw.parameters(), copy.parameters(), strict=True):
                own.copy_(master)
        run.see(raw)
    run.end(raw)


def _gan(run: Run, *, names_model: bool) -> None:
    torch.manual_seed(1)
    raws = [UnevenMLP((7, 131, 7)), UnevenMLP((7, 61, 1))]
    (g, of_g), (d, of_d) = (
        run.fabric.setup(raw, optimizer_for(run.optimizer, raw)) for raw in raws
    )
    for step in range(NUM_STEPS):
        real, _ = run.data("mlp", step)
        of_d.zero_grad()
        loss = F.softplus(-d(real)).mean() + F.softplus(d(g(real).detach())).mean()
        run.fabric.backward(loss, model=d if names_model else None)
        run.note("losses of d", loss)
        of_d.step()
        run.see(*raws)
        of_g.zero_grad()
        loss = F.softplus(-d(g(real.flip(0)))).mean()
        run.fabric.backward(loss, model=g if names_model else None)
        run.note("losses of g", loss)
        run.note("norms", run.fabric.clip_gradients(g, of_g, max_norm=1e3))
        of_g.step()
        run.see(*raws)
    run.end(*raws)


def gan(run: Run) -> None:
    """Two models, two optimizers; each backward reaches both."""
    _gan(run, names_model=False)


def gan_naming_models(run: Run) -> None:
    """As `gan`, but the backwards say whose they are."""
    _gan(run, names_model=True)


def two_optimizers(run: Run) -> None:
    """One model, two optimizers that step in turn and together."""
    raw = build("mlp")
    halves = raw.layers[:2], raw.layers[2:]
    model, *optimizers = run.fabric.setup(raw, *(optimizer_for(run.optimizer, h) for h in halves))
    for step in range(NUM_STEPS):
        run.fabric.backward(loss_of(model, *run.data("mlp", step)))
        for number, optimizer in enumerate(optimizers):
            if step % 3 in (number, 2):
                optimizer.step()
            optimizer.zero_grad()
        run.see(raw)
    run.end(raw)


class _Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build("gpt")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.net, *batch)

    def score(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Another method that runs the model."""
        return loss_of(self.net, *batch) * 2


def lightning_module(run: Run) -> None:
    """Calls `training_step`, and a method marked as a forward."""
    raw = _Lit()
    model, optimizer = run.fabric.setup(raw, optimizer_for(run.optimizer, raw.net))
    model.mark_forward_method("score")
    for step in range(NUM_STEPS):
        method = model.training_step if step % 2 else model.score
        loss = method(run.data("gpt", step))
        run.fabric.backward(loss)
        run.note("losses", loss)
        optimizer.step()
        optimizer.zero_grad()
        run.see(raw)
    run.end(raw)
