"""What of an optimizer goes into checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.checkpoint.residual_keeper import ResidualKeeper
from lightning_dear.checkpoint.sharded_state import sharded_state
from lightning_dear.checkpoint.whole_state import consolidate
from lightning_dear.collectives.work import Collectives
from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.optimizers.masters import LeftWeights
from lightning_dear.optimizers.sharded import ShardedOptimizer
from lightning_dear.planning import BucketPlan
from lightning_dear.telemetry.statistics import Instruments


class SavedState:
    """The optimizer's state with all ranks' residuals; a part of `OptimizerPipeline`."""

    optimizer: Optimizer
    plan: BucketPlan | None
    sharded: ShardedOptimizer
    _active: ActivePlan | None
    _collectives: Collectives
    _instruments: Instruments
    _residuals: ResidualKeeper
    _left: LeftWeights

    @property
    def parameters(self) -> Sequence[Parameter]:
        """See `PlanChanges`."""
        raise NotImplementedError

    def complete_parameters(self, reason: str = "read") -> None:
        """See `OptimizerPipeline`."""
        raise NotImplementedError

    def _take_over(self, but: Collection[int] = ()) -> None:
        raise NotImplementedError

    def optimizer_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole tensors, on every rank. Collective, blocks."""
        self.prepare_state()
        with self._instruments.not_counting():
            if self.plan is None:
                return self._residuals.add_to(self.optimizer.state_dict())
            state = consolidate(self.sharded, self.plan, self.parameters, self._collectives)
            return self._residuals.add_to(state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()`, tensors left where they are. Collective, blocks."""
        self.prepare_state()
        if self.plan is None:
            return self._residuals.add_to_sharded(self.optimizer.state_dict())
        state = sharded_state(self.sharded, self.parameters, self._collectives)
        return self._residuals.add_to_sharded(state)

    @torch.no_grad()
    def sync_replicas(self) -> None:
        """Gives all ranks the parameters that their owners step. Collective, blocks.

        Where differences of parameters are encoded, for what is to be exported: weights are then
        those of a dense step. What was written or loaded since the last step counts. Between two
        steps.

        Raises:
            RuntimeError: See `prepare_state`.
        """
        self.prepare_state("sync_replicas")
        self._left.sync()
        if self._active is not None:
            for bucket in self._active.flat.buckets:
                self._active.exchange.sync(bucket).wait()

    def prepare_state(self, reason: str = "optimizer state") -> None:
        """Puts right what a step that raised left behind, and takes over what was written. Local.

        Blocks until all parameters have arrived; what was loaded is taken over, too.

        Raises:
            RuntimeError: After a backward that raised when part of the state was already new.
        """
        if self.sharded.stepped_early:
            raise RuntimeError(
                "The last backward raised after it had updated part of the optimizer's state (the"
                " plan has early gathers), so that there is no consistent state to save. Load the"
                " last checkpoint."
            )
        self.sharded.restore()
        self.complete_parameters(reason)
        self._left.follow()
        self._take_over()
