"""`dear-plan calibrate` as a user runs it: it measures, and `dear-plan` plans with that."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_dear.apps.calibrate.calibrate import Calibration, cluster_of
from lightning_dear.apps.plan.config import measured_network, network_of, world_sizes_of
from lightning_dear.planning import LinkCost
from lightning_dear.planning.predict import StepModel
from lightning_dear.simulator import Curve, Link
from lightning_dear.simulator.saved import load_workload
from lightning_dear.simulator.workload import units_of
from lightning_dear.studies.probes import Costs
from tests.apps.test_train import QUICK, run
from tests.planning.models import chain

PROGRAM = ("-m", "lightning_dear.apps.plan")
LINK = LinkCost(1e-4, 1e-9)


def about(seconds: float) -> list[float]:
    """Half as much at best, and twice as much at worst."""
    return [seconds, 2 * seconds, 0.5 * seconds]


COSTS = Costs(
    [
        LinkCost(part * 1e-4, part * 1e-9, LinkCost(part * 2e-4, part * 2e-9))
        for part in (1, 2, 0.5)
    ],
    # Of 8 ranks each sends 7 eighths.
    {8000: about(3e-4), 8000000: about(1e-3)},
    {8000: about(5e-4), 8000000: about(2e-3)},
    sharding_s=3e-3,
)
NUM_TENSORS = 100
CLUSTER = OmegaConf.create({"cluster": {"num_nodes": 2, "accelerator": "cpu", "interface": None}})


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Calibrate once with a compressor; return the result and the folder."""
    folder = tmp_path_factory.mktemp("calibration")
    options = (*QUICK, "compressor=bf16", "hydra.run.dir=out")
    return run(folder, "calibrate", *options, program=PROGRAM), folder / "out"


def test_it_measures_the_model_and_the_cluster(calibrated) -> None:
    result, folder = calibrated
    assert result.returncode == 0, result.stderr
    assert (folder / "cluster" / "measured.yaml").read_text() in result.stdout
    assert result.stderr.count("calibrate: what FSDP2 takes of a host ...") == 1
    workload = load_workload(folder / "model.json")
    assert workload.times.forward_s > 0
    assert (workload.times.step_s, workload.fixed_step_s > 0) == (0, True)
    assert set(workload.times.ready_s) == {tensor.index for tensor in workload.tensors}
    assert (workload.name, workload.compressor) == ("resnet", "bf16")
    assert workload.codecs.compressed.encode.of(1e6) > 0
    assert workload.shard_unit_mb == "blocks"
    # BatchNorm's buffers, and copies.
    assert 0 <= workload.copies_s < 1
    assert workload.sharding_s is not None
    assert 0 < workload.sharding_s < 1
    assert len(units_of(workload)) > 2
    cluster = OmegaConf.load(folder / "cluster" / "measured.yaml")
    assert (cluster.num_nodes, cluster.devices) == (1, 2)
    assert 0 < cluster.measured.sharded_tensor.seconds < 1e-2
    for curve in (cluster.measured.all_gather, cluster.measured.reduce_scatter):
        assert curve.seconds == sorted(curve.seconds)
        assert len(curve.sizes_bytes) == len(curve.seconds) >= 5
    assert cluster.beta_s_per_byte >= 0
    assert not cluster.measured.has_reduce_scatter


@pytest.mark.slow
def test_the_line_it_prints_plans_with_that(calibrated, tmp_path: Path) -> None:
    result, folder = calibrated
    program, *line = shlex.split(result.stdout.strip().splitlines()[-1])
    assert program == "dear-plan"
    few = ("strategies=[single,ddp,fsdp2,dear]", "world_sizes=[2]", "hydra.run.dir=plan")
    # As the line was printed in the folder above the job's.
    line = [word.replace("=out", f"={folder}") for word in line]
    planned = run(tmp_path, *line, *few, program=PROGRAM)
    assert planned.returncode == 0, planned.stderr
    assert "measured by dear-plan calibrate among 2 ranks" in planned.stdout
    assert "ours with compressor=bf16" in planned.stdout
    assert (tmp_path / "plan" / "plan.csv").is_file()


@pytest.mark.slow
def test_one_rank_has_no_network(tmp_path: Path) -> None:
    result = run(tmp_path, "calibrate", *QUICK, "cluster=single_process", program=PROGRAM)
    assert result.returncode != 0
    assert "One rank has no network to measure. Set cluster.ranks_per_host=2" in result.stderr


@pytest.mark.slow
def test_another_strategy_measures_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "calibrate", *QUICK, "strategy=ddp", program=PROGRAM)
    assert result.returncode != 0
    assert "measures with strategy=dear. Leave strategy=... out" in result.stderr


@pytest.mark.slow
def test_too_few_steps_are_said_to_be_too_few(tmp_path: Path) -> None:
    result = run(tmp_path, "calibrate", *QUICK, "trainer.max_steps=2", program=PROGRAM)
    assert result.returncode != 0
    assert "Set trainer.max_steps=20" in result.stderr


def test_the_planner_keeps_its_buckets_and_what_it_is_told() -> None:
    tensors, times = chain([3, 4], [1.0, 1.0], [1.0, 1.0])
    planner = Calibration(bucket_cap_mb=1)
    search = planner.search(tensors, 2, times, LINK)
    assert search.next() is None
    assert search.best == planner.plan(tensors, 2)
    assert planner.found == StepModel(tensors, 2, times, LINK)


def test_the_clusters_file_has_what_was_measured() -> None:
    file = OmegaConf.create(cluster_of(CLUSTER, 8, COSTS, NUM_TENSORS))
    assert (file.devices, file.alpha_s, file.beta_s_per_byte) == (4, 1e-4, 1e-9)
    network = network_of(file)
    # What four ranks of a node share is in what was measured.
    assert network.half_s(800.0) == pytest.approx(1e-4 + 700 * 1e-9)
    assert network.between == Link(1e-4, 1e-9)
    assert network.all_reduce == Link(2e-4, 2e-9)
    assert network.all_gather == Curve((7e3, 7e6), (3e-4, 1e-3), 3e-4)
    assert network.reduce_scatter == Curve((7e3, 7e6), (5e-4, 2e-3), 5e-4)
    assert network.sharded_tensor_s == pytest.approx(3e-5)


def test_a_longer_message_takes_no_less() -> None:
    costs = replace(COSTS, all_gather={8000: about(3e-4), 16000: about(1e-4), 8000000: about(1e-3)})
    found = cluster_of(CLUSTER, 8, costs, NUM_TENSORS)["measured"]["all_gather"]
    assert found["seconds"] == pytest.approx([2e-4, 2e-4, 1e-3])


@pytest.mark.parametrize("lacks", [{"all_gather": {"alpha_s": 1e-4}}, {"reduce_scatter": None}])
def test_an_earlier_versions_file_is_to_be_measured_again(lacks: dict) -> None:
    cluster = OmegaConf.create(cluster_of(CLUSTER, 8, COSTS, NUM_TENSORS))
    cluster.measured = OmegaConf.create({**cluster.measured, **lacks})
    with pytest.raises(ValueError, match="Run dear-plan calibrate again"):
        measured_network(cluster, 8)


def test_starts_cost_more_with_more_ranks() -> None:
    cluster = cluster_of(CLUSTER, 8, COSTS, NUM_TENSORS)
    network = network_of(OmegaConf.create(cluster), world_size=36)
    assert network.between.alpha_s == pytest.approx(5 * 1e-4)
    assert network.between.beta_s == 1e-9
    assert network.all_gather is not None
    assert network.all_gather.message_s(1.0) == pytest.approx(5 * 3e-4)
    # Bytes hide starts.
    assert network.all_gather.message_s(14e6) == pytest.approx(2e-3)


def test_ranks_of_one_machine_wait_for_its_cores() -> None:
    costs = replace(COSTS, all_reduce_cpu_s=1e-3)
    cluster = OmegaConf.create(cluster_of(CLUSTER, 4, costs, NUM_TENSORS))
    cluster.measured.shared_cores = 2
    # Of the 0.2 ms that 4 ranks were measured to take, 7 / 3; of the CPU's too, for 8 ranks.
    shared = measured_network(cluster, 8).all_reduce
    cluster.measured.shared_cores = None
    own = measured_network(cluster, 8).all_reduce
    assert shared is not None
    assert own is not None
    assert shared.alpha_s == pytest.approx(7 / 3 * 1e-3 * 8 / 2)
    assert own.alpha_s == pytest.approx(7 / 3 * 2e-4)
    assert shared.beta_s == own.beta_s == 2e-9


@pytest.mark.parametrize(
    ("cores", "world_size", "times"), [(None, 8, 1.0), (2, 8, 2.0), (2, 2, 0.5), (16, 8, 1.0)]
)
def test_what_a_sharded_tensor_takes_grows_where_ranks_share_cores(
    cores: int | None, world_size: int, times: float
) -> None:
    cluster = OmegaConf.create(cluster_of(CLUSTER, 4, COSTS, NUM_TENSORS))
    cluster.measured.shared_cores = cores
    network = measured_network(cluster, world_size)
    assert network.sharded_tensor_s == pytest.approx(times * 3e-5)
    assert network.host_growth == pytest.approx(times)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "ring"}, "A measured cluster ignores algorithm=ring"),
        ({"cluster": {"measured": {"num_nodes": 1}}}, "ranks on one host"),
    ],
)
def test_what_was_not_measured_is_not_planned_for(changes: dict, words: str) -> None:
    cfg = OmegaConf.create(
        {"cluster": cluster_of(CLUSTER, 8, COSTS, NUM_TENSORS), "algorithm": None}
    )
    asked = OmegaConf.merge(cfg, changes)
    with pytest.raises(ValueError, match=words):
        network_of(asked.cluster, asked.algorithm)


def test_one_node_says_nothing_of_more_ranks_than_it_had() -> None:
    alone = OmegaConf.create({"cluster": {"num_nodes": 1, "accelerator": "cpu", "interface": None}})
    cluster = cluster_of(alone, 8, COSTS, NUM_TENSORS)
    cfg = OmegaConf.create({"cluster": cluster, "algorithm": None, "world_sizes": None})
    assert network_of(cfg.cluster, world_size=4).world_size == 4
    with pytest.raises(ValueError, match="ranks on one host"):
        network_of(cfg.cluster, world_size=16)
    assert world_sizes_of(cfg) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match=r"Leave \[16\] out of world_sizes"):
        world_sizes_of(OmegaConf.merge(cfg, {"world_sizes": [2, 16]}))
