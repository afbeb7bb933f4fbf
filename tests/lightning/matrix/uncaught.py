"""What neither a guard nor a test can see: for the documentation alone."""

from __future__ import annotations

from tests.lightning.matrix.rows import Uncaught

COMPLETE = "`strategy.complete_parameters()` before the read"
UNCAUGHT = (
    Uncaught(
        ".grad read or changed in a manual training_step",
        "until the step it is this rank's own gradient, not the mean",
        "`with self.trainer.strategy.whole_gradients():` around it; `self.clip_gradients` and"
        " `strategy.grad_norm()` work without",
    ),
    Uncaught(
        "a weight kept elsewhere and used where nothing of it is saved for backward",
        "an added bias or an embedding, read at a place where the recorded step did not read it,"
        " may have the value of the step before",
        f"read it as an attribute of its module, or call {COMPLETE}; `audit=True` finds such reads",
    ),
    Uncaught(
        "a weight kept elsewhere and read under no_grad or through .data",
        "the same",
        f"read it as an attribute of its module, or call {COMPLETE}; `audit=True` finds such reads",
    ),
    Uncaught(
        "a pointer or a NumPy array taken from a weight earlier",
        "it may show the value of the step before, or half of each",
        COMPLETE,
    ),
    Uncaught(
        "a read from another thread or from a process that shares the memory",
        "the same",
        COMPLETE,
    ),
)
