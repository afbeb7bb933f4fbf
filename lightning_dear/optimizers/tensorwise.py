"""Which optimizers may be stepped on parts of tensors, and which on one tensor after the other.

torch's own are known by class; anything else is tried, see `trial.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION
from lightning_dear.compression import PowerSGD, SparseAllReduce
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.optimizers.trial import find_difference

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_OTHERS = (
    "adafactor distributedshampoo galoreadamw lamb lars lbfgs muon novograd prodigy shampoo soap"
    " sparseadam"
)

ELEMENTWISE = frozenset[type[Optimizer]](getattr(torch.optim, name) for name in _NAMES.split())
_WHOLE_TENSOR = frozenset(_OTHERS.split())
_KNOWN = ELEMENTWISE | {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}


def is_trusted(optimizer: Optimizer) -> bool:
    """Whether it is known to be element-wise: of one of torch's own classes, not of a subclass.

    Parameters of a class of their own may do something else when they are stepped.
    """
    groups = optimizer.param_groups
    is_plain = all(type(one) is Parameter for group in groups for one in group["params"])
    return is_plain and type(optimizer) in ELEMENTWISE


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Why it would give another result on parts of tensors, and what to use; None: it would not."""
    name, why = type(optimizer).__name__, None
    if name.lower() in _WHOLE_TENSOR:
        why = "it works on whole tensors, not element by element"
    elif not is_trusted(optimizer):
        why = find_difference(optimizer, on_parts=True)
    return why and (
        f"strategy='dear' cannot shard {name}: {why}. Use gather='gradients', which steps whole"
        f" tensors on every rank; an element-wise optimizer ({_names(ELEMENTWISE)}, or one that"
        " passes the same test); or strategy='ddp'."
    )


def why_not_tensorwise(optimizer: Optimizer) -> str | None:
    """Why it would give another result if tensors are stepped one by one; None: it would not."""
    why = None if type(optimizer) in _KNOWN else find_difference(optimizer, on_parts=False)
    return why and (
        "strategy='dear' with gather='gradients' steps each tensor when its gradient has"
        f" arrived, and {type(optimizer).__name__} does not allow that: {why}. Use an optimizer"
        f" that treats every tensor on its own ({_names(_KNOWN)}, or one that passes the same"
        " test), or strategy='ddp'."
    )


def _names(kinds: frozenset[type[Optimizer]]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def why_not_steppable(optimizer: Optimizer, options: ExchangeOptions) -> str | None:
    """Why it cannot be stepped as `options` steps it, and what to use; None: it can."""
    name = type(optimizer).__name__
    wrapped = [type(one).__name__ for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if wrapped:
        return (
            f"strategy='dear' does not support {name}, which wraps another optimizer: what"
            f" {wrapped[0]} steps, and its state, would be out of sight. Use {wrapped[0]} by"
            " itself, or strategy='ddp'."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return (
            f"{name}(differentiable=True) lets autograd record its steps, and strategy='dear' makes"
            " them outside of it. Leave it out."
        )
    if options.is_of_gradients:
        return _why_not_whole(optimizer, _with_masters(options))
    why = why_not_elementwise(optimizer)
    if why is not None and (other := _why_not_whole(optimizer, "")) is not None:
        return f"{_without_remedy(why)} And gather='gradients' is no way out: {other}"
    return why


def _without_remedy(why: str) -> str:
    return why.partition(" Use ")[0]


def _why_not_whole(optimizer: Optimizer, or_masters: str) -> str | None:
    why = why_not_tensorwise(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    narrow = {str(p.dtype) for p in parameters if p.dtype in LOW_PRECISION}
    if why is None and narrow:
        return (
            f"gather='gradients' steps parameters as they are, and an update is often below the"
            f" resolution of {', '.join(sorted(narrow))}; use {or_masters}a mixed precision."
        )
    return why


def _with_masters(options: ExchangeOptions) -> str:
    """How fp32 masters can be stepped with what else is set; nothing where they cannot."""
    codec = options.codec
    whole = PowerSGD, SparseAllReduce
    if isinstance(codec, whole) or getattr(codec, "clip_norm", None) is not None:
        return ""
    way = "gather='parameters'"
    if not options.decouple:
        way += " without decouple=False"
    if codec is not None and default_gather(codec, options.groups) == "gradients":
        way += f" and halves='reduce' in {codec.name}"
    return f"{way}, which steps fp32 masters of 16-bit parameters, or "


def choose_options(
    optimizers: Sequence[Optimizer], options: ExchangeOptions, or_else: ExchangeOptions | None
) -> tuple[ExchangeOptions, str | None, str | None]:
    """`options` if all can be stepped so, or else `or_else`, if it is given and they can. Local.

    Returns:
        What travels; why they cannot be stepped so; what people are to be told.
    """
    problem, remark = _problem(optimizers, options), None
    names = dict.fromkeys(type(one).__name__ for one in optimizers if not is_trusted(one))
    if problem is not None and or_else is not None and _problem(optimizers, or_else) is None:
        why = _without_remedy(problem)
        options, problem = or_else, None
        remark = (
            f"{why} So every rank gets whole gradients instead of parameters, and has the whole"
            " optimizer state, as with gather='gradients'."
        )
    elif problem is None and names and not options.is_of_gradients:
        remark = (
            f"strategy='dear' steps {', '.join(names)} on parts of tensors: in a test with small"
            " tensors the bits were those of whole ones. That does not prove it of all. If an"
            " update of an element may depend on others, use gather='gradients', which steps whole"
            " tensors."
        )
    return options, problem, remark


def _problem(optimizers: Sequence[Optimizer], options: ExchangeOptions) -> str | None:
    return next(filter(None, (why_not_steppable(one, options) for one in optimizers)), None)
