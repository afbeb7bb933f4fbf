"""What neither a guard nor a test can see: for the documentation alone."""

from __future__ import annotations

from tests.lightning.matrix.rows import Uncaught

COMPLETE = "`strategy.complete_parameters()` before the read"
ATTRIBUTE = "read it as an attribute of its module; `audit=True` finds such reads"
UNCAUGHT = (
    Uncaught(
        ".grad read or changed in a manual training_step",
        "before the step it is this rank's own gradient, not the mean",
        "`with self.trainer.strategy.whole_gradients():` around it",
    ),
    Uncaught(
        "a weight kept elsewhere and used where nothing of it is saved for backward",
        "an added bias or an embedding may be a step old, where the first step did not read it so",
        ATTRIBUTE,
    ),
    Uncaught(
        "a weight kept elsewhere and read or changed under no_grad or through .data",
        "it may be a step old, or a change be lost, where the first step did not do so",
        ATTRIBUTE,
    ),
    Uncaught(
        "a pointer or a NumPy array taken from a weight earlier",
        "it may show the step before, or half of each; if taken before the fit, the first weights",
        COMPLETE,
    ),
    Uncaught(
        "a read from another thread or from a process that shares the memory",
        "it may show the step before, or half of each",
        COMPLETE,
    ),
)
