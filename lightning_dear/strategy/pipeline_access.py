"""What a user may ask of the strategy while it trains."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import BucketPlan, save_plan
from lightning_dear.telemetry.statistics import StepStatistics
from lightning_dear.telemetry.timeline import Timeline


class PipelineAccess:
    """Part of the strategy: reading parameters, the plan, what a step cost."""

    _pipeline: Pipeline | None

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent.

        Only needed before reading parameters through references that were taken before, such as a
        list kept since construction; reads through modules wait by themselves.
        """
        if self._pipeline is not None:
            self._pipeline.complete_parameters(reason)

    def sync_replicas(self) -> None:
        """Gives all ranks the parameters that their owners step. All ranks call; blocks.

        Where a compressor encodes differences of parameters, these are a little behind; elsewhere
        nothing changes. What was written to weights since the last step counts. Between an
        optimizer step and the next forward.

        Raises:
            RuntimeError: See `SavedState.prepare_state`.
        """
        for part in () if self._pipeline is None else self._pipeline.parts:
            part.sync_replicas()

    @property
    def plan(self) -> BucketPlan | None:
        """The first optimizer's buckets; None before its first step of a fit."""
        return None if self._pipeline is None else self._pipeline.parts[0].plan

    def save_plan(self, path: str | Path) -> None:
        """Writes the first optimizer's plan to a JSON file, for `planning.FixedPlan(path)`.

        All ranks have the same plan; call on one of each host, as every caller writes the file.

        Raises:
            RuntimeError: If there is no plan yet.
        """
        if self._pipeline is None or self._pipeline.parts[0].plan is None:
            raise RuntimeError("There is a plan from the first step of a fit on.")
        save_plan(path, self._pipeline.parts[0].plan, self._pipeline.parts[0].tensors)

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """What the compressor saves and leaves over, for the first optimizer; empty without one.

        See `OptimizerPipeline.encoding_figures`.
        """
        return {} if self._pipeline is None else self._pipeline.parts[0].encoding_figures()

    @property
    def statistics(self) -> StepStatistics | None:
        """What the last optimizer step cost; None outside a fit."""
        return None if self._pipeline is None else self._pipeline.statistics

    @property
    def timeline(self) -> Timeline | None:
        """Where spans are recorded at present. Assign a `Timeline` to record, None to stop."""
        return None if self._pipeline is None else self._pipeline.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if self._pipeline is None:
            raise RuntimeError("A timeline can be recorded only during fit.")
        self._pipeline.timeline = timeline
