"""Compressors with a Trainer: checkpoints, loss scales, schedules, accumulation, several fits."""

from __future__ import annotations

import math
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_dear.callbacks import CompressionSchedule, DearMonitor
from lightning_dear.callbacks.guards import CompletionGuard
from lightning_dear.compression import Fp32, Int4, Int8, OkTopk, PowerSGD, TopK
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed, run_ranks
from tests.distributed.rank import RANKS_A_HOST
from tests.fabric.running import dear as fabric_dear
from tests.fabric.running import new_fabric
from tests.lightning.fitting import WeightRecorder, assert_ranks_agree, assert_same, dear, fit
from tests.lightning.nets import Net, copies, data
from tests.lightning.test_sharded_saving import NAME, _resume, _train
from tests.training.models import batch, build, loss_of, optimizer_for

COMPRESSORS: dict[str, dict[str, Any]] = {
    "int8": {"compressor": "int8"},
    "int4 of gradients": {"compressor": Int4(), "gather": "gradients"},
    "topk": {"compressor": TopK(density=0.05)},
    "qsgd": {"compressor": "qsgd"},
    "int4 one way": {"compressor": Int4(halves="reduce")},
    "powersgd": {"compressor": PowerSGD(rank=1)},
    "oktopk": {"compressor": OkTopk(density=0.1)},
}


def _ours(name: str, **options: Any) -> Any:
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    return dear(fusion=fusion, **COMPRESSORS[name], **options)


def _save_and_resume(folder: Path, name: str) -> None:
    seen = _train(_ours(name), folder / "file", "mlp", "adamw")
    folders = _train(
        _ours(name, save_distributed_checkpoint=True), folder / "folder", "mlp", "adamw"
    )
    assert_same(folders, seen, "weights")
    assert_ranks_agree(seen)
    for kind in ("file", "folder"):
        resumed = _resume(_ours(name), folder / kind / NAME, "mlp", "adamw")
        assert_same(resumed, seen, f"weights from a {kind}")


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in ("int8", "topk", "powersgd", "oktopk")),
        *(
            pytest.param(name, world_size, marks=pytest.mark.slow)
            for name, world_size in (
                ("int8", 1),
                ("topk", 1),
                ("int4 of gradients", 2),
                ("qsgd", 2),
                ("int4 one way", 2),
            )
        ),
    ],
)
def test_checkpoints_go_on_with_the_same_bits(tmp_path: Path, name: str, world_size: int) -> None:
    run_ranks(_save_and_resume, world_size, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_checkpoints_of_two_hosts_go_on(tmp_path: Path, name: str) -> None:
    """With the same bits there, and elsewhere: on one host, on two of one rank, on four."""
    hosts = {"env": {RANKS_A_HOST: "2"}}
    for folder in ("there", "elsewhere"):
        (tmp_path / folder).mkdir()
    run_ranks(_save_and_resume, 4, tmp_path / "there", name, **hosts)
    run_ranks(_save_anywhere, 4, tmp_path / "elsewhere", name, **hosts)
    run_ranks(_resume_anywhere, 3, tmp_path / "elsewhere", name)
    for num_ranks, ranks_a_host in ((2, "1"), (4, "1"), (4, "2")):
        env = {RANKS_A_HOST: ranks_a_host}
        run_ranks(_resume_anywhere, num_ranks, tmp_path / "elsewhere", name, env=env)


def _resume_anywhere(folder: Path, name: str) -> None:
    for other in (name, "int8", "topk"):
        resumed = _resume(_ours(other), folder / NAME, "mlp", "adamw")
        assert_ranks_agree(resumed)
        assert all(bool(weight.isfinite().all()) for weight in resumed[-1])
    assert_ranks_agree(_resume(dear(), folder / NAME, "mlp", "adamw"))


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_checkpoints_go_on_elsewhere(tmp_path: Path, name: str) -> None:
    """With another number of ranks, with another compressor, and with none."""
    run_ranks(_save_anywhere, 3, tmp_path, name)
    run_ranks(_resume_anywhere, 2, tmp_path, name)


def _save_anywhere(folder: Path, name: str) -> None:
    _train(_ours(name), folder, "mlp", "adamw")


@pytest.mark.slow
@distributed(world_sizes=(2,))
def test_steps_that_a_loss_scale_leaves_out_leave_no_trace() -> None:
    """A scale that is too large at first: then nearly every step counts, with finite weights."""
    for name in ("int8", "topk", "powersgd", "oktopk"):
        seen = {}
        for scale in (2.0**10, 2.0**30):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
            precision = MixedPrecision("16-mixed", "cpu", scaler)
            recorder, net = WeightRecorder(), Net("mlp", "sgd")
            fit(_ours(name), net, recorder, num_samples=96, plugins=_plugins(precision))
            assert_ranks_agree(recorder.seen)
            assert scaler.get_scale() < 2.0**29
            seen[scale] = recorder.seen
        before_and_after = zip(seen[2.0**30], seen[2.0**30][1:], strict=False)
        moved = [not _are_equal(before, after) for before, after in before_and_after]
        assert moved.count(False) > 1, name
        since = moved[moved.index(True) :]
        assert since.count(True) >= max(4, len(since) - 2), (name, moved)
        for weights in seen.values():
            assert all(math.isfinite(float(weight.sum())) for weight in weights[-1])


def _plugins(precision: MixedPrecision) -> list[Any]:
    return [TorchElasticEnvironment(), precision]


def _are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "name", ["int8", "topk", "powersgd", pytest.param("oktopk", marks=pytest.mark.slow)]
)
@distributed(world_sizes=(2,))
def test_dense_steps_are_those_without_a_compressor(name: str) -> None:
    seen = {}
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    for kind, strategy in (
        ("dense", dear(fusion=fusion)),
        ("mixed", _ours(name, compression_schedule=CompressionSchedule(dense_steps=3))),
    ):
        recorder = WeightRecorder()
        fit(strategy, Net("mlp", "adamw"), recorder)
        seen[kind] = recorder.seen
    assert_same(seen["mixed"][:3], seen["dense"][:3], "weights")
    assert not _are_equal(seen["mixed"][3], seen["dense"][3])
    assert_ranks_agree(seen["mixed"])


@distributed(world_sizes=(2,))
def test_densities_change_what_is_sent() -> None:
    schedule = CompressionSchedule(densities={2: 0.5, 4: 0.1})
    sent: list[int] = []

    class Watch(WeightRecorder):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.strategy.complete_parameters()
            sent.append(trainer.strategy._pipeline.collectives.ledger["reduce_scatter"])
            super().on_train_batch_end(trainer, *rest)

    watch = Watch()
    strategy = dear(
        fusion=ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005),
        compressor=TopK(density=1.0),
        compression_schedule=schedule,
    )
    fit(strategy, Net("mlp", "sgd"), watch)
    steps = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    assert steps[1] > 1.9 * steps[2] > 3.8 * 2 * steps[4]
    assert_ranks_agree(watch.seen)


@distributed(world_sizes=(2,))
def test_some_parameters_are_left_out() -> None:
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    schedule, compressor = CompressionSchedule(dense_steps=2), {"vectors": "none", "*": "int8"}
    strategy = dear(compressor=compressor, fusion=fusion, compression_schedule=schedule)
    recorder = WeightRecorder()
    fit(strategy, Net("mlp", "sgd"), recorder)
    assert_ranks_agree(recorder.seen)
    assert strategy.plan is not None
    families = {bucket.family.rpartition("/")[2] for bucket in strategy.plan.buckets}
    assert {family.partition("(")[0] for family in families} == {"Int8", "Fp32"}


@distributed(world_sizes=(2,))
def test_weight_decay_beside_the_momentum_of_dgc_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay=0.05. Set weight_decay=0 and add"):
        fit(dear(compressor="dgc"), Net("mlp", "adagrad"))
    model = build("mlp")
    with pytest.raises(ValueError, match="weight_decay=0.05. Set weight_decay=0 and add"):
        new_fabric(fabric_dear(compressor="dgc")).setup(model, optimizer_for("adagrad", model))


@distributed(world_sizes=(2,))
def test_integers_beside_the_weights_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        torch.nn.Parameter(torch.tensor([3]))
    net = Net("mlp", "sgd")
    net.net.register_parameter("count", torch.nn.Parameter(torch.tensor([3]), requires_grad=False))
    recorder = WeightRecorder()
    fit(_ours("int8"), net, recorder)
    assert net.net.count.tolist() == [3]
    assert_ranks_agree(recorder.seen)


@distributed(world_sizes=(2,))
def test_accumulation_and_clipping() -> None:
    for name in COMPRESSORS:
        recorder = WeightRecorder()
        fit(
            _ours(name),
            Net("mlp", "sgd"),
            recorder,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            validates=True,
        )
        assert_ranks_agree(recorder.seen)


@distributed(world_sizes=(2,))
def test_the_monitor_logs_what_encoding_saves_and_leaves() -> None:
    for name, figures in (
        ("int8", {"compression_ratio", "residual_norm", "lag"}),
        ("topk", {"compression_ratio", "residual_norm"}),
        ("qsgd", {"compression_ratio"}),
        ("powersgd", {"compression_ratio", "residual_norm"}),
        ("oktopk", {"compression_ratio", "residual_norm"}),
    ):
        trainer = fit(_ours(name), Net("mlp", "sgd"), DearMonitor(), log_every_n_steps=2)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        ours = {"compression_ratio", "residual_norm", "lag"}
        assert {key for key in ours if f"dear/{key}" in logged} == figures, logged
        assert logged["dear/compression_ratio"] > 3.5
        assert 0 < logged.get("dear/residual_norm", 1.0) < 10
        assert 0 < logged.get("dear/lag", 1e-3) < 0.01
        assert ("dear/share_of_bound" in logged) == (name == "oktopk")
        if name == "oktopk":
            assert 0 < logged["dear/share_of_bound"] <= 1
            assert 0 < logged["dear/num_kept"] <= logged["dear/num_wanted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_schedule": CompressionSchedule(dense_steps=2)}, "there is none"),
        (
            {"compressor": Int8(), "compression_schedule": CompressionSchedule(densities={0: 0.1})},
            "int8 has no density",
        ),
        ({"compressor": "int8", "fusion": "auto"}, "int8 encodes"),
        ({"compressor": "topk", "gather": "parameters"}, "fall far behind"),
        ({"compressor": "powersgd", "gather": "parameters"}, "whole mean gradient"),
        ({"compressor": "powersgd", "fusion": "mergecomp"}, "makes all-reduces instead"),
        ({"compressor": "oktopk", "fusion": "mergecomp"}, "other thresholds and regions"),
        ({"compressor": "oktopk", "gather": "parameters"}, "largest elements of the mean gradient"),
        (
            {
                "compressor": "topk",
                "fusion": "bayesian",
                "compression_schedule": CompressionSchedule(dense_steps=9),
            },
            "measures the first steps",
        ),
        (
            {"compressor": {"vectors": "none", "*": "topk"}, "fusion": "mergecomp"},
            "has others for some parameters",
        ),
        (
            {"compressor": {"vectors": "none", "*": "signsgd"}},
            "different learning rates",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dear(**options)


@pytest.mark.parametrize(
    "wrong", [{"dense_steps": -1}, {"densities": {0: 0.0}}, {"densities": {-1: 0.5}}]
)
def test_schedules_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 0|\(0, 1\]"):
        CompressionSchedule(**wrong)


def _fit_with_momentum(name: str) -> None:
    with pytest.raises(ValueError, match="averaged twice"):
        fit(dear(compressor=name), Net("mlp", "adamw"))
    with pytest.raises(ValueError, match="averaged twice"):
        fit(dear(compressor=name), Net("mlp", "sgd"))


@pytest.mark.parametrize("name", ["dgc", "signum"])
def test_momentum_twice_is_refused(name: str) -> None:
    run_ranks(_fit_with_momentum, 2, name)


@distributed(world_sizes=(2,))
def test_fit_then_test_then_save_then_fit_again() -> None:
    folder = Path(tempfile.mkdtemp())
    for name in ("int8", "topk"):
        strategy, net = _ours(name), Net("mlp", "sgd")
        recorder = WeightRecorder()
        trainer = fit(strategy, net, recorder, max_epochs=1)
        trainer.validate(net, data(), verbose=False)
        trainer.save_checkpoint(folder / f"{name}-{dist.get_rank()}.ckpt")
        state = strategy._pipeline.parts[0].optimizer_state_dict()
        assert state["residuals"]["counts"]["reduce"] == len(recorder.seen)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, data())
        parts = strategy._pipeline.parts
        counts = parts[0].optimizer_state_dict()["residuals"]["counts"]
        # Another fit makes other optimizers.
        assert 2 * counts["reduce"] == len(recorder.seen)
        assert_ranks_agree(recorder.seen)


def test_a_schedule_can_be_pickled_and_holds_up_nothing() -> None:
    schedule = CompressionSchedule(dense_steps=2)
    assert pickle.loads(pickle.dumps(schedule)).codec_at(Int8(), 1) == Fp32()
    waited: list[str] = []
    guard = CompletionGuard(waited.append)
    trainer = SimpleNamespace(callbacks=[guard, schedule])
    guard.on_train_batch_start(trainer, LightningModule(), None, 0)
    assert not waited


@distributed(world_sizes=(2,))
def test_compressors_under_fabric() -> None:
    seen = {}
    for name in ("int8", "topk"):
        fabric = new_fabric(fabric_dear(**COMPRESSORS[name]))
        raw = build("mlp")
        model, optimizer = fabric.setup(raw, optimizer_for("adamw", raw))
        for step in range(5):
            fabric.backward(loss_of(model, *batch("mlp", step, fabric.global_rank)))
            optimizer.step()
            optimizer.zero_grad()
        seen[name] = copies(raw)
        assert_ranks_agree([seen[name]])
        assert float(fabric.strategy.encoding_figures(optimizer)["compression_ratio"]) > 3.5
        fabric.strategy.sync_replicas()
        assert float(fabric.strategy.encoding_figures().get("lag", 0.0)) == 0.0
        assert "residuals" in optimizer.state_dict() or "residuals" in (
            fabric.strategy.get_optimizer_state(optimizer)
        )


@distributed(world_sizes=(2,))
def test_hooks_see_the_mean_and_what_they_do_counts() -> None:
    """Gradients set to 0 in a hook move nothing but what is left of earlier ones."""

    class Stopped(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.0)

    for name in ("int8", "int4 of gradients"):
        net, recorder = Stopped("mlp", "maximize"), WeightRecorder()
        before = copies(net)
        fit(_ours(name), net, recorder)
        for left, right in zip(before, recorder.seen[-1], strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=2e-3)
        assert_ranks_agree(recorder.seen)


@pytest.mark.parametrize("is_ours", [True, False])
def test_masters_that_another_strategy_carried_along_are_forgotten(
    tmp_path: Path, is_ours: bool
) -> None:
    master = {"exp_avg": torch.ones(2), "master_weight": torch.ones(2)}
    states = [{"state": {0: master}, "param_groups": []}]
    checkpoint: dict[str, Any] = {"state_dict": {}, "optimizer_states": states}
    if is_ours:
        checkpoint["lightning_dear"] = {"format": 1}
    torch.save(checkpoint, tmp_path / "file.ckpt")
    loaded = dear().load_checkpoint(tmp_path / "file.ckpt")
    state = loaded["optimizer_states"][0]["state"][0]
    assert ("master_weight" in state) is is_ours
    assert "exp_avg" in state
