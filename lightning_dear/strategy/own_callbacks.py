"""The callbacks that the strategy puts among the trainer's."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.callbacks.fusion_tuner import FusionTuner
from lightning_dear.callbacks.guards import CompletionGuard, GradientGuard, gradient_readers
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner, SearchingPlanner
from lightning_dear.strategy.precision import unwrapped
from lightning_dear.strategy.refusals import warn_about_readers, why_not_early


class OwnCallbacks(DDPStrategy):
    """Part of the strategy: a search for plans, a schedule, and guards around the user's hooks."""

    _pipeline: Pipeline | None
    _fusion: FusionPlanner
    _schedule: CompressionSchedule | None
    _options: ExchangeOptions
    _gradients_in_hooks: bool
    _is_sync_blocked: bool

    def complete_parameters(self, reason: str = "read") -> None:
        """See `PipelineAccess`."""
        raise NotImplementedError

    def _on_failure(self, exception: BaseException) -> None:
        raise NotImplementedError

    def _append_callbacks(self, trainer: pl.Trainer) -> None:
        """Those that work between two steps; once for a trainer."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING:
            return
        is_searching = isinstance(self._fusion, SearchingPlanner)
        if is_searching and not any(isinstance(one, FusionTuner) for one in callbacks):
            assert isinstance(self._fusion, SearchingPlanner)
            callbacks.append(FusionTuner(self._fusion, lambda: self._pipeline))
        if self._schedule is not None:
            self._schedule.connect(lambda: self._pipeline)
            if self._schedule not in callbacks:
                callbacks.append(self._schedule)

    def _insert_guards(self, trainer: pl.Trainer) -> None:
        """Those in front of all others, for as long as there is a pipeline."""
        assert self.lightning_module is not None
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        guards = (CompletionGuard, GradientGuard)
        callbacks[:] = [one for one in callbacks if not isinstance(one, guards)]
        readers = gradient_readers((*callbacks, self.lightning_module))
        assert self._pipeline is not None
        self._pipeline.refuse_early(why_not_early(trainer, self.optimizers, readers))
        uses_buckets = self._options.uses_buckets(self._pipeline.collectives)
        if readers and self._gradients_in_hooks and uses_buckets:
            warn_about_readers(readers)
            callbacks.insert(0, GradientGuard(readers, self._expose_gradients))
        callbacks.insert(0, CompletionGuard(self.complete_parameters, self._on_failure))

    def _expose_gradients(self, optimizer: Optimizer | None) -> None:
        assert self._pipeline is not None
        if optimizer is not None:
            self._pipeline.of(unwrapped(optimizer)).expose_gradients()
        elif not self._is_sync_blocked:
            for part in self._pipeline.parts:
                part.expose_gradients()
