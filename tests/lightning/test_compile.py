"""torch.compile of a part of the module, and of the whole LightningModule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_ranks_agree, fit
from tests.lightning.nets import Net, copies


class _CompiledPart(Net):
    def __init__(self, backend: str) -> None:
        super().__init__("gpt", "sgd")
        for block in self.net.blocks:
            block.compile(backend=backend)


class _CompiledNet(Net):
    def __init__(self, backend: str) -> None:
        super().__init__("gpt", "sgd")
        self.net = torch.compile(self.net, backend=backend)


def _compiled_whole(backend: str) -> Any:
    return torch.compile(Net("gpt", "sgd"), backend=backend)


KINDS = {"part": _CompiledPart, "inner": _CompiledNet, "whole": _compiled_whole}


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_sizes=[2], timeout_s=120)
def test_compiled_equals_ddp(kind: str, backend: str) -> None:
    nets = {}
    for name, strategy in STRATEGIES.items():
        torch.compiler.reset()
        module = KINDS[kind](backend)
        fit(strategy(), module, model="gpt", num_samples=24)
        nets[name] = getattr(module, "_orig_mod", module)
    losses = [torch.stack(nets[name].losses) for name in STRATEGIES]
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(copies(nets["dear"]), copies(nets["ddp"]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert_ranks_agree([copies(nets["dear"])])
