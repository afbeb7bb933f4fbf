"""Whether ranks hold the same model: asked before rank 0's values are broadcast into it.

A broadcast into tensors of another size ends a process at once, without a word.
"""

from __future__ import annotations

from itertools import zip_longest

from torch.nn import Module

from lightning_dear.collectives.store import from_all_ranks


def check_module_states(module: Module) -> None:
    """Refuses ranks whose parameters or buffers differ in name, shape or dtype. Collective, blocks.

    Raises:
        ValueError: On every rank alike, naming the first difference.
    """
    reports = from_all_ranks(_describe(module))
    for rank, report in enumerate(reports):
        if report == reports[0]:
            continue
        for left, right in zip_longest(reports[0].items(), report.items()):
            if left != right:
                raise ValueError(
                    f"Ranks hold different models: rank 0 has {_words(left)}, rank {rank} has"
                    f" {_words(right)}. Build the same model on every rank."
                )


def _describe(module: Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: f"shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors}


def _words(named: tuple[str, str] | None) -> str:
    return f"'{named[0]}' ({named[1]})" if named else "no more tensors"
