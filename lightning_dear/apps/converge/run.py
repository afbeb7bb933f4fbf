"""Training after training on ranks that have been started: what ``dear-converge`` does on each."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig
from torch import Tensor

from lightning_dear.apps import emulated, job
from lightning_dear.apps.bench import build
from lightning_dear.apps.converge import config
from lightning_dear.apps.program import Program
from lightning_dear.emulation import emulated_rig
from lightning_dear.studies import convergence, training
from lightning_dear.studies.block import interface_of
from lightning_dear.studies.files import write_lines
from lightning_dear.studies.machine import sent_bytes
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.report import Report

MODULE = "lightning_dear.apps.converge"


def converge(cfg: DictConfig, program: Program, *, trains: bool = True) -> None:
    """Train the entries of ``cfg`` on its seeds; print and write how they end.

    Starts the ranks once, and blocks until they have ended. Every training is written when it
    ends; what the job's folder holds already is not trained again.

    Args:
        cfg: The job.
        program: This one.
        trains: Otherwise only what the folder holds is printed and written.

    Raises:
        SystemExit: After an error, which is printed.
    """
    with job.one_message(program.name), job.isolated_job():
        program.folder = folder = Path(HydraConfig.get().runtime.output_dir)
        config.check(cfg)
        study = Study(cfg, config.entries_of(cfg), folder)
        if not trains:
            study.take_known()
            study.report.finish()
        elif not emulated.restart_on_cluster(cfg, MODULE):
            build.run_on_ranks(cfg, study.run, study.report, program)


class NotTrained(Exception):
    """The folder lacks a training."""


class Study:
    """All trainings of a job.

    Args:
        cfg: The job.
        entries: What is trained; every entry stands behind its reference.
        folder: Has what was trained before, and gets what is; rank 0 reads and writes it.

    Attributes:
        trials: What has been measured so far, and what was found in the folder instead.
        report: Of these.
    """

    def __init__(self, cfg: DictConfig, entries: Sequence[config.Entry], folder: Path) -> None:
        self._cfg = cfg
        self._strategy: Any = None
        self._entries = entries
        self._buckets = config.buckets_of(cfg)
        self._metric = config.metric_of(cfg)
        self._datamodule: Any = None
        self._known: dict[str, convergence.Trial] = {}
        self._chosen: dict[tuple[str, str], tuple[config.Options, float]] = {}
        self._starts: dict[int, convergence.Trial] = {}
        self.trials: list[convergence.Trial] = []
        self.report = Report(folder, self.rows, convergence.summary_line, _text_of, self._draw)

    def run(self, starter: Trainer) -> None:
        """Choose options for each entry, then train it on all seeds. Collective, blocks.

        Raises:
            RuntimeError: If two entries did not begin with the same weights, or were not given
                the same batches.
        """
        self._strategy = starter.strategy
        self._datamodule = instantiate(self._cfg.data, _convert_="all")
        known = convergence.read_trials(self.report.folder) if starter.is_global_zero else {}
        self._known = self._strategy.broadcast(known)
        if starter.is_global_zero:
            self.report.progress = Progress(self._num_steps)
        self._go_through()

    def take_known(self) -> None:
        """Take the trainings that the folder holds, up to the first that is missing."""
        self._known = convergence.read_trials(self.report.folder)
        with suppress(NotTrained):
            self._go_through()

    def _go_through(self) -> None:
        for entry in self._entries:
            for buckets in self._buckets:
                chosen = self._choose(entry, self._cfg.tuning_buckets or buckets)
                for seed in self._cfg.seeds:
                    self._trial(entry, buckets, chosen, seed)

    def rows(self) -> list[convergence.Row]:
        """Return the rows of all that has been measured so far."""
        asked = [entry.asked for entry in self._entries]
        return convergence.summarize(asked, self.trials, self._metric, len(self._cfg.seeds))

    def _draw(self, path: Path, rows: Sequence[convergence.Row]) -> None:
        lines = convergence.curve_lines(rows, convergence.read_curves(self.report.folder))
        write_lines(path.with_name("loss_over_time.csv"), lines)
        convergence.draw(path, rows)

    @property
    def _num_steps(self) -> int:
        cfg = self._cfg
        num_tunings = len(self._buckets) if cfg.tuning_buckets is None else 1
        num_options = len(cfg.reference_lr_factors)
        num_tries = num_tunings * num_options * len(cfg.tuning_seeds) * (num_options > 1)
        num_trainings = num_tries + len(self._buckets) * len(cfg.seeds)
        return num_trainings * sum(entry.max_steps for entry in self._entries)

    def _choose(self, entry: config.Entry, buckets: str) -> tuple[config.Options, float]:
        """Return the best options and their learning rate, trying them all the first time."""
        place = (entry.name, buckets)
        if place not in self._chosen:
            reference = entry.asked.reference
            base = entry.lr if reference is None else self._chosen[(reference, buckets)][1]
            tries = [(one, base * one.lr_factor) for one in config.tries_of(entry)]
            seeds = self._cfg.tuning_seeds if len(tries) > 1 else []
            tried = [
                [self._trial(entry, buckets, one, seed, "tuning") for seed in seeds]
                for one in tries
            ]
            self._chosen[place] = tries[convergence.best_of(tried, self._metric) if seeds else 0]
        return self._chosen[place]

    def _trial(
        self,
        entry: config.Entry,
        buckets: str,
        chosen: tuple[config.Options, float],
        seed: int,
        phase: str = "final",
    ) -> convergence.Trial:
        options, lr = chosen
        cfg = config.config_of(entry, self._buckets[buckets], options, lr)
        key = config.key_of(cfg, entry.broken, seed, self._metric.name, self._cfg.loss_steps)
        labels: dict[str, Any] = {
            **{"key": key, "entry": entry.name, "buckets": buckets, "phase": phase, "seed": seed},
            **{"lr": lr, "lr_factor": options.lr_factor, "dense_share": options.dense_share},
        }
        progress, is_known = self.report.progress, key in self._known
        if is_known and progress is not None:
            progress.leave_out(entry.max_steps)
        elif progress is not None:
            progress.begin(f"{entry.name}, {buckets}, {phase}, seed {seed}, lr {lr:.3g}")
        if not is_known:
            with training.broken(entry.broken):
                self._known[key] = self._train(cfg, labels)
        trial = replace(self._known[key], **labels)
        self._check_start(trial)
        with self.report.lock:
            self.trials.append(trial)
        if self._strategy is not None and self._strategy.is_global_zero and not is_known:
            self.report.write()
        return trial

    def _train(self, cfg: DictConfig, labels: Mapping[str, Any]) -> convergence.Trial:
        if self._strategy is None:
            raise NotTrained
        seed_everything(labels["seed"], workers=True, verbose=False)
        model = build.build_model(cfg)
        weights = training.digest_of(model)

        def new_trainer() -> Trainer:
            return build.build_trainer(cfg, build.build_strategy(cfg))

        ending = training.run_training(
            new_trainer, model, self._datamodule, self._on_step, self._sent_by_a_rank
        )
        steps = self._strategy.reduce(ending.steps, reduce_op="mean")
        assert isinstance(steps, Tensor)
        trial = convergence.Trial(
            **labels,
            metric=self._metric.value_in(ending.metrics),
            train_loss=float(steps[-self._cfg.loss_steps :, 0].mean()) if ending.metrics else nan,
            num_steps=len(steps),
            weights=weights,
            batches=ending.batches,
            train_s=ending.train_s,
        )
        if self._strategy.is_global_zero:
            curve = convergence.curve_of(trial.key, steps.tolist(), self._cfg.curve_steps)
            with self.report.lock:
                convergence.add_trial(self.report.folder, trial, curve)
        same_everywhere: convergence.Trial = self._strategy.broadcast(trial)
        return same_everywhere

    def _sent_by_a_rank(self) -> float | None:
        """Return its share of what its host's interface has sent, in bytes."""
        num_hosts = int(self._cfg.cluster.num_nodes)
        sent = sent_bytes(interface_of(num_hosts))
        return None if sent is None else sent * num_hosts / self._strategy.world_size

    def _check_start(self, trial: convergence.Trial) -> None:
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

    def _on_step(self) -> None:
        if self.report.progress is not None:
            self.report.progress.step()


def _text_of(rows: Sequence[convergence.Row]) -> str:
    return "\n".join(filter(None, (emulated_rig(), convergence.text_of(rows))))
