"""The trainings of ``dear-converge``, as each of the started ranks runs them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig
from torch import Tensor

from lightning_dear.apps import emulated
from lightning_dear.apps.bench import build
from lightning_dear.apps.converge import config
from lightning_dear.apps.program import Program
from lightning_dear.emulation import emulated_rig
from lightning_dear.studies import block, convergence, files, machine, progress, report, training


def run_job(cfg: DictConfig, program: Program) -> None:
    """Train the entries of ``cfg`` on its seeds; print and write how they end.

    Starts the ranks once, and blocks until they have ended. Every training is written when it
    ends. Trainings that the job's folder already holds are not repeated.

    Args:
        cfg: Config of the job.
        program: Program that runs this job.

    Raises:
        SystemExit: After an error, which is printed.
    """
    study = Study(cfg, config.entries_of(cfg), program.folder)
    if not emulated.restart_on_cluster(cfg, "lightning_dear.apps.converge"):
        build.run_on_ranks(cfg, study.run, study.report, program)


class Study:
    """All trainings of a job.

    Args:
        cfg: Config of the job.
        entries: Entries to train; every entry comes after its reference.
        folder: Folder with the trainings of earlier runs. New ones are added. Rank 0 reads and
            writes it.

    Attributes:
        trials: Trainings so far: measured in this run, or found in the folder.
        report: Report of these trainings.
    """

    def __init__(self, cfg: DictConfig, entries: Sequence[config.Entry], folder: Path) -> None:
        self._cfg = cfg
        self._entries = entries
        self._buckets = config.buckets_of(cfg)
        self._metric = convergence.Metric(**cfg.metric)
        self._starts: dict[int, files.Line] = {}
        self.trials: list[files.Line] = []
        self.report = report.Report(folder, self._rows, _text_of, convergence.draw)

    def run(self, starter: Trainer) -> None:
        """Choose options for each entry, then train it on all seeds. Collective. Blocks.

        Raises:
            RuntimeError: If two entries began with different weights, or got different batches, on
                the same seed.
        """
        self._strategy: Any = starter.strategy
        self._datamodule = instantiate(self._cfg.data, _convert_="all")
        known = convergence.read_trials(self.report.folder) if starter.is_global_zero else {}
        self._known: dict[str, files.Line] = self._strategy.broadcast(known)
        if starter.is_global_zero:
            self.report.progress = progress.Progress(self._num_steps)
        lrs: dict[str | None, float] = {}
        for entry in self._entries:
            base_lr = lrs.get(entry.reference, entry.lr)
            options = self._choose(entry, base_lr)
            lrs[entry.name] = base_lr * options.lr_factor
            for buckets in self._buckets:
                for seed in self._cfg.seeds:
                    self._trial(entry, options, base_lr, buckets, seed)

    def _rows(self) -> list[files.Line]:
        """Return the rows of all trainings so far."""
        return convergence.summarize(self._entries, self.trials, self._metric, len(self._cfg.seeds))

    @property
    def _num_steps(self) -> int:
        num_tries = len(self._cfg.reference_lr_factors)
        num_tunings = num_tries * len(self._cfg.tuning_seeds) * (num_tries > 1)
        num_trainings = num_tunings + len(self._buckets) * len(self._cfg.seeds)
        return num_trainings * sum(entry.max_steps for entry in self._entries)

    def _choose(self, entry: config.Entry, base_lr: float) -> config.Options:
        """Return the best options of an entry. If there is only one choice, nothing is trained."""
        if len(entry.tries) == 1:
            return entry.tries[0]
        buckets, seeds = list(self._buckets)[-1], self._cfg.tuning_seeds
        tried = [
            [self._trial(entry, options, base_lr, buckets, seed) for seed in seeds]
            for options in entry.tries
        ]
        return entry.tries[convergence.best_of(tried, self._metric)]

    def _trial(
        self, entry: config.Entry, options: config.Options, base_lr: float, buckets: str, seed: int
    ) -> files.Line:
        """Return a training: the folder's, or a new one. Collective. Blocks if it is new."""
        lr = base_lr * options.lr_factor
        # Tuning seeds are disjoint from `seeds`, so the seed tells the phase.
        phase = "final" if seed in self._cfg.seeds else "tuning"
        cfg = config.config_of(entry, self._buckets[buckets], options, lr)
        key = config.key_of(cfg, seed, self._metric.name, self._cfg.loss_steps)
        labels = {"key": key, "entry": entry.name, "buckets": buckets, "phase": phase, "seed": seed}
        labels |= {"lr_factor": options.lr_factor, "lr": lr, "dense_share": options.dense_share}
        is_known = key in self._known
        if is_known:
            self.report.progress.leave_out(entry.max_steps)
        else:
            what = f"{entry.name}, {buckets}, {phase}, seed {seed}, lr {lr:.3g}"
            self.report.progress.begin(what)
            self._known[key] = self._train(cfg, labels)
        trial = {**self._known[key], **labels}
        self._check_start(trial)
        with self.report.lock:
            self.trials.append(trial)
        if self._strategy.is_global_zero and not is_known:
            self.report.write()
        return trial

    def _train(self, cfg: DictConfig, labels: files.Line) -> files.Line:
        seed_everything(labels["seed"], workers=True, verbose=False)
        model = build.build_model(cfg)
        weights = training.digest_of(model)

        def new_trainer() -> Trainer:
            return build.build_trainer(cfg, build.build_strategy(cfg))

        on_step, sent = self.report.progress.step, self._sent_by_a_rank
        ending = training.run_training(new_trainer, model, self._datamodule, on_step, sent)
        steps: Tensor = self._strategy.reduce(ending.steps, reduce_op="mean")
        last_losses = steps[-self._cfg.loss_steps :, 0]
        trial = {
            **labels,
            "metric": self._metric.value_in(ending.metrics),
            "train_loss": float(last_losses.mean()) if ending.metrics else float("nan"),
            "num_steps": len(steps),
            "weights": weights,
            "batches": ending.batches,
            "train_s": ending.train_s,
        }
        if self._strategy.is_global_zero:
            curve = convergence.curve_of(trial, steps.tolist(), self._cfg.curve_steps)
            with self.report.lock:
                convergence.add_trial(self.report.folder, trial, curve)
        return dict(self._strategy.broadcast(trial))

    def _sent_by_a_rank(self) -> float:
        """Return this rank's equal share of the bytes that its host's interface has sent so far."""
        num_hosts, world_size = int(self._cfg.cluster.num_nodes), float(self._strategy.world_size)
        return machine.sent_bytes(block.interface_of(num_hosts)) * num_hosts / world_size

    def _check_start(self, trial: files.Line) -> None:
        first = self._starts.setdefault(trial["seed"], trial)
        names = "weights", "batches", "num_steps"
        weights, batches, num_steps = (trial[name] == first[name] for name in names)
        if not weights or (num_steps and not batches):
            what = "batches" if weights else "initial weights"
            raise RuntimeError(
                f"On seed {trial['seed']}, {trial['entry']} ({trial['buckets']}) and"
                f" {first['entry']} ({first['buckets']}) did not have the same {what}. Take"
                " options of model and data out of the entries. If raw.csv has trainings of another"
                " machine, choose another folder (hydra.run.dir=...)."
            )


def _text_of(rows: Sequence[files.Line]) -> str:
    return "\n".join(filter(None, (emulated_rig(), convergence.text_of(rows))))
