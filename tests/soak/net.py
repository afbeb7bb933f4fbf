"""What a job trains, with the hooks that it draws."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_dear import DearStrategy
from tests.soak.job import Branches, Job, optimizers_of
from tests.training.models import build, loss_of

CLIP = 0.01


def weight_of(job: Job, rank: int) -> int:
    """Weight of each batch. With local steps ranks have other ones; DDP has the same."""
    return 1 + 2 * rank if job.local else 3


class SoakNet(LightningModule):
    """A model, its optimizers and a hook.

    Attributes:
        losses: Of every batch.
        noted: What the hook saw, in the order in which it saw it.
        shown: Weights that validation has seen.
        rank: Of this process; 0 where all ranks are to train alike.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        torch.manual_seed(job.seed)
        self.net: nn.Module = Branches() if job.model == "branches" else build(job.model, job.seed)
        self.automatic_optimization = "precision" in job.trainer
        self.losses: list[Tensor] = []
        self.noted: list[Tensor] = []
        self.shown: list[Tensor] = []
        self.rank = 0 if job.law == "one device" else int(os.environ.get("RANK", "0"))
        if job.hook == "apart":
            self.scale = nn.Parameter(torch.ones(()))
            self.own, self.num_own_steps = torch.optim.SGD([self.scale], lr=0.1), 0
        if job.habit == "buffers":
            self.register_buffer("center", torch.zeros(()))
        if job.habit == "shared":
            self.share()
        if job.hook == "tensor":
            for parameter in self.net.parameters():
                parameter.register_hook(lambda grad: grad * 0.5)

    def share(self) -> None:
        """Moves the weights into memory that other processes could read."""
        self.net.share_memory()
        self.shared = [parameter.detach() for parameter in self.net.parameters()]

    def configure_optimizers(self) -> Any:
        """A schedule, too, where Lightning steps it."""
        made = optimizers_of(self.job, self.net)
        if self.job.hook in ("step_pre", "closure_first"):
            for one in made:
                one.register_step_pre_hook(self._clip_in_step)
        if self.job.hook == "step_post":
            made[0].register_step_post_hook(self._note_in_step)
        if self.job.extra == "grows":
            self.later = made[0].param_groups.pop()
        if not self.automatic_optimization:
            return made
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, gamma=0.5)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """Automatic; or by hand, the optimizers by turns."""
        if isinstance(self.net, Branches):
            turn = (batch_idx + self.rank) % 3
            self.net.used = (0, 1) if turn == 2 else (turn,)
        loss = loss_of(self.net, batch[0], batch[1].flatten())
        if self.job.hook == "apart":
            loss = loss * self.scale
        if self.job.habit == "buffers":
            loss = loss * (1 + self.center)
        self.losses.append(loss.detach().clone())
        if self.job.weighs and isinstance(strategy := self.trainer.strategy, DearStrategy):
            strategy.weigh(weight_of(self.job, self.rank))
        if self.automatic_optimization:
            return loss
        made = self.optimizers()
        made = made if isinstance(made, list) else [made]
        for optimizer in made:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in made if batch_idx % 2 else made[:1]:
            optimizer.step()
        return None

    def validation_step(self, *_: Any) -> None:
        """Looks at weights alone."""

    def on_validation_start(self) -> None:
        """Where a metric would be computed."""
        self.shown.extend(one.detach().clone() for one in self.net.parameters())

    # --- hooks ----------------------------------------------------------------------------------

    def _clip_in_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-CLIP, CLIP)

    def _note_in_step(self, *_: Any) -> None:
        self.noted.append(next(self.net.parameters()).detach().clone())


class AfterBackward(SoakNet):
    """Looks at every gradient, and changes some."""

    def on_after_backward(self) -> None:
        """Doubles what it has noted."""
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                self.noted.append(parameter.grad.detach().clone())
                parameter.grad.mul_(2)


class ClipsByHand(SoakNet):
    """Clips a way of its own."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Every element."""
        self._clip_in_step(optimizer)


class PostAccumulate(SoakNet):
    """Clips each gradient as it is accumulated, from the start of the fit on."""

    def on_fit_start(self) -> None:
        """Registers late, as most users do."""
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(_clip)


def _clip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-CLIP, CLIP)


class ClosureFirst(SoakNet):
    """Its step's pre-hook clips what backward has left."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        """Backward, and then the step."""
        closure()
        optimizer.step()


class Apart(SoakNet):
    """A parameter that an optimizer of its own steps, as often as the others are stepped."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Not while gradients accumulate."""
        if self.trainer.global_step > self.num_own_steps:
            self.num_own_steps = self.trainer.global_step
            self.own.step()
            self.own.zero_grad()


class Reads(SoakNet):
    """Reads weights between two steps, through lists taken before."""

    def on_fit_start(self) -> None:
        """Takes the list."""
        self.held = list(self.net.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        """Past every module."""
        self.noted.extend(parameter.detach().clone() for parameter in self.held)


class Habit(Callback):
    """What users do between steps, by the job's habit."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """On rank 0 alone, a backward that nobody is told of."""
        job = pl_module.job
        accumulates = job.trainer.get("accumulate_grad_batches", 1) > 1
        # With find_unused_parameters DDP itself hangs after such a backward.
        is_left_out = job.habit != "saliency" or job.model == "branches" or accumulates
        if is_left_out or pl_module.rank:
            return
        pl_module.net.zero_grad()
        loss_of(pl_module.net, batch[0], batch[1].flatten()).backward()
        pl_module.net.zero_grad()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Each rank writes a buffer; all reset some of the optimizer's state."""
        # In manual optimization DDP leaves each rank its own buffers, and ours are rank 0's.
        if pl_module.job.habit == "buffers" and pl_module.automatic_optimization:
            pl_module.center.mul_(0.5).add_(0.1 * pl_module.rank + 0.01)
        if pl_module.job.habit == "state" and batch_idx % 3 == 1:
            for optimizer in trainer.optimizers:
                for parameter in optimizer.param_groups[0]["params"][::2]:
                    optimizer.state.pop(parameter, None)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """What another process would see in shared memory, once all has arrived."""
        if pl_module.job.habit == "shared":
            pl_module.noted.extend(one.detach().clone() for one in pl_module.net.parameters())
            pl_module.noted.extend(one.clone() for one in pl_module.shared)


KINDS = {
    "on_after_backward": AfterBackward,
    "configure_gradient_clipping": ClipsByHand,
    "post_accumulate": PostAccumulate,
    "reads": Reads,
    "closure_first": ClosureFirst,
    "apart": Apart,
}


def net_of(job: Job) -> SoakNet:
    """A new module of the job, the same on every rank."""
    return KINDS.get(job.hook, SoakNet)(job)
