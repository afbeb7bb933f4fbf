"""What `strategy="dear"` refuses, and what to do instead: checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

_DDP_OPTIONS = {
    "ddp_comm_hook": "it hooks DistributedDataParallel, which is not used; see compressor=",
    "ddp_comm_state": "it belongs to ddp_comm_hook, which is not used",
    "ddp_comm_wrapper": "it belongs to ddp_comm_hook, which is not used",
    "model_averaging_period": "post-local SGD averages what strategy='dear' keeps equal",
    "static_graph": "the execution order is recorded in any case",
    "gradient_as_bucket_view": "gradients always lie in the buckets",
    "delay_all_reduce_named_params": "there is no all-reduce to delay",
    "mixed_precision": "use Trainer(precision=...)",
    "device_ids": "use Trainer(devices=...)",
    "output_device": "use Trainer(devices=...)",
    "dim": "outputs are never scattered",
    "process_group": "strategy='dear' makes process groups of its own",
    "bucket_cap_mb_list": "use fusion=",
    "init_sync": "weights always start from rank 0's",
    "param_to_hook_all_reduce": "there is no all-reduce to hook",
    "skip_all_reduce_unused_params": "unused parameters always work",
    "batched_grad_copy": "gradients always lie in the buckets",
    "forward_sync_buffers": "use broadcast_buffers=",
    "device_mesh": "strategy='dear' is plain data parallel",
    "check_reduction": "DistributedDataParallel itself ignores it",
}


def check_options(gather: str, ddp_options: Mapping[str, Any]) -> None:
    """Refuses options of `DDPStrategy` that cannot apply, all in one message.

    Raises:
        ValueError: Naming each option and why; unknown options too.
    """
    if gather != "parameters":
        raise ValueError(
            f"Unknown gather {gather!r}; valid names: parameters. gather='gradients' does not"
            " exist yet."
        )
    if not ddp_options:
        return
    reasons = [f"{option} ({_DDP_OPTIONS.get(option, 'unknown option')})" for option in ddp_options]
    raise ValueError(
        f"strategy='dear' does not take {'; '.join(reasons)}. Leave it out, or use strategy='ddp'."
    )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses numbers of optimizers other than one.

    Raises:
        ValueError: Saying what to return from `configure_optimizers`.
    """
    if len(optimizers) > 1:
        raise ValueError(
            "strategy='dear' trains with one optimizer so far, configure_optimizers returned"
            f" {len(optimizers)}; use one with several parameter groups, or strategy='ddp'."
        )
    if not optimizers or type(optimizers[0]).__name__ == "_MockOptimizer":
        raise ValueError(
            "strategy='dear' needs an optimizer, and configure_optimizers returned none."
        )


def check_trainer(trainer: Trainer, module: LightningModule, precision: Precision) -> None:
    """Refuses what would silently train another model than under DDP.

    Raises:
        ValueError: Saying what cannot work yet and what to use.
    """
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} has no effect under strategy='dear'"
            " yet: each rank has only its shard of the gradients. Remove it, or use strategy='ddp'."
        )
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{type(module).__name__}.configure_gradient_clipping would see no gradients under"
            " strategy='dear' yet: each rank has only its shard. Remove it, or use strategy='ddp'."
        )
    scaler = getattr(precision, "scaler", None)
    plain = type(precision) in (Precision, DoublePrecision, MixedPrecision)
    if not plain or scaler is not None:
        raise ValueError(
            f"precision={precision.precision!r} does not work under strategy='dear' yet; use"
            " '32-true', 'bf16-mixed' or '64-true', or strategy='ddp'."
        )


_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")


def warn_about_gradient_hooks(callbacks: Sequence[Callback], module: LightningModule) -> None:
    """Warns, once per owner, where a hook runs at a time at which gradients cannot be seen."""
    for owner in (module, *callbacks):
        for hook in _GRADIENT_HOOKS:
            if is_overridden(hook, owner):
                rank_zero_warn(
                    f"{type(owner).__name__}.{hook}: under strategy='dear' a parameter's .grad is"
                    " None there (each rank has only its shard of the mean), so clipping, masking"
                    " or zeroing gradients in it has no effect. Use strategy='ddp' if it does."
                )


def refuse_clipping(precision: Precision) -> None:
    """Makes `self.clip_gradients` raise, until `allow_clipping`: it would clip local gradients."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "clip_gradients does not work under strategy='dear' yet: each rank has only its shard"
            " of the gradients. Remove it, or use strategy='ddp'."
        )

    for name in _CLIPPING:
        setattr(precision, name, refuse)


def allow_clipping(precision: Precision) -> None:
    """Undoes `refuse_clipping`."""
    for name in _CLIPPING:
        precision.__dict__.pop(name, None)
