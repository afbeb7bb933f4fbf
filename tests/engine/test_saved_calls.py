"""On accelerators fewer calls are made, by other ways: with the same bits, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dear import torch_modes
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.compression import CODECS, Bf16, Fp32, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import ThresholdFusion
from lightning_dear.torch_modes import Onlooker

WIDTHS = (7, 131, 61, 67)
FUSION = ThresholdFusion(bucket_cap_mb=0.03, first_bucket_cap_mb=0.005)

BOTH_WAYS = pytest.mark.parametrize("host_devices", [("cpu",), ()], ids=["host", "accelerator"])


class Operations(Onlooker, TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def new_training(
    model: nn.Module, codec: Any, dtype: torch.dtype = torch.float32
) -> tuple[torch.optim.Optimizer, Pipeline]:
    """One rank, with buckets: what a codec needs."""
    optimizer = torch.optim.SGD(model.to(dtype).parameters(), lr=0.05)
    options = ExchangeOptions(default_gather(codec), compressor=codec)
    collectives = PairwiseCollectives(None, None, None)
    return optimizer, Pipeline(model, [optimizer], collectives, FUSION, options=options)


def new_mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        part
        for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)
        for part in (nn.Linear(i, o), nn.Tanh())
    ]
    return nn.Sequential(*layers)


@contextmanager
def hooked(tensor: Tensor, hook: Any) -> Iterator[None]:
    handle = tensor.register_post_accumulate_grad_hook(hook)
    yield
    handle.remove()


def weights_after(codec: Any, dtype: torch.dtype = torch.float32, num_steps: int = 4) -> Tensor:
    model = new_mlp()
    optimizer, pipeline = new_training(model, codec, dtype)
    for step in range(num_steps):
        x = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(step)).to(dtype)
        with pipeline.forward():
            loss = model(x).square().sum()
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.detach()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


CASES = [
    (name, dtype)
    for name in (*CODECS, "powersgd")
    for dtype in (torch.float32, torch.bfloat16)
    # Others are refused where weights have 16 bits.
    if dtype == torch.float32 or default_gather(resolve_compressor(name)) == "parameters"
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_both_ways_lead_to_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = resolve_compressor(name)
    expected = weights_after(codec, dtype)
    assert expected.isfinite().all()
    monkeypatch.setattr(torch_modes, "HOST_DEVICES", ())
    assert torch.equal(weights_after(codec, dtype), expected)


@BOTH_WAYS
def test_gradients_of_a_bucket_are_copied_by_one_call(
    host_devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_modes, "HOST_DEVICES", host_devices)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    optimizer, pipeline = new_training(model, Fp32())
    operations = Operations()
    for _ in range(2):
        with pipeline.forward():
            loss = model(torch.ones(1, 8)).sum()
        optimizer.zero_grad()
        with pipeline.backward(), operations:
            operations.counts.clear()
            loss.backward()
        optimizer.step()
    plan = pipeline.parts[0].plan
    assert plan is not None
    pipeline.detach()
    assert operations.counts["_foreach_copy_"] == len(plan.buckets)


@BOTH_WAYS
def test_what_comes_again_before_a_bucket_is_full_is_added(
    host_devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_modes, "HOST_DEVICES", host_devices)
    parts = nn.ParameterList(nn.Parameter(torch.full((3,), 1.0 + n)) for n in range(3))
    optimizer, pipeline = new_training(parts, Fp32())
    for step in range(3):
        with pipeline.forward():
            losses = [one.square().sum() for one in parts]
        optimizer.zero_grad()
        before = [one.detach().clone() for one in parts]
        with pipeline.backward():
            losses[0].backward(retain_graph=True)
            if step:
                # Where once was recorded.
                losses[0].backward()
            sum(losses[1:]).backward()
        optimizer.step()
        pipeline.complete_parameters()
    for number, (one, old) in enumerate(zip(parts, before, strict=True)):
        times = 2 if number == 0 else 1
        assert torch.allclose(one, old - 0.05 * times * 2 * old)
    pipeline.detach()


def test_what_is_done_to_a_gradient_after_its_hooks_does_not_count() -> None:
    parts = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))
    optimizer, pipeline = new_training(parts, Fp32())
    kept: list[Tensor] = []
    for _ in range(2):
        before = parts[3].detach().clone()
        with pipeline.forward():
            losses = [one.square().sum() for one in parts]
        optimizer.zero_grad()
        with hooked(parts[3], lambda one: kept.append(one.grad)), pipeline.backward():
            losses[3].backward()
            for gradient in kept:
                gradient.mul_(2)
            sum(losses[:3]).backward()
        optimizer.step()
    pipeline.detach()
    assert torch.allclose(parts[3], before - 0.05 * 2 * before)


def test_a_graph_of_gradients_is_refused_as_before() -> None:
    model = new_mlp()
    optimizer, pipeline = new_training(model, Bf16())
    for step in range(2):
        with pipeline.forward():
            loss = model(torch.ones(1, WIDTHS[0])).square().sum()
        optimizer.zero_grad()
        with pipeline.backward():
            if step:
                with pytest.raises(RuntimeError, match="automatic differentiation"):
                    loss.backward(create_graph=True)
            else:
                loss.backward()
                optimizer.step()
    pipeline.abandon()
