"""Random trainings with local steps, whose weights are not DDP's, and the laws that hold for them.

Of every job: it ends, or all ranks refuse or raise; all ranks end with the same bits, and see the
same weights in validation. By `Job.law` the end is near that of

    reference   the law in plain torch: on each rank a Trainer of one device, beside which `Naive`
                sends and merges whole tensors with blocking all-reduces
    one device  plain training: all ranks train alike, and the anchor comes to where they are
    ddp         DDP: a round is one step, and linear in gradients
    finite      nothing

With `extra="folder"` training stops after the first epoch, and goes on from a folder: all
bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader, Subset

from lightning_dear import DearStrategy
from lightning_dear.local_steps import LocalSteps, num_modules
from lightning_dear.local_steps.schedule import cut
from tests.lightning.fitting import TIMEOUT, ddp, digest, new_trainer, poison_until_waited
from tests.lightning.nets import BATCH_SIZE, data
from tests.soak.job import Job
from tests.soak.net import Habit, SoakNet, net_of, weight_of
from tests.training.models import distance

NUM_BATCHES = 11
"""Per rank and epoch: no multiple of anything."""

NEAR, NEAR_IN_64_BITS = 2e-3, 1e-6
"""Norm of the difference of the weights divided by theirs."""

OUTER = {
    None: None,
    "sgd": partial(torch.optim.SGD, lr=1.0),
    "momentum": partial(torch.optim.SGD, lr=0.5, momentum=0.5),
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    # With less, rounding errors of parameters without a gradient grow from merge to merge.
    "adam": partial(torch.optim.Adam, lr=0.01, eps=0.1),
}


class Naive(Callback):
    """The law once more: after each step of an optimizer fragments are sent and merged.

    Blocking, with whole tensors, and one all-reduce for each.
    """

    def __init__(self, steps: LocalSteps, weights: Sequence[int]) -> None:
        self.steps, self.weights, self.parts = steps, weights, list[NaiveRounds]()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """After the last hook of a step that a user may have registered."""
        for optimizer in trainer.optimizers:
            self.parts.append(NaiveRounds(pl_module, optimizer, self.steps, self.weights))
            optimizer.register_step_post_hook(self.parts[-1].after_step)

    def on_validation_start(self, *_: Any) -> None:
        """Validation sees the anchor."""
        for part in self.parts:
            part.swap()

    on_validation_end = on_validation_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Behind the last step what is left is exchanged, and the anchor stays."""
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last and trainer.current_epoch + 1 == trainer.max_epochs:
            for part in self.parts:
                part.flush()


class NaiveRounds:
    """Counts the steps of one optimizer."""

    def __init__(
        self, module: Any, optimizer: Any, steps: LocalSteps, weights: Sequence[int]
    ) -> None:
        self.share = weights[dist.get_rank()] / sum(weights)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        self.schedule, self.count = steps.schedule(num_modules(module, held)), 0
        self.fragments = [
            [(theta, Parameter(theta.detach().clone())) for theta in named.values()]
            for named in cut(module, held, self.schedule.fragments)
        ]
        outer = [[anchor for _, anchor in one] for one in self.fragments]
        self.outer = [steps.new_outer(one) if one else None for one in outer]
        self.flights: dict[int, list[Tensor]] = {}

    def after_step(self, *_: Any) -> None:
        """Sends and merges what is due."""
        self.count += 1
        if (sent := self.schedule.sent_after(self.count)) is not None:
            self.send(sent)
        if (merged := self.schedule.merged_after(self.count)) is not None:
            self.merge(merged, self.schedule.mix)

    @torch.no_grad()
    def send(self, fragment: int) -> None:
        """The mean over ranks of anchor - theta, by their weights."""
        self.flights[fragment] = []
        for theta, anchor in self.fragments[fragment]:
            mean = (anchor - theta) * self.share
            dist.all_reduce(mean)
            self.flights[fragment].append(mean)

    @torch.no_grad()
    def merge(self, fragment: int, mix: float) -> None:
        """Steps the anchor, and moves this rank's weights to it."""
        means = self.flights.pop(fragment)
        for (_, anchor), mean in zip(self.fragments[fragment], means, strict=True):
            anchor.grad = mean
        if self.outer[fragment] is not None:
            self.outer[fragment].step()
        for theta, anchor in self.fragments[fragment]:
            theta.copy_(torch.lerp(anchor, theta, mix))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the two in place."""
        for theta, anchor in chain.from_iterable(self.fragments):
            kept = theta.clone()
            theta.copy_(anchor)
            anchor.copy_(kept)

    def flush(self) -> None:
        """Flights in their order, then all but what was merged just now without delay."""
        just = self.schedule.merged_after(self.count) if self.schedule.delay == 0 else None
        for fragment in [*self.flights]:
            self.merge(fragment, self.schedule.mix)
        for fragment in range(len(self.fragments)):
            if fragment != just:
                self.send(fragment)
                self.merge(fragment, 0.0)
        for theta, anchor in chain.from_iterable(self.fragments):
            theta.data.copy_(anchor)


class Extra(Callback):
    """What a job does besides, by its `extra`."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Some parameters are frozen."""
        if pl_module.job.extra == "frozen":
            for one in [*pl_module.net.parameters()][1::3]:
                one.requires_grad_(False)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """In the first epoch."""
        extra = pl_module.job.extra
        if batch_idx != 5 or trainer.current_epoch:
            return
        if extra == "frozen":
            for one in pl_module.net.parameters():
                one.requires_grad_(True)
        if extra == "grows":
            trainer.optimizers[0].add_param_group(pl_module.later)
        if extra == "raises" and pl_module.rank == 1:
            raise KeyError("spoilt batch")
        if extra == "nan" and pl_module.rank == 1:
            next(pl_module.net.parameters()).data.fill_(float("nan"))


def steps_of(job: Job) -> LocalSteps:
    """The options."""
    return LocalSteps(**{**job.local, "outer": OUTER[job.local["outer"]]})


def _trainer_of(job: Job, ranks: int) -> dict[str, Any]:
    options = dict(job.trainer)
    is_other_order = ranks > 2 or options.get("gradient_clip_algorithm") == "norm"
    if is_other_order or job.law in ("one device", "ddp"):
        options["precision"] = "64-true"
    if job.extra in ("folder", "file"):
        options["max_epochs"] = 2
    if job.extra == "validates":
        options["val_check_interval"] = 5
    if job.extra == "bf16":
        options["precision"] = "bf16-true"
    if job.extra == "scaler":
        options.pop("precision")
    return options


def _fit(
    job: Job, strategy: Any, ranks: int, *callbacks: Callback, path: str | None = None, **own: Any
) -> SoakNet:
    """Trains a new module on this rank's samples, or on rank 0's if all are to train alike."""
    net, options = net_of(job), {**_trainer_of(job, ranks), **own}
    if options.get("precision") == "64-true":
        # Lightning loads a checkpoint before it converts the module, and would round its weights.
        net.double()
        if job.habit == "shared":
            net.share()
    is_alone = isinstance(strategy, SingleDeviceStrategy)
    plugins: list[Any] = [LightningEnvironment() if is_alone else TorchElasticEnvironment()]
    if job.extra == "scaler":
        scale = 2.0 ** (20 if net.rank else 12)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
    torch.manual_seed(0)
    trainer = new_trainer(
        strategy,
        *callbacks,
        Habit(),
        Extra(),
        plugins=plugins,
        use_distributed_sampler=False,
        **({"devices": 1} if is_alone else {}),
        **options,
    )
    samples: Any = data(
        "mlp" if job.model == "branches" else job.model, BATCH_SIZE * ranks * NUM_BATCHES
    ).dataset
    loader = DataLoader(
        Subset(samples, range(net.rank, len(samples), ranks)), batch_size=BATCH_SIZE
    )
    with poison_until_waited():
        trainer.fit(net, loader, loader if job.extra == "validates" else None, ckpt_path=path)
    return net


def _ours(job: Job) -> DearStrategy:
    options = dict(job.strategy)
    fusion = options.pop("fusion")
    options |= {"bucket_cap_mb": 0.02} if fusion == "small" else {"fusion": fusion}
    timeout = timedelta(seconds=6) if job.extra == "raises" else TIMEOUT
    folders = job.extra == "folder"
    return DearStrategy(
        local_steps=steps_of(job),
        save_distributed_checkpoint=folders,
        timeout=timeout,
        weights="samples" if job.weighs else None,
        **options,
    )


def _train(job: Job, ranks: int) -> tuple[SoakNet, list[SoakNet]]:
    """Trains with ours; also what went on from a checkpoint after the first epoch."""
    if job.extra not in ("folder", "file"):
        strategy = _ours(job)
        net = _fit(job, strategy, ranks)
        if job.hook == "apart":
            scales = [torch.empty_like(net.scale.data) for _ in range(ranks)]
            dist.all_gather(scales, net.scale.data)
            differs = len({digest([one]) for one in scales}) > 1
            assert strategy._outer._differs or not differs, "no warning of what is apart"
        return net, []
    with TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names, 0)
        folder = Path(names[0])
        saver = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
        whole = _fit(job, _ours(job), ranks, saver, enable_checkpointing=True)
        dist.barrier()
        again = _fit(job, _ours(job), ranks, path=str(folder / "epoch=0.ckpt"))
        dist.barrier()
    return whole, [again]


def run(job: Job, ranks: int) -> dict[str, Any]:
    """On every rank: what this rank saw of the job."""
    try:
        ours, again = _train(job, ranks)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
        if job.extra == "raises":
            return {"verdict": "raised"}
        try:
            _fit(job, SingleDeviceStrategy("cpu"), ranks)
        except (ValueError, TypeError, RuntimeError):
            return {"verdict": "torch raised", "said": said}
        # Dense steps refuse what is not finite.
        is_nan = job.extra == "nan" and type(error).__name__ == "GradientsNotFinite"
        if not isinstance(error, ValueError) and not is_nan:
            raise
        return {"verdict": "refused", "said": said}
    theirs = _compared(job, ranks)
    if (
        theirs
        and not _is_finite(theirs)
        or not (_is_finite(ours) or _is_finite(_naive(job, ranks)))
    ):
        return {"verdict": "diverges"}
    found = {"weights": digest([*_weights(ours), *ours.shown]), "law": job.law}
    if again:
        found["weights"] += digest(_weights(again[0]))
    if why := broken(job, ours, again, theirs, ranks):
        return {**found, "verdict": "FAULT", "said": why}
    if theirs is None:
        return {**found, "verdict": "finite"}
    is_equal = all(map(torch.equal, _weights(ours), _weights(theirs)))
    return {**found, "verdict": "equal" if is_equal else "near"}


def _compared(job: Job, ranks: int) -> SoakNet | None:
    if job.law == "finite":
        return None
    if job.law == "ddp":
        return _fit(job, ddp(find_unused_parameters=job.model == "branches"), ranks)
    if job.law == "reference":
        return _naive(job, ranks)
    return _fit(job, SingleDeviceStrategy("cpu"), ranks)


def _naive(job: Job, ranks: int) -> SoakNet:
    weights = [weight_of(job, rank) if job.weighs else 1 for rank in range(ranks)]
    return _fit(job, SingleDeviceStrategy("cpu"), ranks, Naive(steps_of(job), weights))


def _is_finite(net: SoakNet) -> bool:
    return all(bool(one.isfinite().all()) for one in [*_weights(net), *net.shown])


def broken(
    job: Job, ours: SoakNet, again: list[SoakNet], theirs: SoakNet | None, ranks: int
) -> str:
    """What does not hold, or ""."""
    if not _is_finite(ours):
        return "weights are not finite"
    for other in again:
        is_same = all(map(torch.equal, _weights(ours), _weights(other)))
        # What no optimizer holds is not saved by rank.
        if job.extra == "folder" and not is_same and job.hook != "apart":
            return f"a folder is off by {distance(_weights(other), _weights(ours)):.1e}"
    if theirs is None:
        return ""
    limit = NEAR_IN_64_BITS if _trainer_of(job, ranks).get("precision") == "64-true" else NEAR
    what: Mapping[str, tuple[Iterable[Tensor], Iterable[Tensor]]] = {
        "weights": (_weights(ours), _weights(theirs)),
        "losses": (ours.losses, theirs.losses),
        "weights in validation": (ours.shown, theirs.shown),
        "noted": (ours.noted, theirs.noted),
    }
    if job.law != "reference":
        what = {"weights": what["weights"]}
    for name, (left, right) in what.items():
        pair = [*left], [*right]
        if len(pair[0]) != len(pair[1]):
            return f"{name}: {len(pair[0])} and {len(pair[1])}"
        apart = distance(*pair) if pair[0] else 0.0
        if not apart <= limit:
            return f"{name} off by {apart:.1e}"
    return ""


def _weights(net: SoakNet) -> list[Tensor]:
    """Those that are exchanged: not those of `Apart`."""
    return [one.detach() for one in net.net.parameters()]
