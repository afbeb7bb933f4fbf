"""Training after training on ranks that have been started: what ``dear-converge`` does on each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig
from torch import Tensor

from lightning_dear.apps.bench.build import build_model, build_strategy, build_trainer
from lightning_dear.apps.converge.config import (
    Entry,
    Options,
    buckets_of,
    config_of,
    key_of,
    metric_of,
    tries_of,
)
from lightning_dear.studies.block import interface_of
from lightning_dear.studies.convergence.broken import broken
from lightning_dear.studies.convergence.records import Curve, Trial, best_of, curve_of
from lightning_dear.studies.convergence.store import Store
from lightning_dear.studies.convergence.summary import Row, summarize
from lightning_dear.studies.convergence.training import digest_of, run_training
from lightning_dear.studies.machine import sent_bytes
from lightning_dear.studies.progress import Progress


class Study:
    """All trainings of a job.

    Args:
        cfg: The job.
        entries: What is trained; every entry stands behind its reference.
        strategy: That the ranks were started with; talks to all of them.
        folder: Has what was trained before, and gets what is; rank 0 reads and writes it.

    Attributes:
        trials: What has been measured so far, and what was found in the folder instead.
    """

    def __init__(
        self,
        cfg: DictConfig,
        entries: Sequence[Entry],
        strategy: ParallelStrategy,
        folder: Path,
    ) -> None:
        self._cfg = cfg
        self._strategy = strategy
        self._store = Store(folder)
        self._entries = entries
        self._buckets = buckets_of(cfg)
        self._metric = metric_of(cfg)
        self._datamodule = instantiate(cfg.data, _convert_="all")
        known = self._store.read() if strategy.is_global_zero else {}
        self._known: dict[str, Trial] = strategy.broadcast(known)
        self._chosen: dict[tuple[str, str], tuple[Options, float]] = {}
        self._starts: dict[int, Trial] = {}
        self._progress: Progress | None = None
        self.trials: list[Trial] = []

    def run(self) -> None:
        """Choose options for each entry, then train it on all seeds. Collective, blocks.

        Raises:
            RuntimeError: If two entries did not begin with the same weights, or were not given
                the same batches.
        """
        if self._strategy.is_global_zero:
            self._progress = Progress(self._num_steps)
        try:
            for entry in self._entries:
                for buckets in self._buckets:
                    options, lr = self._choose(entry, self._cfg.tuning_buckets or buckets)
                    for seed in self._cfg.seeds:
                        self._trial(entry, buckets, options, lr, seed, "final")
        finally:
            if self._progress is not None:
                self._progress.close()

    def rows(self) -> list[Row]:
        """Return the rows of all that has been measured so far."""
        asked = [entry.asked for entry in self._entries]
        return summarize(asked, self.trials, self._metric, len(self._cfg.seeds))

    def curves(self) -> dict[str, Curve]:
        """Return a training's key -> its curve, of all that the folder holds; on rank 0."""
        return self._store.curves()

    @property
    def _num_steps(self) -> int:
        cfg = self._cfg
        num_tunings = len(self._buckets) if cfg.tuning_buckets is None else 1
        num_options = len(cfg.reference_lr_factors)
        num_tries = num_tunings * num_options * len(cfg.tuning_seeds) * (num_options > 1)
        num_trainings = num_tries + len(self._buckets) * len(cfg.seeds)
        return num_trainings * sum(entry.max_steps for entry in self._entries)

    def _choose(self, entry: Entry, buckets: str) -> tuple[Options, float]:
        """Return the best options and their learning rate, trying them all the first time."""
        place = (entry.name, buckets)
        if place not in self._chosen:
            reference = entry.asked.reference
            base = entry.lr if reference is None else self._chosen[(reference, buckets)][1]
            tries = [(one, base * one.lr_factor) for one in tries_of(entry)]
            best = self._best(entry, buckets, tries) if len(tries) > 1 else 0
            self._chosen[place] = tries[best]
        return self._chosen[place]

    def _best(self, entry: Entry, buckets: str, tries: Sequence[tuple[Options, float]]) -> int:
        seeds = self._cfg.tuning_seeds
        tried = [
            [self._trial(entry, buckets, *one, seed, "tuning") for seed in seeds] for one in tries
        ]
        return best_of(tried, self._metric)

    def _trial(
        self, entry: Entry, buckets: str, options: Options, lr: float, seed: int, phase: str
    ) -> Trial:
        cfg = config_of(entry, self._buckets[buckets], options, lr)
        key = key_of(cfg, entry.broken, seed, self._metric.name, self._cfg.loss_steps)
        labels: dict[str, Any] = {
            **{"key": key, "entry": entry.name, "buckets": buckets, "phase": phase, "seed": seed},
            **{"lr": lr, "lr_factor": options.lr_factor, "dense_share": options.dense_share},
        }
        if key not in self._known:
            self._begin(f"{entry.name}, {buckets}, {phase}, seed {seed}, lr {lr:.3g}")
            with broken(entry.broken):
                self._known[key] = self._train(cfg, labels)
        elif self._progress is not None:
            self._progress.leave_out(entry.max_steps)
        trial = replace(self._known[key], **labels)
        self._check_start(trial)
        self.trials.append(trial)
        return trial

    def _train(self, cfg: DictConfig, labels: Mapping[str, Any]) -> Trial:
        seed_everything(labels["seed"], workers=True, verbose=False)
        model = build_model(cfg)
        weights = digest_of(model)

        def new_trainer() -> Trainer:
            return build_trainer(cfg, build_strategy(cfg))

        ending = run_training(
            new_trainer, model, self._datamodule, self._on_step, self._sent_by_a_rank
        )
        steps = self._strategy.reduce(ending.steps, reduce_op="mean")
        assert isinstance(steps, Tensor)
        trial = Trial(
            **labels,
            metric=self._metric.value_in(ending.metrics),
            train_loss=float(steps[-self._cfg.loss_steps :, 0].mean()) if ending.metrics else nan,
            num_steps=len(steps),
            weights=weights,
            batches=ending.batches,
            train_s=ending.train_s,
        )
        if self._strategy.is_global_zero:
            self._store.add(trial, curve_of(steps.tolist(), self._cfg.curve_steps))
        return self._strategy.broadcast(trial)

    def _sent_by_a_rank(self) -> float | None:
        """Return its share of what its host's interface has sent, in bytes."""
        num_hosts = int(self._cfg.cluster.num_nodes)
        sent = sent_bytes(interface_of(num_hosts))
        return None if sent is None else sent * num_hosts / self._strategy.world_size

    def _check_start(self, trial: Trial) -> None:
        first = self._starts.setdefault(trial.seed, trial)
        same_batches = trial.batches == first.batches or trial.num_steps != first.num_steps
        if trial.weights != first.weights or not same_batches:
            what = "batches" if trial.weights == first.weights else "initial weights"
            raise RuntimeError(
                f"On seed {trial.seed}, {trial.entry} ({trial.buckets}) and {first.entry}"
                f" ({first.buckets}) have had other {what}: there is nothing to compare. Entries"
                " must not change model or data; if raw.csv was written elsewhere, choose another"
                " folder (hydra.run.dir=...)."
            )

    def _begin(self, what: str) -> None:
        if self._progress is not None:
            self._progress.begin(what)

    def _on_step(self) -> None:
        if self._progress is not None:
            self._progress.step()
