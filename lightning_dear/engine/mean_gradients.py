"""What may be done to the mean gradient between the reduce-scatters and the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives
from lightning_dear.engine import gradients
from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.sharded import ShardedOptimizer


class MeanGradients:
    """Norms, clipping and loss scales, on this rank's shards; a part of `OptimizerPipeline`."""

    optimizer: Optimizer
    sharded: ShardedOptimizer
    _collectives: Collectives
    _options: ExchangeOptions
    _active: ActivePlan | None
    _is_exposed: bool
    _is_reduced: bool
    _was_changed: bool

    def reduce(self) -> None:
        """See `OptimizerPipeline`."""
        raise NotImplementedError

    def _refuse_changes(self) -> None:
        if self._active is not None and self._active.reducer.steps_early:
            raise RuntimeError(
                "Gradients cannot be changed after a backward that has used part of them for its"
                " early gathers. Override on_before_optimizer_step or configure_gradient_clipping"
                " to change them there, which turns early gathers off, or use fusion='threshold'."
            )

    def _check_may_add_to_means(self) -> None:
        if (codec := self._options.codec) is not None and codec.encodes_once:
            raise RuntimeError(
                "Another backward would add to mean gradients that a hook was shown, that"
                " whole_gradients() has shown or that were clipped, which"
                f" compressor={codec.name!r} would encode once more. Run all backwards of a step"
                " before that, or, if only hooks see them, pass"
                " DearStrategy(gradients_in_hooks=False)."
            )

    def _conceal(self) -> None:
        assert self._active is not None
        self.sharded.set_gradients(self._active.reducer.conceal())
        self._is_exposed, self._was_changed = False, True

    def expose_gradients(self) -> None:
        """Puts the mean gradient into every `.grad`, as DDP leaves it. All ranks call; blocks.

        Costs an all-gather of the gradients. What is done to `.grad` counts: it is taken back
        before the step.
        """
        if self._is_exposed and self._is_reduced:
            return
        self._refuse_changes()
        self.reduce()
        assert self._active is not None
        self._active.reducer.expose()
        self._is_exposed = True

    @contextmanager
    def _on_shards(self, *, mutates: bool) -> Iterator[list[Tensor]]:
        """Mean gradients of this rank's pieces; `.grad` is as exposed afterwards as before."""
        if mutates:
            self._refuse_changes()
        was_exposed = self._is_exposed and self._is_reduced
        self.reduce()
        self._was_changed |= mutates
        yield self.sharded.gradients
        if was_exposed:
            assert self._active is not None
            # What each rank has of its own is elsewhere only where means are cut into shards.
            is_lost = mutates or self._options.is_scattered
            self._active.reducer.expose() if is_lost else self._active.reducer.show()
            self._is_exposed = True

    def _counted(self) -> list[Tensor]:
        """Mean gradients whose norms this rank adds up; what all ranks have, one of them counts."""
        num_ranks, rank = self._collectives.world_size, self._collectives.rank
        return [
            piece.parameter.grad
            for piece in self.sharded.pieces
            if piece.parameter.grad is not None
            and (not piece.is_all_reduced or piece.tensor_index % num_ranks == rank)
        ]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the mean gradient, as it came. All ranks call; blocks.

        The next step uses it, or what is left of it if it is encoded to be gathered.
        """
        with self._on_shards(mutates=False):
            return gradients.global_norm(self._counted(), norm_type, self._collectives, self._like)

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the mean gradient to at most `max_norm`; returns its norm before. Blocks."""
        self._warn_of_votes()
        with self._on_shards(mutates=True) as own:
            norm = gradients.global_norm(self._counted(), norm_type, self._collectives, self._like)
            gradients.scale_to_norm(own, norm, max_norm)
            return norm

    def clip_by_value(self, clip_value: float) -> None:
        """Clips every element of the mean gradient to [-clip_value, clip_value]. Blocks."""
        self._warn_of_votes()
        with self._on_shards(mutates=True) as own:
            gradients.clip_to_value(own, clip_value)

    def _warn_of_votes(self) -> None:
        codec = self._options.codec
        if codec is None or not codec.votes or self._collectives.rank:
            return
        effect = (
            "only the signs of their mean are sent back, so that this changes nothing"
            if self._options.encodes("gather")
            else "they are means of signs, of the same size whatever they were before: by norm this"
            " only makes the learning rate smaller, by value it does nothing from 1 on"
        )
        warnings.warn(
            f"Gradients are clipped, and with compressor={codec.name!r} {effect}. Leave it out.",
            stacklevel=3,
        )

    def unscale(self, unscale: Callable[[Optimizer], None]) -> None:
        """Calls a GradScaler's `unscale_` on the shards; inf on one rank is inf on all. Blocks."""
        with self._on_shards(mutates=True) as own:
            like = self._like
            overflow = gradients.any_not_finite(own, self._collectives, like.device)
            # The scaler looks at gradients only, and at least at one: this one brings it the vote.
            vote = torch.zeros(1, dtype=like.dtype, device=like.device)
            vote.grad = torch.where(overflow.bool(), math.inf, 0.0).to(like.dtype)
            with self.sharded.on_shards(vote):
                unscale(self.optimizer)

    @property
    def _like(self) -> Tensor:
        assert self._active is not None
        return self._active.flat.buckets[0].shard
