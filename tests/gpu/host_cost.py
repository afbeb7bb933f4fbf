"""Host milliseconds of a step beside plain torch: `python -m tests.gpu.host_cost cuda`, or `cpu`.

NOT RUN on a GPU so far. Eight ranks are pretended, and nothing is sent: so no second GPU is needed,
and nothing here says how long messages take. What is compared is what the host spends before the
device has to do anything, and what the device still has to do then.
"""

from __future__ import annotations

import sys
import time
import warnings
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.compression import Compressor, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.optimizers import sharded
from lightning_dear.planning import ThresholdFusion
from tests.gpu.costs import Pretended

NUM_STEPS = 10
PARTS = ("forward", "backward", "step", "drain", "all")


class Block(nn.Module):
    """Sixteen tensors, as a layer of BERT has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.more = nn.ParameterList(torch.zeros(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(torch.relu(self.wide(self.norms[1](x))))
        for one in self.more:
            x = x + one
        return x


def measure(
    device: torch.device, codec: Compressor | None = None, *, is_ours: bool = True, **options: Any
) -> str:
    """Median milliseconds of each part of a step."""
    is_cpu = device.type == "cpu"
    width, depth = (64, 2) if is_cpu else (1024, 24)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(depth)]).to(device)
    kind: Any = torch.optim.AdamW if codec is None else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-6, **options)
    pipeline = None
    if is_ours:
        how = None if codec is None else ExchangeOptions(default_gather(codec), compressor=codec)
        fusion = ThresholdFusion(bucket_cap_mb=0.1 if is_cpu else 25)
        pipeline = Pipeline(model, [optimizer], Pretended(device), fusion, options=how)
    x = torch.randn(8, 64, width, device=device)
    synchronize = (lambda: None) if is_cpu else torch.cuda.synchronize
    rows = []
    for step in range(NUM_STEPS):
        synchronize()
        marks = [time.perf_counter()]
        with pipeline.forward() if pipeline else nullcontext():
            loss = model(x).sum()
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        with pipeline.backward() if pipeline else nullcontext():
            loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        synchronize()
        marks.append(time.perf_counter())
        if step > 2:
            spent = [b - a for a, b in zip(marks, marks[1:], strict=False)]
            rows.append([*spent, marks[-1] - marks[0]])
    if pipeline is not None:
        pipeline.detach()
    return " ".join(f"{1e3 * median(column):9.1f}" for column in zip(*rows, strict=True))


def main() -> None:
    """Prints a line for each way of training."""
    warnings.simplefilter("ignore")
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    print(f"{'ms':24}", *[f"{one:>9}" for one in PARTS])
    print(f"{'plain AdamW':24}", measure(device, is_ours=False), flush=True)
    usual = sharded.MAX_RUN_NUMEL_OF_DEVICES
    for most in (sharded.MAX_RUN_NUMEL, usual, 2 * usual):
        sharded.MAX_RUN_NUMEL_OF_DEVICES = most
        print(f"{f'runs of {most}':24}", measure(device), flush=True)
    sharded.MAX_RUN_NUMEL_OF_DEVICES = usual
    print(f"{'fused':24}", measure(device, fused=True), flush=True)
    for name in ("bf16", "int8", "efsignsgd", "topk"):
        print(f"{name:24}", measure(device, resolve_compressor(name)), flush=True)


if __name__ == "__main__":
    main()
