"""Changes the compressor of gradients as training goes on."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dear.compression import Compressor, Fp32
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import BayesianFusion, FusionPlanner


class CompressionSchedule(Callback):
    """Schedules dense steps first, and densities by step.

    Pass it as `DearStrategy(compressor=..., compression_schedule=...)`, which adds it to the
    trainer's callbacks. Steps are counted by the trainer's `global_step`, which is saved in
    checkpoints and counts the steps of all optimizers. In a dense step nothing is encoded: the
    gradients are sent together with the residuals of earlier steps. With `gather="parameters"` a
    dense step gathers parameters, and not encoded differences.

    Args:
        dense_steps: Number of optimizer steps at the beginning that are dense. 0 means none.
        densities: Step number -> density of a sparse compressor from that step on. Before the first
            of these steps the compressor's own density is used. None means that it is always used.

    Raises:
        ValueError: If a step is negative or no integer. If a density is not in (0, 1], or would
            never be used because another one replaces it before the dense steps end.
        TypeError: If `densities` is no mapping.
    """

    def __init__(
        self,
        dense_steps: int = 0,
        densities: Mapping[int, float] | None = None,
    ) -> None:
        if densities is not None and not isinstance(densities, Mapping):
            raise TypeError(f"densities must be a dict, such as {{1000: 0.01}}, got {densities!r}.")
        self._dense_steps = dense_steps
        steps: tuple[Any, ...] = (dense_steps, *(densities or {}))
        if not all(isinstance(step, int) and step >= 0 for step in steps):
            raise ValueError(
                f"Steps must be integers of at least 0, got dense_steps={dense_steps!r} and"
                f" densities={densities!r}. Correct dense_steps or the keys of densities."
            )
        self._densities = dict(sorted((densities or {}).items()))
        for density in self._densities.values():
            if not 0 < density <= 1:
                raise ValueError(f"Values of densities must be in (0, 1], got {density}.")
        for step, later in pairwise(self._densities):
            if later <= dense_steps:
                raise ValueError(
                    f"The density from step {step} on would never be used. Leave it out: the first"
                    f" dense_steps={dense_steps} steps are dense, and the density from step {later}"
                    " on replaces it."
                )

    def check(self, codec: Compressor | None) -> None:
        """Refuses a compressor that the schedule cannot change.

        Args:
            codec: The strategy's compressor. None means no compressor.

        Raises:
            ValueError: If there is no compressor, if densities are given and it has none, or if
                dense steps come before a compressor that sends votes.
        """
        if codec is None:
            raise ValueError(
                "compression_schedule changes a compressor, but there is none. Set compressor=."
            )
        if self._densities and not codec.has_density:
            raise ValueError(
                f"{codec.name} has no density that densities could change. Leave densities out, or"
                " use topk, randomk, dgc, oktopk, topka, topkdsa, gtopk or gaussiank."
            )
        if self._dense_steps and codec.votes:
            raise ValueError(
                f"dense_steps={self._dense_steps} cannot come before {codec.name}. Leave"
                " dense_steps out. Signs and gradients need different learning rates."
            )

    def check_use(self, planner: FusionPlanner) -> None:
        """Refuses a planner that measures the first steps, if the schedule makes them different.

        Raises:
            ValueError: If `planner` is `BayesianFusion`, and dense steps or densities are given:
                the steps that it measures would send other bytes than later steps.
        """
        if isinstance(planner, BayesianFusion) and (self._dense_steps or self._densities):
            raise ValueError(
                "fusion='bayesian' measures the first steps, in which the compression schedule"
                " sends other bytes than later. Use fusion='mergecomp', which measures the"
                " compressor itself, or 'threshold'."
            )

    def codec_at(self, codec: Compressor, step: int) -> Compressor:
        """Returns the compressor of optimizer step `step`, counted from 0.

        That is `Fp32` in a dense step. Otherwise it is `codec`, with the density of that step if
        one is given.
        """
        if step < self._dense_steps:
            return Fp32()
        reached = [density for begin, density in self._densities.items() if begin <= step]
        return codec.at_density(reached[-1]) if reached else codec

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a fit whose strategy was made without this schedule.

        Does nothing in other stages, such as validation.

        Raises:
            ValueError: If the strategy has another schedule or none.
        """
        if stage == "fit" and getattr(trainer.strategy, "compression_schedule", None) is not self:
            raise ValueError(
                "A CompressionSchedule in Trainer(callbacks=...) changes nothing by itself: pass it"
                " as DearStrategy(compression_schedule=...)."
            )

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        pipeline: Pipeline = trainer.strategy.pipeline_of()
        if (codec := pipeline.options.compressor) is not None:
            pipeline.use_compressor(self.codec_at(codec, trainer.global_step))
