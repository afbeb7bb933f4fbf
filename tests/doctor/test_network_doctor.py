"""The doctor in real trainings: it changes nothing, tells what it found, and never ends one."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import LBFGS
from typing_extensions import override

from lightning_dear.callbacks.guards import CompletionGuard
from lightning_dear.collectives.work import reusable_groups
from lightning_dear.doctor import NetworkDoctor, network_doctor
from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.studies.competitors import Bf16DDPStrategy
from tests.distributed.harness import distributed
from tests.lightning.fitting import WeightRecorder, ddp, dear, fit
from tests.lightning.nets import Net

STEP = 12
STRATEGIES: dict[str, Any] = {
    "ddp": ddp,
    "ddp_unused": lambda: ddp(find_unused_parameters=True),
    "ddp_static": lambda: ddp(static_graph=True),
    "ddp_bf16": Bf16DDPStrategy,
    "dear": dear,
    "dear_int8": lambda: dear(compressor="int8"),
    "dear_topk": lambda: dear(compressor="topk"),
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_doctor, "_BUDGET_S", 0.1)


def _fitted(name: str, *doctors: NetworkDoctor, **options: Any) -> tuple[list[Any], Any]:
    """What each step left, and what a checkpoint would hold and random numbers be."""
    recorder = WeightRecorder()
    made = STRATEGIES[name]()
    trainer = fit(made, Net("mlp", "adamw"), *doctors, recorder, max_epochs=5, **options)
    state = trainer._checkpoint_connector.dump_checkpoint()
    loops = json.dumps(state["loops"], default=str), sorted(state["callbacks"])
    return recorder.seen, (loops, trainer.global_step, torch.get_rng_state().tolist())


@pytest.mark.parametrize("name", STRATEGIES)
@distributed((2,))
def test_training_is_the_same_and_rank_0_tells_what_it_saw(
    name: str, tmp_path: Path, world_size: int
) -> None:
    network_doctor._BUDGET_S = 0.1
    theirs, state = _fitted(name)
    before = dict(reusable_groups)
    with mock.patch("builtins.print") as printed:
        ours, same = _fitted(name, NetworkDoctor(STEP, str(tmp_path)))
    assert state == same
    assert all(map(torch.equal, a, b) for a, b in zip(ours, theirs, strict=True))
    # The groups of the fit before serve the next one, and the doctor's own are gone.
    assert dict(reusable_groups) == before
    said = " ".join(str(call.args[0]) for call in printed.call_args_list)
    if torch.distributed.get_rank():
        assert said == ""
        return
    found = json.loads((tmp_path / "network_doctor.json").read_text())
    assert found["running"] == {
        "ddp_unused": "ddp",
        "ddp_static": "ddp",
        "dear_int8": "dear + int8",
        "dear_topk": None,
    }.get(name, name)
    parts = [found[f"{part}_s"] for part in ("computing", "messages", "late_rank", "rest")]
    assert min(parts) >= 0
    # Under ours other steps are timed than those whose lengths count.
    assert 0 < found["computing_s"] < 3 * found["step_s"]
    assert found["cost"]["beta_s"] >= 0
    assert [(one["low"], one["high"]) for one in found["pairs"]] == [(0, 1)]
    assert {one["name"] for one in found["options"]} >= {"ddp", "ddp_bf16", "dear", "dear + int8"}
    assert "NetworkDoctor: a step takes" in said
    assert "slowest pair within hosts: ranks 0 and 1" in said


class _Looks(Net):
    """Overrides a hook that may read `.grad`, as those do that log its norm."""

    @override
    def on_after_backward(self) -> None: ...


@distributed((2,))
def test_hooks_that_may_read_gradients_are_named_and_count_as_no_computing(tmp_path: Path) -> None:
    expose = ActivePlan.expose_gradients

    def slowly(self: ActivePlan) -> None:
        time.sleep(0.2)
        expose(self)

    for name in ("ddp", "dear"):
        with mock.patch.object(ActivePlan, "expose_gradients", slowly):
            fit(
                STRATEGIES[name](),
                _Looks("mlp", "adamw"),
                NetworkDoctor(STEP, str(tmp_path)),
                max_epochs=5,
            )
        if torch.distributed.get_rank() == 0:
            found = json.loads((tmp_path / "network_doctor.json").read_text())
            pastes = {one["name"]: one["paste"] for one in found["options"]}
            assert pastes["dear"] == "strategy=DearStrategy(gradients_in_hooks=False)"
            assert found["computing_s"] < 0.1
            if name == "dear":
                assert found["step_s"] > 0.2


@distributed((2,))
def test_under_accumulation_all_batches_of_a_step_count(tmp_path: Path) -> None:
    for name in ("ddp", "dear"):
        _fitted(name, NetworkDoctor(8, str(tmp_path)), accumulate_grad_batches=2)
        if torch.distributed.get_rank() == 0:
            found = json.loads((tmp_path / "network_doctor.json").read_text())
            assert found["batch_s"] == pytest.approx(found["step_s"] / 2)
            names = [one["name"] for one in found["options"]]
            assert "accumulate_grad_batches=16" in names
            assert "accumulate_grad_batches=2" not in names


@distributed((2,))
def test_the_guard_waits_only_in_the_few_steps_that_are_timed(tmp_path: Path) -> None:
    waits: list[list[str]] = []
    complete = CompletionGuard.reader_of

    def counted(self: CompletionGuard, hook: str, owners: Any) -> str | None:
        found = complete(self, hook, owners)
        waits[-1] += [hook] if found else []
        return found

    with mock.patch.object(CompletionGuard, "reader_of", counted):
        for doctors in ((), (NetworkDoctor(STEP, str(tmp_path)),)):
            waits.append([])
            trainer = fit(dear(), Net("mlp", "adamw"), *doctors, max_epochs=5)
            gathered = trainer.strategy.pipeline_of().training.instruments
            assert gathered is not None
    without, with_it = waits
    assert without == []
    assert set(with_it) == {"on_train_batch_start"}
    assert len(with_it) <= 6


class _Fails(NetworkDoctor):
    @override
    def _times(self) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError("this rank has no clock")
        return super()._times()


@distributed((2,))
def test_one_rank_that_fails_stops_the_doctor_on_all_and_no_training(tmp_path: Path) -> None:
    theirs, _ = _fitted("ddp")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours, _ = _fitted("ddp", _Fails(STEP, str(tmp_path)))
    assert all(map(torch.equal, a, b) for a, b in zip(ours, theirs, strict=True))
    if torch.distributed.get_rank() == 0:
        (one,) = [str(w.message) for w in said if "NetworkDoctor stops" in str(w.message)]
        assert "rank 1 could not measure the times of steps" in one
        assert "this rank has no clock" in one
    assert not list(tmp_path.glob("network_doctor.json"))


@distributed((2,))
def test_links_that_cannot_be_measured_stop_the_doctor_alone(tmp_path: Path) -> None:
    with mock.patch.object(network_doctor, "measure_links", side_effect=RuntimeError("no link")):
        theirs, _ = _fitted("dear", NetworkDoctor(STEP, str(tmp_path)))
    assert len(theirs) > STEP
    assert not list(tmp_path.glob("network_doctor.json"))


def _said(strategy: Any, doctor: NetworkDoctor) -> str:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(strategy, Net("mlp", "adamw"), doctor)
    return " ".join(str(one.message) for one in said if "NetworkDoctor" in str(one.message))


@distributed((1,))
def test_what_is_not_examined_is_said_in_one_sentence(world_size: int) -> None:
    one_rank = _said(ddp(), NetworkDoctor())
    assert "measures nothing: one rank sends nothing" in one_rank
    other = _said("auto", NetworkDoctor())
    assert "neither DDP nor strategy='dear'" in other


@distributed((2,))
def test_a_rank_without_a_doctor_stops_it_before_anything_is_sent(tmp_path: Path) -> None:
    doctors = [NetworkDoctor(STEP, str(tmp_path))] * (torch.distributed.get_rank() == 0)
    for name in ("ddp", "dear"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _fitted(name, *doctors)
        if doctors:
            (one,) = [w for w in said if "NetworkDoctor" in str(w.message)] or [None]
            assert (one is not None) == (name == "ddp")
            # The second fit is not examined again.
            assert one is None or "not all ranks have it" in str(one.message)
    assert not list(tmp_path.glob("network_doctor.json"))


@distributed((2,))
def test_nothing_is_left_where_a_fit_ends_early(tmp_path: Path) -> None:
    for name in ("ddp", "dear"):
        module = Net("mlp", "adamw")
        trainer = fit(STRATEGIES[name](), module, NetworkDoctor(500, str(tmp_path)), max_epochs=3)
        assert not [one for one in trainer.callbacks if "BeforeForward" in type(one).__name__]
        assert not any(part._forward_pre_hooks for part in module.modules())


@distributed((2,))
def test_short_trainings_local_steps_and_a_second_doctor(tmp_path: Path) -> None:
    short = _said(ddp(), NetworkDoctor(500))
    local = _said(dear(local_steps=2), NetworkDoctor())
    if torch.distributed.get_rank() == 0:
        assert "It needs 501, and automatic optimization" in short
        assert "with local_steps ranks meet once a round" in local
    folders = [tmp_path / name for name in ("first", "second")]
    _fitted("ddp", *(NetworkDoctor(STEP, str(one)) for one in folders))
    if torch.distributed.get_rank() == 0:
        assert [one.exists() for one in folders] == [True, False]


def test_a_step_that_is_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step=3 of NetworkDoctor is too early\. Set 8 or more"):
        NetworkDoctor(3)


def test_nccl_hooks_and_sizes_of_buckets_are_recognised() -> None:
    with mock.patch("torch.distributed.get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        assert not network_doctor._is_gloo()

    def bf16_compress_hook() -> None: ...

    hooked: Any = DDPStrategy(ddp_comm_hook=bf16_compress_hook)
    for device, name in (("cpu", "ddp"), ("cuda", "ddp_bf16")):
        hooked.model = SimpleNamespace(bucket_bytes_cap=25 << 20)
        with mock.patch.object(type(hooked), "root_device", torch.device(device)):
            assert network_doctor._running(hooked) == name
    for mib, running in ((25, "ddp"), (100, "ddp, large buckets"), (10, None)):
        hooked.model = SimpleNamespace(bucket_bytes_cap=mib << 20)
        with mock.patch.object(type(hooked), "root_device", torch.device("cpu")):
            assert network_doctor._running(hooked) == running


class _SecondOrder(Net):
    @override
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters())


@distributed((2,))
def test_lbfgs_is_left_alone_and_the_file_may_be_on_an_object_store(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(ddp(), _SecondOrder(), NetworkDoctor(STEP, str(tmp_path)), max_epochs=5)
    _fitted("ddp", NetworkDoctor(STEP, "memory://some/folder"))
    assert not list(tmp_path.glob("network_doctor.json"))
    if torch.distributed.get_rank() == 0:
        assert sum("LBFGS computes several gradients a step" in str(w.message) for w in said) == 1
        with fsspec.open("memory://some/folder/network_doctor.json") as file:
            assert json.load(file)["running"] == "ddp"
