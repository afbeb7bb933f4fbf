"""Which optimizers may step on a part of a tensor: those whose update is element-wise."""

from __future__ import annotations

import warnings

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.optimizers.trial import find_difference

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_OTHERS = (
    "adafactor distributedshampoo galoreadamw lamb lars lbfgs muon novograd prodigy shampoo soap"
    " sparseadam"
)

ELEMENTWISE = frozenset[type[Optimizer]](getattr(torch.optim, name) for name in _NAMES.split())
_WHOLE_TENSOR = frozenset(_OTHERS.split())


def warn_of_zeros(optimizer: Optimizer) -> None:
    """Warns, once, that gradients are cleared and not zeroed."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad(set_to_none=False) does what set_to_none=True does"
        " under strategy='dear': a parameter that the next step does not use is left alone, while"
        " momentum and weight decay would go on with zeros. Leave set_to_none out.",
        stacklevel=3,
    )


def is_trusted(optimizer: Optimizer) -> bool:
    """Whether it is known to be element-wise: of one of torch's own classes, not of a subclass.

    Parameters of a class of their own may do something else when they are stepped.
    """
    groups = optimizer.param_groups
    is_plain = all(type(one) is Parameter for group in groups for one in group["params"])
    return is_plain and type(optimizer) in ELEMENTWISE


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that would give another result on parts of tensors.

    torch's own element-wise optimizers are known by class; anything else is tried, see `trial.py`.

    Raises:
        ValueError: Naming the optimizer and what to use.
    """
    name, why = type(optimizer).__name__, None
    if name.lower() in _WHOLE_TENSOR:
        why = "it works on whole tensors, not element by element"
    elif not is_trusted(optimizer):
        try:
            why = find_difference(optimizer, on_parts=True)
        except Exception as error:
            why = f"stepping it on a small matrix failed: {error}"
    if why is not None:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ValueError(
            f"strategy='dear' cannot shard {name}: {why}. Use gather='gradients', which steps whole"
            f" tensors on every rank; an element-wise optimizer ({known}, or one that passes the"
            " same test); or strategy='ddp'."
        )
