"""What a user may ask of the gradients between backward and step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.engine.optimizer_pipeline import OptimizerPipeline
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.strategy.precision import unwrapped


class GradientAccess:
    """Part of the strategy: each rank has its shard of the mean gradient, users want the whole."""

    _pipeline: Pipeline | None
    _is_last_backward = False
    _last_of: list[Optimizer] | None = None

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the mean gradient as it came, from the shards of all ranks.

        For `on_before_optimizer_step`, or in manual optimisation before `step()`. All ranks call;
        blocks until the gradients are reduced.

        Args:
            optimizer: Of which parameters; not needed where there is one.
            norm_type: p of the p-norm; `inf` for the largest absolute value.
        """
        return self._part(optimizer).grad_norm(norm_type)

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer | None = None) -> Generator[None, None, None]:
        """Lets `.grad` hold the mean gradient in the `with` block; what is done to it counts.

        For code between backward and step that reads or changes gradients itself, in manual
        optimisation too. Costs one all-gather. All ranks call; blocks.

        Args:
            optimizer: Of which parameters; not needed where there is one.
        """
        part = self._part(optimizer)
        part.expose_gradients()
        yield
        part.reduce()

    @contextmanager
    def last_backward(self, *optimizers: Optimizer) -> Generator[None, None, None]:
        """Manual optimisation: the backward run within is the last one before `step()`.

        Its gradients are sent while it runs. Unmarked, they are sent at `step()`, since any number
        of backwards may come before it.

        Args:
            *optimizers: Those that are to step; none: all.
        """
        before = self._is_last_backward, self._last_of
        self._is_last_backward = True
        self._last_of = [unwrapped(one) for one in optimizers] or None
        try:
            yield
        finally:
            self._is_last_backward, self._last_of = before

    def _part(self, optimizer: Optimizer | None) -> OptimizerPipeline:
        if self._pipeline is None:
            raise RuntimeError("There are gradients only during fit.")
        if optimizer is not None:
            return self._pipeline.of(unwrapped(optimizer))
        if len(self._pipeline.parts) > 1:
            raise ValueError("There are several optimizers; say of which one.")
        return self._pipeline.parts[0]
