"""dear-plan: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_dear.apps.plan.plan import plan
from lightning_dear.paths import conf_dir
from lightning_dear.simulator import Workload
from lightning_dear.simulator.saved import save_workload
from lightning_dear.workloads.replay import load_profile
from tests.planning.models import chain
from tests.workloads.replaying import divided

PLANNED = sorted(
    path.stem for path in (conf_dir() / "cluster").glob("*.yaml") if "source:" in path.read_text()
)
FEW = ("strategies=[single,ddp,dear,bytescheduler]", "world_sizes=[1,4,8,16]")


def planned(folder: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("plan", list(overrides))
    return plan(cfg, folder)


def test_it_says_what_to_use_and_leaves_the_figures(tmp_path, capsys) -> None:
    best = planned(tmp_path, *FEW, "cluster.num_nodes=4")
    said = capsys.readouterr().out
    assert best.strategy.name == "dear"
    for words in (
        "16 ranks on 4 node(s)",
        "9.41 Gb/s",
        "SIMULATED",
        "Use dear",
        "dear-train strategy=dear\n",
        "dear-bench cluster=emulated cluster.rate_mbit=588 model.profile=bert_base model.scale=16",
    ):
        assert words in said
    assert said.startswith((tmp_path / "table.txt").read_text().rstrip())
    rows = (tmp_path / "plan.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[:3]] == ["strategy", "single", "dear"]
    assert len((tmp_path / "scaling.csv").read_text().splitlines()) == 1 + 4 * 4
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "all_gather"}
    for picture in ("scaling.png", "timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def test_one_node_has_links_within(tmp_path, capsys) -> None:
    planned(tmp_path, "strategies=[ddp]", "world_sizes=[8]", "cluster=nvlink_8gpu")
    assert "8 ranks on 1 node(s); links within the node: 1.04e+03 Gb/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cluster", [*PLANNED[:3], *(pytest.param(one, marks=pytest.mark.slow) for one in PLANNED[3:])]
)
def test_every_cluster_that_names_its_source_can_be_planned_for(tmp_path, cluster, capsys) -> None:
    planned(tmp_path, "strategies=[ddp,dear]", "world_sizes=[64]", f"cluster={cluster}")
    said = capsys.readouterr().out
    assert any(words in said for words in ("Network: nominal", "assumptions", "authors' code"))


def test_it_says_when_ddp_will_do(tmp_path, capsys) -> None:
    fast = "cluster.beta_s_per_byte=1.0e-11"
    assert planned(tmp_path, *FEW, fast, "profile=resnet50").strategy.name == "ddp"
    said = capsys.readouterr().out
    assert "DDP will do" in said
    assert "dear-train strategy=ddp\n" in said


def test_the_users_own_seconds_and_numbers_count(tmp_path, capsys) -> None:
    options = ("compute_s=3.0", "cluster.num_nodes=2", "cluster.devices=2", "step_s=0.5")
    planned(tmp_path, *FEW, *options)
    said = capsys.readouterr().out
    assert "forward 1000.0 ms, backward 2000.0 ms" in said
    assert "4 ranks on 2 node(s)" in said
    assert re.search(r"single +3500\.0 ", said)


def test_the_line_to_try_emulates_the_link_that_is_used(tmp_path, capsys) -> None:
    planned(tmp_path, *FEW[1:], "cluster=pcie_8gpu", "compute_s=0.5", "strategies=[dear]")
    said = capsys.readouterr().out
    # 10 GB/s, and not what lies between nodes.
    assert "cluster.rate_mbit=625 model.profile=bert_base model.scale=128" in said
    assert "model.compute_s=0.5" in said


def test_seconds_are_divided_as_the_profile_divides_them(tmp_path, capsys) -> None:
    saved = tmp_path / "even.json"
    profile = divided(load_profile("vgg16"), 0.5, 0.5)
    profile.save(saved)
    planned(tmp_path, *FEW, f"profile={saved}", "compute_s=3.0")
    assert "forward 1500.0 ms, backward 1500.0 ms" in capsys.readouterr().out


def test_a_profile_that_takes_no_time_is_refused(tmp_path) -> None:
    profile = load_profile("vgg16")
    layers = tuple(replace(one, forward_s=0.0, backward_s=0.0) for one in profile.layers)
    saved = tmp_path / "nothing.json"
    replace(profile, layers=layers).save(saved)
    with pytest.raises(ValueError, match="takes no time, so there is nothing to compare"):
        planned(tmp_path, *FEW, f"profile={saved}")


def fsdp2_step_s(folder: Path, *options: str) -> float:
    planned(folder, "strategies=[fsdp2]", "world_sizes=[1]", *options)
    (row,) = csv.DictReader((folder / "plan.csv").read_text().splitlines())
    return float(row["step_s"])


def test_units_are_as_large_as_is_asked_for(tmp_path) -> None:
    usual_s = fsdp2_step_s(tmp_path, "profile=resnet50")
    assert fsdp2_step_s(tmp_path, "profile=resnet50", "shard_unit_mb=25") == usual_s
    # One unit for all overlaps nothing.
    assert fsdp2_step_s(tmp_path, "profile=resnet50", "shard_unit_mb=1000") > usual_s


@pytest.mark.parametrize(("name", "warns"), [("block{}", True), ("blocks.{}.weight", False)])
def test_a_measured_model_without_numbered_blocks_is_said_to_be_one_unit(
    tmp_path, caplog, name: str, warns: bool
) -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    tensors = [replace(one, name=name.format(one.index)) for one in tensors]
    saved = tmp_path / "model.json"
    mine = Workload("mine", tensors, times, shard_unit_mb="blocks", sharding_s=50.0)
    save_workload(mine, saved)
    fsdp2_step_s(tmp_path, f"profile={saved}")
    assert ("No tensor's name numbers a block" in caplog.text) == warns
    caplog.clear()
    # What a host takes was measured in blocks.
    assert fsdp2_step_s(tmp_path, f"profile={saved}") > 50
    caplog.clear()
    assert fsdp2_step_s(tmp_path, f"profile={saved}", "shard_unit_mb=25") < 50
    assert not caplog.records


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("profile=bert_huge", "Unknown profile 'bert_huge'; valid names: bert_base"),
        ("strategies=[dare]", "Unknown strategy 'dare'; valid ones: single, wfbp, ddp"),
        ("cluster=gpu_host", "set cluster.devices=8"),
        ("cluster.beta_s_per_byte=null", "set cluster.beta_s_per_byte"),
        ("algorithm=rings", "Unknown algorithm 'rings'; valid ones: pairwise"),
        ("stragglers.sigma=-1", "sigma must be finite and not negative"),
        ("contention=-1", "contention must be finite and not negative"),
        ("state_bytes=-1", "state_bytes must be finite and not negative"),
        ("step_s=inf", "step_s must be finite"),
        ("enough=2", "enough is a share of a step"),
        ("num_steps=0", "num_steps must be at least 1"),
        ("cluster=single_process", "has one rank, which sends nothing; set cluster.num_nodes"),
        ("strategies=ddp", "strategies must be a list: strategies=[ddp]"),
        ("world_sizes=[0]", "world_sizes must be at least 1"),
        ("world_sizes=[5,7]", "None of world_sizes=[5, 7] fits into nodes of 4 ranks"),
        ("shard_unit_mb=-1", "shard_unit_mb must be MiB, finite and not negative, or 'blocks'"),
        ("shard_unit_mb=layers", "got 'layers'"),
        ("shard_unit_mb=blocks", "named after layers and not after blocks; give shard_unit_mb in"),
        ("stragglers.slow_factor=3", "slow_share and slow_factor go together"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, override, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        planned(tmp_path, "strategies=[single,ddp]", "world_sizes=[1]", override)
