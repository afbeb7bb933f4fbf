"""Norms and clipping of the mean gradient, of which each rank has its shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from lightning_dear.bucket import Piece
from lightning_dear.collectives.work import Collectives
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.sharded import OptimizerShards

_NORM_TAG = 1 << 19


@torch.no_grad()
def global_norm(
    pieces: Sequence[Piece], norm_type: float, collectives: Collectives, like: Tensor
) -> Tensor:
    """Norm of the whole gradient, from every rank's shard: one number from each. Collective.

    Equal on all ranks by the bit, since every rank adds in rank order. Differs from
    `torch.nn.utils.clip_grad_norm_`'s in the order of the summation alone.

    Args:
        pieces: This rank's; of those that several ranks have, one rank counts each.
        norm_type: p of the p-norm; `inf` for the largest absolute value.
        collectives: Over the ranks that have the other pieces.
        like: Has the dtype and device that the result shall have.

    Returns:
        A scalar; 0 if there is no gradient anywhere.
    """
    num_ranks = collectives.world_size
    # What all ranks have, one of them counts.
    gradients = [
        piece.parameter.grad
        for piece in pieces
        if piece.parameter.grad is not None
        and (not piece.is_all_reduced or piece.tensor_index % num_ranks == collectives.rank)
    ]
    parts = torch.zeros(num_ranks, dtype=torch.float64, device=like.device)
    if gradients:
        norms = _norms(gradients, norm_type)
        own = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
        parts[collectives.rank] = own
    collectives.launch_all_gather(parts, _NORM_TAG).wait()
    total = parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)
    return total.to(like.dtype)


def clip_to_value(pieces: Sequence[Tensor], clip_value: float) -> None:
    """Clips every element of their gradients to [-clip_value, clip_value]. Local."""
    # torch's own raises if there is none, as on a rank that has no shard of what was used.
    if any(one.grad is not None for one in pieces):
        clip_grad_value_(pieces, clip_value)


def unscale_shards(
    unscale: Callable[[Optimizer], None],
    shards: OptimizerShards,
    collectives: Collectives,
    like: Tensor,
) -> None:
    """Calls a GradScaler's `unscale_` on the shards; inf on one rank is inf on all. Collective.

    Args:
        unscale: Divides the optimizer's gradients and looks for inf and NaN in them.
        shards: Their gradients are mutated.
        collectives: Over the ranks that have the other pieces.
        like: Has the dtype and the device of the gradients.
    """
    overflow = torch.zeros(1, dtype=torch.uint8, device=like.device)
    if gradients := shards.gradients:
        overflow.copy_(~torch.isfinite(_norms(gradients, math.inf)).all())
    collectives.launch_any(overflow).wait()
    # The scaler looks at gradients only, and at least at one: this one brings it the vote.
    vote = torch.zeros(1, dtype=like.dtype, device=like.device)
    vote.grad = torch.where(overflow.bool(), math.inf, 0.0).to(like.dtype)
    with shards.on_shards(vote):
        unscale(shards.optimizer)


def _norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    return torch.stack(torch._foreach_norm(list(gradients), norm_type)).double()


def check_may_add(options: ExchangeOptions) -> None:
    """Refuses another backward after means were shown or changed, where they are encoded once.

    Raises:
        RuntimeError: Naming the compressor and what to do.
    """
    if (codec := options.codec) is not None and codec.encodes_once:
        raise RuntimeError(
            "Another backward would add to mean gradients that a hook was shown, that"
            " whole_gradients() has shown or that were clipped, which"
            f" compressor={codec.name!r} would encode once more. Run all backwards of a step"
            " before that, or, if only hooks see them, pass"
            " DearStrategy(gradients_in_hooks=False)."
        )


def used_early() -> RuntimeError:
    """What is raised if gradients are to be changed of which a part has been used."""
    return RuntimeError(
        "Gradients cannot be changed after a backward that has used part of them for its early"
        " gathers. Override on_before_optimizer_step or configure_gradient_clipping to change them"
        " there, which turns early gathers off, or use fusion='threshold'."
    )
