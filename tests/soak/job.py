"""A training drawn at random: everything that a number says about it."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.compression import COMPRESSORS
from tests.training.models import OPTIMIZERS, two_groups


class Lion(torch.optim.Optimizer):
    """Signs of a mixed momentum: element by element, and none of torch's own."""

    def __init__(self, params: Any, lr: float = 0.003) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; a closure is called first, as in torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._one(p, p.grad, group)
        return loss

    def _one(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(torch.sign(kept * 0.9 + grad * 0.1), alpha=group["lr"])
        kept.mul_(0.99).add_(grad, alpha=0.01)


class Centralized(Lion):
    """Takes the mean off each row of a matrix: it needs whole tensors."""

    def _one(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.dim() > 1:
            grad = grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)
        p.sub_(grad, alpha=group["lr"])


class Trusted(Lion):
    """A layer's step is as long as its weights are: it needs whole tensors."""

    def _one(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        ratio = p.norm() / grad.norm() if p.norm() > 0 and grad.norm() > 0 else 1.0
        p.sub_(grad * ratio, alpha=group["lr"])


THIRD_PARTY = {"lion": Lion, "centralized": Centralized, "trusted": Trusted}
MODELS = ("mlp", "conv", "gpt", "deep_mlp", "branches")
HOOKS = (
    "none",
    "on_after_backward",
    "configure_gradient_clipping",
    "tensor",
    "post_accumulate",
    "step_post",
    "reads",
    "closure_first",
    "apart",
)
MANUAL_HOOKS = ("none", "step_pre", "apart")
HABITS = ("none", "none", "saliency", "state", "buffers", "shared")


class Branches(nn.Module):
    """Two branches, of which a step uses one, or both; what nobody uses has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 61)
        self.branches = nn.ModuleList(nn.Linear(61, 61) for _ in range(2))
        self.last = nn.Linear(61, 3)
        self.used: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = torch.tanh(self.first(x))
        for branch in self.used:
            x = torch.tanh(self.branches[branch](x))
        return self.last(x)


@dataclass(frozen=True)
class Job:
    """What is trained; a seed says all of it, see `job_of`."""

    seed: int
    model: str
    optimizer: str
    num_optimizers: int = 1
    hook: str = "none"
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    habit: str = "none"
    weighs: bool = False
    local: dict[str, Any] = field(default_factory=dict)
    law: str = ""
    extra: str = "none"

    @property
    def is_exact(self) -> bool:
        """Whether two ranks give DDP's bits: nothing is lossy, and no norm is summed up."""
        by_norm = self.trainer.get("gradient_clip_algorithm") == "norm"
        return not self.is_lossy and not by_norm and not self.local

    @property
    def is_lossy(self) -> bool:
        """Whether gradients are encoded."""
        return "compressor" in self.strategy

    def __str__(self) -> str:
        said = {name: value for name, value in asdict(self).items() if value or name == "seed"}
        return ", ".join(f"{name}={value}" for name, value in said.items())


def job_of(seed: int) -> Job:
    """The job of that number; the same everywhere."""
    draw = random.Random(seed)
    optimizer = draw.choice([*OPTIMIZERS, *THIRD_PARTY])
    manual = draw.random() < 0.2
    job = Job(
        seed,
        draw.choice(MODELS),
        optimizer,
        draw.choice((1, 2)) if manual else 1,
        draw.choice(MANUAL_HOOKS if manual else HOOKS),
        {"max_epochs": draw.choice((1, 2))} if manual else _trainer(draw),
        _strategy(draw, optimizer in ("centralized", "trusted")),
        draw.choice(HABITS),
        draw.random() < 0.25,
    )
    # Of another generator, so that other jobs stay as they were.
    draw = random.Random(f"local steps {seed}")
    return _with_local_steps(job, draw) if draw.random() < 0.25 else job


EXTRAS = ("validates", "folder", "file", "frozen", "grows", "scaler", "bf16", "nan", "raises")
"""What jobs with local steps do besides; see `tests/soak/local.py`."""

LAWS = ("reference", "reference", "reference", "one device", "ddp", "finite")
"""What the end of a job with local steps is compared with; "finite" with nothing."""


def _with_local_steps(job: Job, draw: random.Random) -> Job:
    """The job with local steps, and the strongest law that holds for it."""
    every = draw.randint(1, 8)
    divisors = [None, *(n for n in (1, 2, 3, 4) if every % n == 0)]
    local = {
        "every": every,
        "fragments": draw.choice(divisors),
        "delay": draw.choice((None, 0, draw.randrange(every))),
        "mix": draw.choice((None, 0, 0.5, 1)),
        "outer": draw.choice((None, "sgd", "momentum", "nesterov", "adam")),
        "dense_steps": draw.choice((0, 0, 0, 3)),
    }
    extra = draw.choice(("none",) * 6 + EXTRAS)
    strategy = {"broadcast_buffers": job.strategy["broadcast_buffers"], "fusion": "threshold"}
    strategy["fusion"] = draw.choice(("small", "threshold", "none", "single"))
    law = draw.choice(LAWS)
    is_manual, is_alone = "precision" not in job.trainer, job.num_optimizers == 1
    if (extra == "scaler" and is_manual) or (extra == "grows" and not is_alone):
        extra = "none"
    if extra in ("scaler", "bf16", "nan", "raises", "file", "grows"):
        law = "finite"
    if law == "finite":
        strategy["compressor"] = draw.choice(("none", "int8"))
        if draw.random() < 0.1:
            strategy["gather"] = draw.choice(("parameters", "gradients"))
    else:
        local["dense_steps"] = 0
    weighs = job.weighs and law in ("reference", "finite")
    job = replace(job, strategy=strategy, weighs=weighs, law=law, extra=extra, local=local)
    if job.optimizer == "sgd_fused" and job.model == "branches":
        # torch raises where some parameters of a list have momentum, and others not yet.
        job = replace(job, optimizer="sgd")
    return {"one device": _of_one_device, "ddp": _of_ddp}.get(law, lambda one: one)(job)


def _of_one_device(job: Job) -> Job:
    """The anchor comes to the replicas as they are sent, or they keep their own to the end."""
    local = {**job.local, "outer": "sgd"}
    local |= {"mix": 1} if local["delay"] or local["delay"] is None else {}
    return replace(job, local=local, habit="none" if job.habit == "buffers" else job.habit)


def _of_ddp(job: Job) -> Job:
    """All is linear in the gradients: their mean may be taken before the step, or after."""
    local = {"every": 1, "fragments": 1, "mix": 0, "outer": "sgd"}
    trainer = {name: value for name, value in job.trainer.items() if "clip" not in name}
    is_linear = job.hook in ("none", "tensor", "reads", "step_post")
    return replace(
        job,
        local=local,
        trainer=trainer,
        optimizer="linear",
        hook=job.hook if is_linear else "none",
        habit="none" if job.habit == "buffers" else job.habit,
        extra=job.extra if job.extra in ("validates", "folder") else "none",
    )


def _trainer(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_epochs": draw.choice((1, 2)),
        "accumulate_grad_batches": draw.choice((1, 1, 2, 3)),
        "precision": draw.choice(("32-true", "32-true", "bf16-mixed", "64-true")),
    }
    how = draw.choice((None, None, "norm", "value"))
    if how is not None:
        options |= {
            "gradient_clip_algorithm": how,
            "gradient_clip_val": 0.5 if how == "norm" else 0.01,
        }
    return options


def _strategy(draw: random.Random, needs_whole: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "fusion": draw.choice(("small", "threshold", "none", "single", "mgwfbp", "auto")),
        "broadcast_buffers": draw.random() < 0.8,
    }
    if draw.random() < 0.35:
        options["compressor"] = draw.choice(sorted(COMPRESSORS))
        options["fusion"] = draw.choice(("small", "threshold", "none", "single"))
    gather = draw.choice((None, None, "parameters", "gradients"))
    gather = "gradients" if needs_whole and draw.random() < 0.5 else gather
    if gather is not None:
        options["gather"] = gather
    if gather == "gradients" and "compressor" not in options and draw.random() < 0.3:
        options["decouple"] = False
    return options


def optimizers_of(job: Job, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The job's, over all of the model: two groups for one, every second tensor for two."""
    if job.num_optimizers == 1:
        return [_optimizer(job.optimizer, two_groups(model, 0.05))]
    own = list(model.parameters())
    return [_optimizer(job.optimizer, [{"params": own[part::2]}]) for part in range(2)]


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "linear":
        # Without weight decay, which a rank that does not use a parameter leaves out.
        return torch.optim.SGD([{"params": one["params"]} for one in groups], lr=0.05)
    if name in THIRD_PARTY:
        return THIRD_PARTY[name](groups)
    if name == "rprop":
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    made: torch.optim.Optimizer = OPTIMIZERS[name](groups)
    return made
