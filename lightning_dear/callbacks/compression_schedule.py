"""Changes what encodes gradients as training goes on."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_dear.compression import Compressor, Fp32, resolve_compressor
from lightning_dear.compression.groups import groups_of
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import BayesianFusion, FusionPlanner


class CompressionSchedule(Callback):
    """Schedules dense steps first, densities by step, and other compressors by parameter.

    `DearStrategy(compressor=..., compression_schedule=...)` puts it among the trainer's callbacks.
    Steps are the trainer's `global_step`, which counts those of all optimizers, so that a resumed
    fit goes on where it was. In a dense step gradients travel as they are, with what was still to
    be sent; `gather="parameters"` sends whole parameters then.

    Args:
        dense_steps: How many optimizer steps nothing is encoded.
        densities: Step -> density from that step on, for sparse codecs, instead of the codec's own;
            before the first of them the codec's own counts.
        compressors: Pattern of parameter names, such as "*.bias" or "*norm*", or "vectors" for all
            parameters of fewer than two dimensions -> what encodes them instead ("none": nothing).
            The first match counts. They are put into buckets of their own.

    Attributes:
        groups: What `compressors` means, for `ExchangeOptions`.

    Raises:
        ValueError: For steps that are no integers or negative, densities outside (0, 1] or for none
            but dense steps, and unknown compressors.
    """

    def __init__(
        self,
        dense_steps: int = 0,
        densities: Mapping[int, float] | None = None,
        compressors: Mapping[str, str | Compressor] | None = None,
    ) -> None:
        for name, given, example in (
            ("densities", densities, {1000: 0.01}),
            ("compressors", compressors, {"vectors": "none"}),
        ):
            if given is not None and not isinstance(given, Mapping):
                raise TypeError(f"{name} must be a dict, such as {example}, got {given!r}.")
        resolved = {name: resolve_compressor(one) for name, one in (compressors or {}).items()}
        self.groups = groups_of(resolved)
        self._dense_steps = dense_steps
        steps: tuple[Any, ...] = (dense_steps, *(densities or {}))
        if not all(isinstance(step, int) and step >= 0 for step in steps):
            raise ValueError(
                f"Steps must be integers of at least 0, got dense_steps={dense_steps!r} and"
                f" densities={densities!r}."
            )
        self._densities = dict(sorted((densities or {}).items()))
        for density in self._densities.values():
            if not 0 < density <= 1:
                raise ValueError(f"density must be in (0, 1], got {density}.")
        for step, later in pairwise(self._densities):
            if later <= dense_steps:
                raise ValueError(
                    f"The density from step {step} on would never be used: dense_steps="
                    f"{dense_steps} come first, and that from step {later} on replaces it. Leave it"
                    " out."
                )

    def check(self, codec: Compressor | None) -> None:
        """Refuses a codec that the schedule cannot change.

        Raises:
            ValueError: Without one, for dense steps before votes, and for densities of a codec that
                has none.
        """
        if codec is None:
            raise ValueError(
                "compression_schedule changes a compressor, and there is none: set compressor=."
            )
        if self._densities and not codec.has_density:
            raise ValueError(
                "densities belong to compressors that have one (topk, randomk, dgc, oktopk, topka,"
                f" topkdsa, gtopk, gaussiank), and {codec.name} is none."
            )
        if self._dense_steps and codec.votes:
            raise ValueError(
                f"dense_steps={self._dense_steps} cannot come before {codec.name}: signs would be"
                " stepped with the same learning rate as gradients. Leave dense_steps out."
            )

    def check_use(self, planner: FusionPlanner) -> None:
        """Refuses what would not go with all codecs that the configured one becomes.

        Raises:
            ValueError: For a planner that would measure steps of another codec than most will have.
        """
        if isinstance(planner, BayesianFusion) and (self._dense_steps or self._densities):
            raise ValueError(
                "fusion='bayesian' measures the first steps, in which the compression schedule"
                " sends other bytes than later. Use fusion='mergecomp', which measures the"
                " compressor itself, or 'threshold'."
            )

    def codec_at(self, codec: Compressor, step: int) -> Compressor:
        """Returns what encodes optimizer step `step`, counted from 0."""
        if step < self._dense_steps:
            return Fp32()
        place = bisect_right(list(self._densities), step)
        return codec.at_density(list(self._densities.values())[place - 1]) if place else codec

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a fit whose strategy does not know the schedule.

        Raises:
            ValueError: Saying where to pass it.
        """
        if stage == "fit" and getattr(trainer.strategy, "compression_schedule", None) is not self:
            raise ValueError(
                "A CompressionSchedule in Trainer(callbacks=...) changes nothing by itself: pass it"
                " as DearStrategy(compression_schedule=...)."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        pipeline: Pipeline = strategy.pipeline_of()
        codec = pipeline.options.compressor
        if codec is not None:
            pipeline.use_compressor(self.codec_at(codec, trainer.global_step))
