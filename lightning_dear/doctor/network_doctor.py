"""`NetworkDoctor`: a callback that says why a step takes so long, and what would help."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import fsspec  # type: ignore[import-untyped]
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn, optim
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.callbacks.guards import gradient_readers
from lightning_dear.collectives import factory, store
from lightning_dear.doctor.links import Pair, measure_links
from lightning_dear.doctor.prescription import Case, Findings, measured_devices
from lightning_dear.doctor.step_watch import DearWatch, StepTimes, StepWatch
from lightning_dear.planning.measured import LinkCost, combined_times
from lightning_dear.strategy import DearStrategy
from lightning_dear.studies.device_costs import AS_GOOD, Device

_FIRST_STEP = 5
"""Step with which watching begins: earlier ones allocate memory, and make plans."""

_TIMEOUT = timedelta(seconds=10)
_BUDGET_S = 3.5
"""Seconds in which links are measured, of a pause of up to 5 seconds."""

_OF_BUCKETS = {25: "ddp", 100: "ddp, large buckets"}
"""MiB of DDP's buckets -> name in `Case.cases`."""

T = TypeVar("T")


class Links(NamedTuple):
    """What was measured in the pause; the same on all ranks."""

    cost: LinkCost
    pairs: Sequence[Pair]
    hosts: Sequence[int]
    devices: dict[str, Device]


class NetworkDoctor(Callback):
    """Watches some steps under DDP or `strategy="dear"`, and says on rank 0 what would help.

    It prints one screen, writes `network_doctor.json`, and gives the figures to the trainer's
    loggers. In one pause of up to 5 seconds it measures the links. Weights, random numbers, the
    order of data and checkpoints are the same as without it. Under other strategies, with one rank,
    and where a step has several optimizers, it says so in a sentence, and training goes on.

    The environment variable LIGHTNING_DEAR_DOCTOR=1 adds it to each Trainer, without any code.

    Args:
        step: Step after which it measures. Steps 5 to `step` are watched.
        dirpath: Folder of the file. None means the trainer's `default_root_dir`.

    Raises:
        ValueError: If `step` is too small.
    """

    def __init__(self, step: int = 20, dirpath: str | None = None) -> None:
        if step < (least := _FIRST_STEP + 3):
            raise ValueError(f"step={step} of NetworkDoctor is too early. Set {least} or more.")
        self.step, self.dirpath = step, dirpath
        self._num_seen = 0
        self._watch: StepWatch | DearWatch | None = None
        self._failure: Exception | None = None
        # Keys in the default group's store, one for each rank that has a doctor.
        self._keys: list[str] = []
        self._has_ended = False

    # In a step these two hooks alone: before others `strategy="dear"` would wait or gather.

    @override
    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: optim.Optimizer
    ) -> None:
        if self._has_ended:
            return
        self._num_seen += 1
        if self._num_seen == 1:
            self._begin(trainer)
        elif self._num_seen == _FIRST_STEP and not _store().check(self._keys):
            # By now all ranks have made a step. So all that have a doctor find the same.
            problem = "not all ranks have it. Set LIGHTNING_DEAR_DOCTOR=1 on every host."
            self._end(f"NetworkDoctor measures nothing: {problem}")
        elif self._num_seen > self.step:
            self._examine(trainer)
        elif self._num_seen >= _FIRST_STEP and self._failure is None:
            try:
                self._watch = self._watch or _watch(trainer, pl_module)
                self._watch.step_begins()
            except Exception as error:
                # Other ranks learn it where all ranks meet.
                self._failure = error

    def _begin(self, trainer: Any) -> None:
        """Tells other ranks that this one has a doctor, unless there is nothing to examine."""
        doctors = [one for one in trainer.callbacks if isinstance(one, NetworkDoctor)]
        if doctors and doctors[0] is not self:
            # The environment variable has added another one.
            self._end()
        elif problem := _problem(trainer):
            self._end(f"NetworkDoctor measures nothing: {problem}")
        else:
            self._keys = [f"dear_doctor/{self.step}/{rank}" for rank in range(trainer.world_size)]
            _store().set(self._keys[trainer.global_rank], "1")
            rank_zero_info(
                f"NetworkDoctor watches steps {_FIRST_STEP} to {self.step}, and then measures links"
                " for about 5 s."
            )

    @override
    def on_before_backward(self, *_: Any) -> None:
        if self._watch is not None:
            self._watch.backward_begins()

    @override
    def on_exception(self, *_: Any) -> None:
        self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not self._has_ended:
            self._end(
                f"NetworkDoctor measured nothing: it saw {self._num_seen} steps. It needs"
                f" {self.step + 1}, and automatic optimization."
            )

    def _end(self, sentence: str = "") -> None:
        watch, self._watch, self._has_ended = self._watch, None, True
        # Where warnings are errors, one rank alone would raise.
        with suppress(Exception):
            if watch is not None:
                watch.close()
            if self._keys:
                # A later fit must not take this one's doctor for its own.
                _store().delete_key(self._keys[dist.get_rank()])
            if sentence:
                rank_zero_warn(sentence)

    # --- the pause --------------------------------------------------------------------------------

    def _examine(self, trainer: Trainer) -> None:
        """Ends the watch, measures, and tells. Collective. Blocks."""
        try:
            told = _agreed("the times of steps", self._times)
            watch = self._watch
            assert watch is not None
            links = self._links(trainer, watch)
            if trainer.is_global_zero:
                self._tell(trainer, _findings(trainer, watch, told, links))
            self._end()
        except Exception as problem:
            # After `_agreed` nothing is collective, so that one rank alone may come here.
            self._end(f"NetworkDoctor stops: {problem}. Training goes on.")

    def _times(self) -> StepTimes:
        if self._failure is not None:
            raise self._failure
        times = None if self._watch is None else self._watch.end()
        if times is None:
            raise RuntimeError("no whole step was seen")
        return times

    def _links(self, trainer: Trainer, watch: StepWatch | DearWatch) -> Links | None:
        """Returns what was measured. None with NCCL, where nothing is measured. Collective."""
        device = trainer.strategy.root_device
        if not _is_gloo():
            return None
        nbytes = sum(one.nbytes for one in watch.trained)
        node = trainer.node_rank, trainer.local_rank

        def measure() -> tuple[LinkCost, list[Pair], Sequence[int]]:
            with factory.temporary_collectives(device, _TIMEOUT, node=node) as made:
                group = {"group": made.object_group, "budget_s": _BUDGET_S}
                return *measure_links(made, device, nbytes, **group), made.world.hosts

        links = _agreed("the links", measure)
        speeds = _agreed("encoding", lambda: measured_devices(device))
        each = {name: [one[name] for one in speeds] for name in speeds[0]}
        slowest = {name: min(some, key=lambda one: one.bytes_per_s) for name, some in each.items()}
        return Links(links[0][0], [pair for one in links for pair in one[1]], links[0][2], slowest)

    def _tell(self, trainer: Trainer, findings: Findings) -> None:
        print(findings.text, flush=True)
        numbers = {f"doctor/{name}": one for name, one in findings.numbers.items()}
        for logger in trainer.loggers:
            with suppress(Exception):
                logger.log_metrics(numbers, step=trainer.global_step)
        folder = self.dirpath or trainer.default_root_dir
        # Both may be on an object store.
        get_filesystem(folder).makedirs(folder, exist_ok=True)
        path = f"{folder}/network_doctor.json"
        with fsspec.open(path, "w") as file:
            json.dump(findings.figures, file, indent=1)
        print(f"All figures: {path}", flush=True)


def _store() -> Any:
    """Returns the default group's store, with its prefixes: torchrun keeps it over restarts."""
    return private_names.DEFAULT_STORE.of(dist.distributed_c10d)()


def _is_gloo() -> bool:
    return all(one.rpartition(":")[2] == "gloo" for one in dist.get_backend_config().split(","))


def _agreed(what: str, measure: Callable[[], T]) -> list[T]:
    """Returns what every rank has measured, in rank order. Collective. Blocks.

    Raises:
        RuntimeError: If a rank failed, on all ranks.
    """
    own: Any = None
    try:
        own, problem = measure(), None
    except Exception as error:
        problem = f"rank {dist.get_rank()} could not measure {what} ({error!r})"
    told = store.from_all_ranks((own, problem))
    if problems := [one for _, one in told if one is not None]:
        raise RuntimeError(problems[0])
    return [one for one, _ in told]


def _problem(trainer: Trainer) -> str | None:
    """Returns why this training is not examined. None means that it is."""
    strategy: Any = trainer.strategy
    if not isinstance(strategy, strategies.DDPStrategy):
        return f"{type(strategy).__name__} is neither DDP nor strategy='dear'."
    if trainer.world_size == 1:
        return "one rank sends nothing."
    if len(trainer.optimizers) != 1:
        return "the model has several optimizers."
    if isinstance(trainer.optimizers[0], optim.LBFGS):
        return "LBFGS computes several gradients a step."
    if not isinstance(strategy, DearStrategy):
        # DeepSpeed's and XLA's strategies are subclasses.
        is_ddp = isinstance(strategy.model, nn.parallel.DistributedDataParallel)
        return None if is_ddp else f"{type(strategy).__name__} is neither DDP nor strategy='dear'."
    if strategy.pipeline_of().collectives.world.size == 1:
        return "with local_steps ranks meet once a round."
    return None


def _watch(trainer: Trainer, module: LightningModule) -> StepWatch | DearWatch:
    strategy: Any = trainer.strategy
    if isinstance(strategy, DearStrategy):
        return DearWatch(trainer, strategy)
    return StepWatch(strategy.model, module, trainer.optimizers[0])


def _findings(
    trainer: Trainer, watch: StepWatch | DearWatch, told: Sequence[StepTimes], links: Links | None
) -> Findings:
    """Returns what to print. Local, on rank 0."""
    unmeasured = Findings(told, None, (), ())
    if links is None:
        return unmeasured
    times = combined_times([one.times for one in told], max)
    readers = gradient_readers((*trainer.callbacks, trainer.lightning_module))  # type: ignore[attr-defined]
    case = Case(
        watch.tensors(times),
        times,
        told[0].num_batches,
        links.cost,
        trainer.world_size,
        links.devices,
        rest_s=unmeasured.numbers["rest_s"],
        is_gloo=_is_gloo(),
        running=_running(trainer.strategy),
        batch_s=max(one.step_s for one in told) / told[0].num_batches,
        hooks=[f"{name}.{hook}" for hook, names in readers.items() for name in names],
        # Gradients that were shown are gathered once more after clipping.
        num_hook_gathers=bool(readers) + bool(readers and trainer.gradient_clip_val),
        pays_for_hooks=bool(readers) and getattr(trainer.strategy, "shows_gradients", False),
    )
    return Findings(told, case, links.pairs, links.hosts)


def _running(strategy: Any) -> str | None:
    """Returns the name in `Case.cases` of what runs now. None means that it has none."""
    if isinstance(strategy, DearStrategy):
        codec = strategy.pipeline_of().options.compressor
        if codec is not None and codec.name not in AS_GOOD:
            return None
        return "dear" if codec is None else f"dear + {codec.name}"
    # By name, since there is no such class for `pytorch_lightning`.
    if type(strategy).__name__ == "Bf16DDPStrategy":
        return "ddp_bf16"
    # On CPUs Lightning ignores the hook.
    hook = strategy.root_device.type != "cpu" and private_names.DDP_HOOK.of(strategy)
    if hook:
        return "ddp_bf16" if "bf16" in getattr(hook, "__name__", "") else None
    return _OF_BUCKETS.get(strategy.model.bucket_bytes_cap >> 20)
