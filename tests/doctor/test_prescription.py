"""What is predicted from times and links, and how it is said."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.doctor import prescription
from lightning_dear.doctor.links import Pair
from lightning_dear.doctor.prescription import Case, Findings, measured_devices
from lightning_dear.doctor.step_watch import StepTimes
from lightning_dear.planning import LinkCost, ModelTimes, TensorSpec
from lightning_dear.studies.device_costs import Device

FAST = Device(1e-5, 5e10)
TENSORS = [TensorSpec(i, f"{i}.weight", 1 << 20, 4, "fp32", i, 7 - i) for i in range(8)]
TIMES = ModelTimes(
    0.08, 0.16, {i: 0.01 * i for i in range(8)}, {7 - i: 0.02 * (i + 1) for i in range(8)}, 0.01
)


def case(rate: float = 12.5e6, **others: object) -> Case:
    """33.6 MB on two ranks, with `rate` bytes a second."""
    cost = LinkCost(1e-3, 1 / rate, LinkCost(1e-3, 1 / rate))
    made = Case(
        TENSORS, TIMES, 1, cost, 2, dict.fromkeys(("bf16", "int8"), FAST), 0.0, True, "ddp", 2.85
    )
    return replace(made, **others)  # type: ignore[arg-type]


def findings(of: Case | None, *exposed_s: float) -> Findings:
    told = [StepTimes(TIMES, 3.0, one, 0.0, 1) for one in exposed_s or (2.7, 2.7)]
    return Findings(told, of, [Pair(0, 1, 12e6, 0.002)], (0, 1))


def test_a_slow_network_is_told_and_a_line_to_paste_for_each_help() -> None:
    said = findings(case()).text
    assert "computing 250.0 ms, waiting for messages 2700.0 ms" in said
    assert "Communication is 90% of a step. Now (measured): 2850.0 ms a batch;" in said
    assert "These predictions are off by 6% on the average:" in said
    assert "  from lightning_dear import DearStrategy" in said
    assert "  from lightning_dear.studies.competitors import Bf16DDPStrategy" in said
    assert "strategies import DDPStrategy" not in said
    assert '  Trainer(strategy=DearStrategy(compressor="int8"), ...)  # dear + int8: ' in said
    assert "slowest pair between hosts: ranks 0 and 1: 12.00 MB/s" in said
    assert "longest round trip between two ranks: 2.0 ms" in said
    (now,) = [line.split() for line in said.splitlines() if line.startswith("ddp (now)")]
    assert now[2:4] == ["2850.0", "1.00"]
    assert max(map(len, said.splitlines()[-16:-1])) <= 100


def test_where_messages_are_hidden_nothing_helps() -> None:
    said = findings(case(), 0.1, 0.1).text
    assert said.endswith("Communication is 3% of a step: nothing here will help.")


def test_without_links_only_the_step_is_told() -> None:
    said = findings(None).text
    assert "Links were not measured: that has not been run with NCCL yet." in said


def test_waiting_for_a_late_rank_is_no_communication() -> None:
    found = findings(case(), 2.7, 0.7)
    assert found.numbers["messages_s"] == 0.7
    assert found.numbers["late_rank_s"] == pytest.approx(2.0)
    assert "(rank 1 is late)" in found.text


def test_predictions_by_hand() -> None:
    """33.6 MB at 12.5 MB/s: DDP's all-reduces take 2.68 s, and begin when gradients come."""
    options = {one.name: one.batch_s for one in case().options}
    assert options["ddp"] == pytest.approx(0.09 + 0.02 + 2.68, rel=0.03)
    assert options["ddp_bf16"] == pytest.approx(0.09 + 0.02 + 1.34, rel=0.05)
    assert options["dear + int8"] < options["ddp_bf16"] < options["dear"]
    accumulated = ((4 - 1) * 0.24 + options["ddp"]) / 4
    assert options["accumulate_grad_batches=4"] == pytest.approx(accumulated)
    assert case().alone_s == pytest.approx(0.25)


def test_on_gloo_the_hook_is_ours_and_on_nccl_lightnings() -> None:
    pastes = [
        next(one.paste for one in case(is_gloo=gloo).options if one.name == "ddp_bf16")
        for gloo in (True, False)
    ]
    assert "Bf16DDPStrategy()" in pastes[0]
    assert "ddp_comm_hook=default_hooks.bf16_compress_hook" in pastes[1]


@settings(max_examples=10, deadline=None)
@given(st.floats(1e6, 1e10))
def test_the_rate_that_is_needed_is_the_one_at_which_it_is_reached(rate: float) -> None:
    one = case(rate)
    for name in ("ddp", "dear"):
        bits = one.needed(name)
        assert bits is not None
        for share, is_enough in ((0.98, False), (1.02, True)):
            cost = LinkCost(1e-3, 8 / (share * bits), LinkCost(1e-3, 8 / (share * bits)))
            reached = 0.25 / replace(one, cost=cost).predicted(name).step.step_s
            assert (reached >= 0.9) == is_enough


def test_no_rate_is_enough_where_messages_take_too_long_to_start() -> None:
    slow = LinkCost(1.0, 1e-8, LinkCost(1.0, 1e-8))
    assert case(cost=slow).needed("dear") is None
    assert "dear no rate is enough" in findings(case(cost=slow)).text


def test_predictions_err_at_least_as_much_as_that_of_now() -> None:
    assert case(batch_s=case().predicted("ddp").step.step_s).error == 0.06
    assert case(batch_s=2 * case().predicted("ddp").step.step_s).error == pytest.approx(0.5)
    assert case(running=None).error == 0.06


def test_all_figures_are_json() -> None:
    figures = json.loads(json.dumps(findings(case()).figures))
    assert figures["needed_bits_per_s"].keys() == {"ddp", "ddp_bf16", "dear", "dear + int8"}
    assert figures["share"] == pytest.approx(0.9)


def test_encoding_is_measured_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    devices = measured_devices(torch.device("cpu"))
    assert devices.keys() == {"bf16", "int8"}
    assert all(1e8 < one.bytes_per_s < 1e13 and one.kernel_s < 1e-2 for one in devices.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_links_too_fast_to_tell_are_said_so() -> None:
    fast = findings(case(cost=LinkCost(1e-3, 0.0)))
    assert "rate of each rank while all send: too fast to tell" in fast.text
    assert case(cost=LinkCost(1e-3, 0.0)).all_needed == {}
    assert "each rank needs" not in fast.text


def test_every_line_to_paste_runs_as_it_stands() -> None:
    pytest.importorskip("lightning")
    for gloo in (True, False):
        said = findings(case(is_gloo=gloo)).text
        lines = [line.strip() for line in said.splitlines() if line.startswith("  ")]
        names: dict[str, object] = {}
        exec("\n".join(one for one in lines if "import" in one), names)
        pastes = [one for one in lines if one.startswith("Trainer(") and "accumulate" not in one]
        assert len(pastes) >= 3
        for one in pastes:
            strategy, _, _ = one.removeprefix("Trainer(strategy=").partition(", ...)  #")
            eval(strategy, names)


def test_scripts_of_pytorch_lightning_get_its_own_lines() -> None:
    mirror = import_module("lightning_dear.pytorch_lightning.doctor.prescription")
    assert mirror._IMPORTS["=DearStrategy("] == (
        "from lightning_dear.pytorch_lightning import DearStrategy"
    )
    assert mirror._IMPORTS["=DDPStrategy("].startswith("from pytorch_lightning.")
    # There is no strategy with the hook for it on gloo.
    assert mirror._BF16_ON_GLOO == ""
    with mock.patch.object(prescription, "_BF16_ON_GLOO", ""):
        said = findings(case()).text
    assert "Bf16DDPStrategy" not in said
    assert "Trainer(, ...)" not in said


def test_hooks_that_read_gradients_are_named_with_what_they_cost() -> None:
    one = case(hooks=("Net.on_after_backward",), num_hook_gathers=2)
    # 33.6 MB at 12.5 MB/s, half of it to the other rank, and 1 ms each.
    assert one.hooks_s == pytest.approx(2 * (0.5 * 33.6 / 12.5 + 1e-3), rel=0.01)
    said = findings(one).text
    assert 'DearStrategy(compressor="int8", gradients_in_hooks=False)' in said
    assert "Net.on_after_backward may read .grad. If so, leave gradients_in_hooks=False" in said
    assert "ddp (now)" in said
    # Under dear with hooks the prediction of now has their gathers, and no row is what runs.
    seconds = one.predicted("dear").step.step_s + one.hooks_s
    pays = replace(one, running="dear", pays_for_hooks=True, batch_s=seconds)
    assert pays.error == 0.06
    batches = {one.name: one.batch_s for one in pays.options}
    alone = replace(pays, pays_for_hooks=False)
    without = {one.name: one.batch_s for one in alone.options}
    slower = batches["accumulate_grad_batches=2"] - without["accumulate_grad_batches=2"]
    assert slower == pytest.approx(one.hooks_s / 2)
    assert batches["dear"] == without["dear"]
    said = findings(pays).text
    assert "(now)" not in said.replace("Now (measured)", "")
    assert "gradients_in_hooks" not in findings(case()).text


def test_a_slow_loader_is_named() -> None:
    assert "Try a larger num_workers" not in findings(case()).text
    slow = findings(case())
    told = [one._replace(step_s=4.0) for one in slow.told]
    assert "data and the rest 1050.0 ms (the loader? Try" in replace(slow, told=told).text
