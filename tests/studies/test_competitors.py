"""Competitors do what their names say."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from lightning_dear import DearStrategy
from lightning_dear.local_steps import LocalSteps
from lightning_dear.local_steps.schedule import cut
from lightning_dear.paths import conf_dir
from lightning_dear.studies import competitors
from lightning_dear.studies.competitors import (
    Bf16DDPStrategy,
    Fsdp2Strategy,
    TorchftStrategy,
    ZeroDDPStrategy,
    default_ddp_caps,
    forget_mesh,
)
from lightning_dear.workloads.task import Task
from tests.distributed.harness import distributed
from tests.lightning.fitting import ddp, new_trainer

WIDTHS = (16, 24, 8, 12)


class Net(Task):
    """Three linear layers, six tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(*pair) for pair in zip(WIDTHS, WIDTHS[1:], strict=False)]
        adamw: Any = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        # One level down, where `configure_model` looks for blocks to shard by themselves.
        net = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Flatten())
        super().__init__(net, adamw, None)
        self.keeps_after_forward: list[bool] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        sharded = [isinstance(parameter, DTensor) for parameter in self.net[0].parameters()]
        self.keeps_after_forward.append(not any(sharded))
        return loss


def fit(strategy: Any, module: LightningModule | None = None) -> tuple[Trainer, LightningModule]:
    module = module or Net()
    trainer = new_trainer(strategy, limit_train_batches=4)
    own = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(2, WIDTHS[0], generator=own) for _ in range(4)]
    trainer.fit(module, cycle(batches))
    return trainer, module


def weights(module: LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class _Sent:
    """Notes the tensors that are all-reduced from Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[torch.Tensor] = []
        real = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.tensors.append(tensor)
            return real(tensor, *args, **options)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)


@distributed(world_sizes=(2,))
def test_bf16_halves_the_bytes_and_trains_nearly_the_same() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = _Sent(monkeypatch)
        _, module = fit(Bf16DDPStrategy())
    model_bytes = sum(parameter.nbytes for parameter in module.parameters())
    compressed = [tensor for tensor in sent.tensors if tensor.dtype == torch.bfloat16]
    assert sum(tensor.nbytes for tensor in compressed) == 4 * model_bytes / 2
    _, plain = fit(ddp())
    difference = (weights(module) - weights(plain)).abs().max().item()
    assert 0 < difference < 0.05


@distributed(world_sizes=(2,))
def test_zero_shards_the_state_and_trains_the_same() -> None:
    trainer, module = fit(ZeroDDPStrategy())
    (optimizer,) = trainer.optimizers
    own = sum(
        state["exp_avg"].numel()
        for state in optimizer.optim.state.values()  # type: ignore[attr-defined]
    )
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, own)
    total = sum(parameter.numel() for parameter in module.parameters())
    assert sum(everyone) == total
    assert max(everyone) < 0.8 * total
    _, plain = fit(ddp())
    assert torch.equal(weights(module), weights(plain))


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [
                {"params": list(self.net[0][0].parameters()), "lr": 0.5},
                {"params": list(self.net[0][1:].parameters())},
            ],
            lr=0.25,
        )
        schedule = LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@distributed(world_sizes=(2,))
def test_zero_keeps_groups_and_schedule() -> None:
    trainer, module = fit(ZeroDDPStrategy(), Scheduled())
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == [0.5 / 16, 0.25 / 16]
    _, plain = fit(ddp(), Scheduled())
    assert torch.equal(weights(module), weights(plain))


class _Wrapped:
    """Keeps the wrapped module of a strategy, which ends with the fit."""

    def __init__(self, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data: dict[str, Any] = {}
        real = strategy.teardown

        def teardown() -> None:
            assert isinstance(strategy.model, DistributedDataParallel)
            self.data = dict(strategy.model._get_ddp_logging_data())
            real()

        monkeypatch.setattr(strategy, "teardown", teardown)

    @property
    def num_buckets(self) -> int:
        return len(str(self.data["rebuilt_bucket_sizes"]).split(","))


@distributed(world_sizes=(2,))
def test_wfbp_has_a_bucket_for_every_tensor() -> None:
    wfbp = instantiate(OmegaConf.load(conf_dir() / "strategy" / "wfbp.yaml"))
    for strategy, num_buckets in ((wfbp, 6), (ddp(), 1)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            wrapped = _Wrapped(strategy, monkeypatch)
            fit(strategy)
        assert wrapped.num_buckets == num_buckets


@distributed(world_sizes=(2,))
def test_scaled_caps_make_as_many_buckets_as_the_whole_model_has() -> None:
    # 3 kB that stand for 12 MB: less than one bucket of 25 MB after the first of 1 MB.
    strategy = ddp(**default_ddp_caps(4000))
    with pytest.MonkeyPatch.context() as monkeypatch:
        wrapped = _Wrapped(strategy, monkeypatch)
        fit(strategy)
    assert wrapped.num_buckets == (2 if "bucket_cap_mb_list" in default_ddp_caps(4000) else 1)


@distributed(world_sizes=(2,))
def test_fsdp2_keeps_parameters_after_forward() -> None:
    strategy = Fsdp2Strategy(tensor_parallel_size=1)
    trainer, module = fit(strategy)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert next(module.parameters()).to_local().shape[0] == WIDTHS[1] // 2
    assert module.keeps_after_forward == [True] * 4
    own = torch.cat([parameter.full_tensor().flatten() for parameter in module.parameters()])
    forget_mesh(strategy)
    _, plain = fit(ddp())
    assert torch.allclose(own, weights(plain), atol=1e-6)
    assert trainer.world_size == 2


class Unsharded(Net):
    def configure_model(self) -> None:
        pass


@distributed(world_sizes=(2,))
def test_fsdp2_refuses_a_model_that_shards_nothing() -> None:
    with pytest.raises(ValueError, match="fully_shard on no module"):
        fit(Fsdp2Strategy(tensor_parallel_size=1), Unsharded())


def test_torchft_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitors, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchft"):
        TorchftStrategy(local_steps=8)


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft==0.2.0")
@distributed(world_sizes=(2,))
def test_torchft_keeps_the_same_schedule() -> None:
    # Without delay and mixing, ranks agree after each merge, and law and fragments are the same.
    steps = LocalSteps(every=2, fragments=2, delay=0, mix=0.0, outer=partial(torch.optim.SGD, lr=1))
    theirs, module = fit(TorchftStrategy(local_steps=steps))
    _, ours = fit(DearStrategy(local_steps=steps))
    assert theirs.strategy.statistics.exposed_reduce_scatter_s > 0
    # Our fit ends with a flush, after which all fragments are alike; theirs does not.
    last = cut(module, module.parameters(), 2)[1]
    for name in last:
        torch.testing.assert_close(module.get_parameter(name), ours.get_parameter(name))
