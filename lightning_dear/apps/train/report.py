"""Output of ``dear-train``: a line for each epoch, and the table at the end of a run."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig
from typing_extensions import override

from lightning_dear.callbacks import DearMonitor
from lightning_dear.emulation import emulated_rig
from lightning_dear.studies import table as tables

_TITLES = {"test_acc": "test accuracy", "test_bits_per_byte": "test bits per byte"}
_NOT_MEASURED = "not measured"


def summary_of(trainer: Any) -> dict[str, float]:
    """Return the medians of the trainer's `DearMonitor`; empty if it has no such callback."""
    return next((one.summary() for one in trainer.callbacks if isinstance(one, DearMonitor)), {})


class EpochLines(Callback):
    """Prints a line after each epoch on rank 0 if there is no progress bar (no terminal)."""

    @override
    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.progress_bar_callback is None:
            metrics = {name: float(one) for name, one in trainer.callback_metrics.items()}
            shown = [f"{name} {one:.4g}" for name, one in metrics.items() if "/" not in name]
            epoch = f"Epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
            print(", ".join([epoch, *shown]), flush=True)


@contextmanager
def folder_named(trainer: Trainer) -> Iterator[None]:
    """Print, after Ctrl-C, the job's folder and how to continue."""
    try:
        yield
    except SystemExit:
        if trainer.is_global_zero:
            print(_where(trainer), file=sys.stderr, flush=True)
        raise


def _where(trainer: Trainer) -> str:
    saved = getattr(trainer.checkpoint_callback, "best_model_path", "")
    goes_on = f"Go on from the last checkpoint: ckpt_path={saved}\n" if saved else ""
    return f"{goes_on}Config, metrics, logs: {HydraConfig.get().runtime.output_dir}"


_JOBS: list[tuple[list[str], dict[str, str]]] = []
"""Overrides and table of each job of a sweep that has run in this process."""


def end_of_job(cfg: DictConfig, trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Print the table of a job, and keep it for the table of the sweep."""
    tokens = cfg.data.get("context_length")
    batch = cfg.data.get("batch_size", 0) * int(tokens or 1) * trainer.accumulate_grad_batches
    unit = "tokens" if tokens else "samples"
    table = rows(metrics, summary_of(trainer), batch * trainer.world_size, unit)
    words, groups = list(HydraConfig.get().overrides.task), HydraConfig.get().runtime.choices
    chosen = [word for word in words if word.lstrip("+").partition("=")[0] in groups]
    title = f"{cfg.task_name}: {type(trainer.strategy).__name__}, {trainer.world_size} rank(s)"
    print(format_table(" ".join([title, *chosen]), table), _where(trainer), sep="\n")
    _JOBS.append((words, dict(table)))


def jobs_end() -> None:
    """Print a table of all jobs of a sweep, if there were several."""
    if len(_JOBS) > 1:
        alike, titles = set.intersection(*(set(words) for words, _ in _JOBS)), list(_JOBS[0][1])
        cells = []
        for words, found in _JOBS:
            job = " ".join(one for one in words if one not in alike)
            cells.append([job, *(found.get(one, "") for one in titles)])
        print(tables.format_table(["job", *titles], cells, tables.WIDTH))


def rows(
    metrics: Mapping[str, float], summary: Mapping[str, float], batch: int = 0, unit: str = ""
) -> list[tuple[str, str]]:
    """Return titles and values: the test metrics, then time and bytes of a step.

    Args:
        metrics: Test metrics by name.
        summary: Medians over the steps: ``step_s``, ``wire_bytes`` and ``exposed_s``.
        batch: Samples, or tokens, that all ranks together process in a step. 0 means unknown.
        unit: "samples" or "tokens".
    """
    table = [(_TITLES.get(name, name), f"{value:.4f}") for name, value in metrics.items()]
    table.append(("step time (median)", _milliseconds(summary.get("step_s"))))
    if batch and summary.get("step_s"):
        table.append((f"{unit} per second", f"{batch / summary['step_s']:,.0f}"))
    sent, exposed = summary.get("wire_bytes"), _milliseconds(summary.get("exposed_s"))
    sent_bytes = _NOT_MEASURED if sent is None else f"{sent:,.0f}"
    table.append(("bytes on the wire per step and rank", sent_bytes))
    return [*table, ("exposed communication per step (median)", exposed)]


def format_table(title: str, table: list[tuple[str, str]]) -> str:
    """Return the rows under a title, in two aligned columns between rules.

    On emulated hosts the first line describes these hosts and their links.
    """
    left, right = (max(map(len, column)) for column in zip(*table, strict=True))
    text = "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in table)
    rule = "-" * max(len(title), *map(len, text.splitlines()))
    return "\n".join([*filter(None, [emulated_rig()]), rule, title, rule, text, rule])


def _milliseconds(seconds: float | None) -> str:
    return _NOT_MEASURED if seconds is None else f"{seconds * 1e3:.2f} ms"
