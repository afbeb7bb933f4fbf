"""Logs each step's exposed communication and sent bytes, and the compressor's figures.

Exposed communication is the time in which computation waited for communication.
"""

import time
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.telemetry.statistics import latest_rank, median_and_error

_NUM_WARM_UP_STEPS = 3
_FIGURES = ("exposed_s", "exposed_reduce_scatter_s", "exposed_all_gather_s", "wire_bytes")


def _is_logged(trainer: Trainer, step: int) -> bool:
    """Whether Lightning logs the step of this number, from 1."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return interval > 0 and step % interval == 0


class DearMonitor(Callback):
    """Logs figures of every step with `log_dict`, and returns their medians from `summary`.

    Lightning writes every `log_every_n_steps`-th of them to the logger. Under `strategy="dear"`
    this callback logs:

    - `dear/exposed_s`: seconds that computation waited for communication. It is the sum of
      `dear/exposed_reduce_scatter_s` and `dear/exposed_all_gather_s`.
    - `dear/wire_bytes`: bytes of payload that this rank sent.
    - `dear/bucket_fill`: share of the buckets' elements that is not padding.
    - With a compressor, at the steps that Lightning logs: `dear/compression_ratio`,
      `dear/residual_norm`, `dear/lag`, and the figures of sparse all-reduces (see
      `ActivePlan.encoding_figures`). Not under manual optimisation, where Lightning does not call
      the hook in which they are read.
    - With local steps, from the step of a merge until the next one: `dear/exchanges`, the number of
      fragments merged so far; `dear/exchange_exposed_s` and `dear/exchange_wire_bytes`, seconds
      that training has waited and bytes that this rank has sent since the merge before;
      `dear/pseudo_gradient_norm` and `dear/agreement`, norm of the mean pseudo-gradient and mean
      cosine of ranks' own to it, of the exchange before. The last two need this callback on all
      ranks. At the steps that Lightning logs also `dear/drift`, how far this rank's replica is from
      the anchor, and the first two figures of a compressor. See `OuterHalf.figures`.
    - The plan's name, as a hyper-parameter, whenever another plan is used.
    - At the end of each epoch, with several ranks, the same on all of them: `dear/late_rank`, the
      rank that the others waited for, and `dear/late_s`, the seconds in a step that they waited
      longer than that rank. The rank is -1 if that is less than a tenth of a step, or if waits
      differ too much from step to step to tell. Ranks compare their median `dear/exposed_s` of this
      epoch, see `latest_rank`. With local steps it is `dear/exchange_exposed_s`, and each exchange
      is taken for a step. Waits in other collectives, such as those of SyncBatchNorm, are not
      counted: a rank that the others wait for there is not named. Both figures are left out, with a
      warning, unless all ranks have this callback. They have not been tried on NCCL.

    Seconds and bytes of a step are those of the step before, so that the host need not wait for the
    GPU. Those of an exchange are logged at once.
    Under other strategies nothing is logged, and `summary` has only the step time.

    The step time ("step_s") is only in `summary`. A step lasts from the beginning of its first
    batch to the beginning of the next step's first batch, with all waits in between. The last step
    before a validation or the end of an epoch is not timed.

    Attributes:
        is_on_all_ranks: Whether there are several ranks and all have this callback, so that they
            may exchange figures. False at first; `append_callbacks` assigns to it.
    """

    is_on_all_ranks = False

    def __init__(self) -> None:
        self.on_fit_start()

    @override
    def on_fit_start(self, *_: Any) -> None:
        self._encoding: dict[str, Any] = {}
        self._steps: dict[str, list[float]] = {}
        self._plan_name: str | None = None
        self._latest: Any = None
        self._began_s: float | None = None
        self._began_at = -1
        self._num_compared = _NUM_WARM_UP_STEPS
        self._num_exchanges: float | None = None

    @override
    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        # The compressor's figures are read in this hook, since forward has waited for the
        # parameters by now, and backward has not encoded new gradients yet.
        figures = getattr(trainer.strategy, "encoding_figures", dict)
        self._encoding = figures() if _is_logged(trainer, trainer.global_step + 1) else {}

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        # Read once now, because on a GPU waits are timed only after `statistics` was first read.
        self._latest = getattr(trainer.strategy, "statistics", None)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_s = None

    on_validation_start = on_train_epoch_start

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        now_s = time.perf_counter()
        if self._began_s is None or trainer.global_step > self._began_at:
            if self._began_s is not None:
                self._note({"step_s": now_s - self._began_s})
            self._began_s, self._began_at = now_s, trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._began_at:
            # No step was made after this batch, since gradients accumulate.
            return
        exchange = self._exchange_figures(trainer)
        statistics, self._latest = self._latest, getattr(trainer.strategy, "statistics", None)
        plan = getattr(trainer.strategy, "plan", None)
        if statistics is None or plan is None:
            return
        figures = {name: float(getattr(statistics, name)) for name in _FIGURES}
        figures["bucket_fill"] = plan.fill
        self._note(figures)
        logged = {**figures, **self._encoding, **exchange}
        pl_module.log_dict({f"dear/{name}": value for name, value in logged.items()})
        if plan.name != self._plan_name:
            self._plan_name = plan.name
            for logger in trainer.loggers:
                logger.log_hyperparams({"dear/plan": plan.name})

    def _exchange_figures(self, trainer: Trainer) -> dict[str, float]:
        """Returns figures of local steps' last exchange. Notes those of each exchange once."""
        ask: Any = getattr(trainer.strategy, "exchange_figures", None)
        if ask is None:
            return {}
        is_logged = _is_logged(trainer, trainer.global_step)
        found: dict[str, float] = ask(on_all_ranks=self.is_on_all_ranks, with_drift=is_logged)
        if (number := found.get("exchanges")) != self._num_exchanges:
            self._num_exchanges = number
            self._note({name: value for name, value in found.items() if name != "exchanges"})
        return found

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs which rank is late. Collective. Blocks."""
        name = "exposed_s" if self._num_exchanges is None else "exchange_exposed_s"
        waits_s = self._steps.get(name, [])
        if not (waits_s and self.is_on_all_ranks):
            return
        own_s = waits_s[self._num_compared :] or waits_s
        self._num_compared = max(self._num_compared, len(waits_s))
        # If each epoch has one step, no step is timed, and no rank is named.
        steps_s = self._steps.get("step_s", [float("inf")])
        # With local steps, the time between two exchanges counts.
        step_s = median(steps_s[-len(own_s) :]) * max(1.0, len(steps_s) / len(waits_s))
        rank, late_s = latest_rank(from_all_ranks((*median_and_error(own_s), step_s)))
        figures = {"dear/late_rank": -1.0 if rank is None else float(rank), "dear/late_s": late_s}
        # All ranks have the same. Without `sync_dist` Lightning would advise to average them.
        pl_module.log_dict(figures, sync_dist=True, reduce_fx="max")

    def _note(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._steps.setdefault(name, []).append(value)

    def summary(self) -> dict[str, float]:
        """Returns figure, such as "step_s" -> median over all steps of the fit but the first three.

        If there are at most three steps, all of them count.
        """
        steps = self._steps.items()
        return {name: median(values[_NUM_WARM_UP_STEPS:] or values) for name, values in steps}
