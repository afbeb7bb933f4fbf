"""What a user may ask of `DearFabricStrategy`: the gradients, the parameters, what a step cost."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.wrappers import is_wrapped
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.fabric.module import DearModule
from lightning_dear.planning import BucketPlan
from lightning_dear.telemetry.statistics import StepStatistics


def inner(optimizer: Any) -> Optimizer:
    """Torch's optimizer in what `fabric.setup` returned, or `optimizer` itself."""
    found: Optimizer = optimizer.optimizer if is_wrapped(optimizer) else optimizer
    return found


class FabricAccess:
    """Part of the strategy: knows what was set up and is still there."""

    _setups: list[weakref.ref[DearModule]]

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent.

        Only needed before reading parameters through references that were taken before, such as a
        list kept since construction; reads through modules wait by themselves.
        """
        for one in self._trained:
            one.pipeline.complete_parameters(reason)

    def sync_replicas(self) -> None:
        """Gives all ranks the parameters that their owners step. All ranks call; blocks.

        Where a compressor encodes differences of parameters, these are a little behind; elsewhere
        nothing happens. Between an optimizer step and the next forward.
        """
        for one in self._trained:
            for part in one.pipeline.parts:
                part.sync_replicas()

    def encoding_figures(self, optimizer: Optimizer | None = None) -> dict[str, Tensor | float]:
        """What the compressor saves and leaves over; empty without one. Local, no wait.

        See `OptimizerPipeline.encoding_figures`.

        Args:
            optimizer: Of which parameters; not needed where there is one.
        """
        return self._part(optimizer).encoding_figures()

    def pipeline_of(self, optimizer: Optimizer | None = None) -> Pipeline:
        """What trains `optimizer`'s parameters; has `statistics` and `timeline`.

        Args:
            optimizer: One that was set up; not needed where one module was.

        Raises:
            RuntimeError: If nothing was set up with an optimizer.
            ValueError: If it is not clear which pipeline is meant.
        """
        trained = self._trained
        if not trained:
            raise RuntimeError("Nothing is being trained; call fabric.setup(model, optimizer).")
        if optimizer is not None:
            own = inner(optimizer)
            trained = [one for one in trained if one.trains(own)]
            if not trained:
                raise ValueError(f"This {type(own).__name__} was not set up, or has ended.")
        if len(trained) > 1:
            raise ValueError("Several models were set up; pass the optimizer of one of them.")
        pipeline: Pipeline = trained[0].pipeline
        return pipeline

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets of the only model's first optimizer; None before its first step."""
        return self.pipeline_of().parts[0].plan

    @property
    def statistics(self) -> StepStatistics:
        """What the last optimizer step of the only model cost."""
        return self.pipeline_of().statistics

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the mean gradient as it came, from the shards of all ranks.

        For use between `fabric.backward` and `step()`. With a GradScaler it is that of the scaled
        gradient until `fabric.clip_gradients`. All ranks call; blocks until gradients are reduced.

        Args:
            optimizer: Of which parameters; not needed where there is one.
            norm_type: p of the p-norm; `inf` for the largest absolute value.
        """
        return self._part(optimizer).grad_norm(norm_type)

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer | None = None) -> Generator[None, None, None]:
        """Lets `.grad` hold the mean gradient in the `with` block; what is done to it counts.

        For code between `fabric.backward` and `step()` that reads or changes gradients itself.
        Costs one all-gather. All ranks call; blocks.

        Args:
            optimizer: Of which parameters; not needed where there is one.
        """
        part = self._part(optimizer)
        part.expose_gradients()
        yield
        part.reduce()

    def _part(self, optimizer: Optimizer | None) -> OptimizerPipeline:
        pipeline = self.pipeline_of(optimizer)
        if optimizer is not None:
            return pipeline.of(inner(optimizer))
        if len(pipeline.parts) > 1:
            raise ValueError("There are several optimizers; say of which one.")
        return pipeline.parts[0]

    @property
    def _all(self) -> list[DearModule]:
        return [module for ref in self._setups if (module := ref()) is not None]

    @property
    def _trained(self) -> list[Any]:
        return [module for module in self._all if module.pipeline is not None]
