"""Records two batches of a fit, and draws when compute and communication ran."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.telemetry.statistics import latest_rank
from lightning_dear.telemetry.timeline import Timeline, plot_timeline

_NUM_BATCHES = 2


class TimelineCallback(Callback):
    """Writes `timeline.json` (Chrome trace, opens in Perfetto) and `timeline.png` on rank 0.

    The picture needs matplotlib, which the extra `apps` installs. Without it only the JSON file is
    written, with a warning.

    Two batches in a row are recorded, since the all-gathers of the first step overlap with the
    forward of the second one. With local steps so many are recorded that an exchange begins and
    ends within them; what is still under way then is left out. Recording makes these steps slower.
    The files are written before the batch after them, or at the end of training. Under other
    strategies nothing is recorded, and rank 0 warns. The environment variable
    LIGHTNING_DEAR_TIMELINE=FOLDER adds this callback, with FOLDER as `dirpath`, to each fit under
    `strategy="dear"` whose trainer has no such callback.

    The title says which rank the others wait for in the recorded batches (`latest_rank`), if all
    ranks have this callback with the same `step`.

    Args:
        step: Index of the first recorded batch, counted from 0 through all epochs of the fit. Batch
            0 overlaps nothing, since the plan does not exist yet. If gradients accumulate, name a
            batch that ends in an optimizer step.
        dirpath: Folder of the files. None means the trainer's `default_root_dir`.
        warns: Whether rank 0 warns if nothing is recorded or written.

    Attributes:
        is_on_all_ranks: Same as in `DearMonitor`.

    Raises:
        ValueError: If `step` is negative.
    """

    is_on_all_ranks = False

    def __init__(self, step: int = 10, dirpath: str | None = None, warns: bool = True) -> None:
        if step < 0:
            raise ValueError(f"step of TimelineCallback must be >= 0, got {step}.")
        self.step = step
        self.dirpath, self._warns = dirpath, warns
        self._timeline: Timeline | None = None
        self._num_seen = 0

    @override
    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        self._num_seen, self._timeline = 0, None
        if self._warns and not hasattr(trainer.strategy, "timeline"):
            rank_zero_warn("TimelineCallback records nothing. It needs Trainer(strategy='dear').")

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not hasattr(trainer.strategy, "timeline"):
            return
        if self._num_seen == self.step:
            self._timeline = trainer.strategy.timeline = Timeline()
        elif self._timeline and self._num_seen >= self.step + _num_batches(self._timeline, trainer):
            self._write(trainer, self._timeline)
        self._num_seen += 1

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self._timeline is not None:
            self._write(trainer, self._timeline)
        elif self._warns and hasattr(trainer.strategy, "timeline") and self._num_seen <= self.step:
            rank_zero_warn(
                f"No timeline was written: training ended after {self._num_seen} batches. Use a"
                f" smaller step than in TimelineCallback(step={self.step}), or train longer."
            )

    def _write(self, trainer: Trainer, timeline: Timeline) -> None:
        """Writes the files on rank 0. Collective and blocks if all ranks have this callback."""
        self._timeline = None
        trainer.strategy.timeline = None  # type: ignore[attr-defined]
        # With local steps other ranks may launch their part of a message some steps later: to wait
        # for it here, before this rank trains on, could last forever.
        timeline.clock.finish(waits=not timeline.exchange_steps)
        late = str(latest_rank(from_all_ranks(timeline.waited))) if self.is_on_all_ranks else ""
        if trainer.is_global_zero:
            directory = Path(self.dirpath or trainer.default_root_dir)
            directory.mkdir(parents=True, exist_ok=True)
            timeline.write_chrome_trace(directory / "timeline.json")
            try:
                drawn = timeline.spans, directory / "timeline.png", late
                plot_timeline(*drawn, _num_batches(timeline, trainer))
            except ModuleNotFoundError as error:
                rank_zero_warn(f"{error}. Only timeline.json was written, to {directory}.")


def _num_batches(timeline: Timeline, trainer: Trainer) -> int:
    """Number of batches to record."""
    return max(_NUM_BATCHES, timeline.exchange_steps * trainer.accumulate_grad_batches)
