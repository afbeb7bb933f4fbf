"""How ranks were started is checked, and nodes that do not come are named."""

import logging
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer

from lightning_dear.strategy import starting

MAKERS = pytest.mark.parametrize("make", [Trainer, Fabric])
VARIABLES = (*starting.NODE_VARIABLES, "MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def made(make: type[Any], **options: Any) -> Any:
    return make(strategy="dear", accelerator="cpu", **options).strategy


@MAKERS
def test_a_node_that_no_other_can_find_is_refused(
    make: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"has 2 nodes, but nothing says.*torchrun.*MASTER_PORT"):
        made(make, devices=1, num_nodes=2)
    made(make, devices=2, num_nodes=1)
    for name in starting.NODE_VARIABLES:
        with monkeypatch.context() as change:
            change.setenv(name, "0")
            made(make, devices=1, num_nodes=2)


def test_an_environment_of_the_users_knows_its_nodes() -> None:
    class Own(LightningEnvironment):
        pass

    starting.check_start(Own(), [torch.device("cpu")], 2)


def torchrun(monkeypatch: pytest.MonkeyPatch, world: int, here: int) -> None:
    values = {"RANK": here - 1, "LOCAL_RANK": here - 1, "WORLD_SIZE": world}
    values |= {"GROUP_RANK": 0, "LOCAL_WORLD_SIZE": here, "MASTER_PORT": 29500}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    for name in ("MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "localhost")


@MAKERS
@pytest.mark.parametrize(
    ("world", "here", "devices", "num_nodes"),
    [(3, 3, 2, 1), (1, 1, 2, 1), (2, 2, 1, 2), (4, 2, 2, 1), (2, 2, 1, 1)],
)
def test_torchrun_with_another_number_of_ranks_is_refused_by_every_rank(
    make: type[Any], world: int, here: int, devices: int, num_nodes: int, monkeypatch: Any
) -> None:
    torchrun(monkeypatch, world, here)
    said = (
        rf"started {world} rank\(s\), {here} of them.*devices={devices} and num_nodes={num_nodes}"
    )
    for rank in range(here):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ValueError, match=said):
            made(make, devices=devices, num_nodes=num_nodes)


@MAKERS
@pytest.mark.parametrize(("world", "here", "devices", "num_nodes"), [(2, 2, 2, 1), (3, 2, 3, 1)])
def test_torchrun_with_as_many_ranks_passes(
    make: type[Any], world: int, here: int, devices: int, num_nodes: int, monkeypatch: Any
) -> None:
    torchrun(monkeypatch, world, here)
    made(make, devices=devices, num_nodes=num_nodes)


def test_another_launchers_surplus_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LightningEnvironment says that this is rank 2 of its"):
        starting.check_start(LightningEnvironment(), [torch.device("cpu")] * 2, 1)
    starting.check_start(LightningEnvironment(), [torch.device("cpu")] * 3, 1)


@MAKERS
def test_many_more_processes_than_cores_are_warned_about(make: type[Any]) -> None:
    with pytest.warns(UserWarning, match=r"devices=9999 starts 9999 processes on \d+ CPU core"):
        made(make, devices=9999)


def test_gpus_and_a_few_processes_are_not_warned_about(recwarn: pytest.WarningsRecorder) -> None:
    starting.check_start(LightningEnvironment(), [torch.device("cuda")] * 9999, 1)
    starting.check_start(LightningEnvironment(), [torch.device("cpu")] * 8, 1)
    assert not recwarn.list


@MAKERS
def test_after_a_while_the_strategy_says_which_node_does_not_come(
    make: type[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setattr(starting, "LATE_S", 0.05)
    with made(make, devices=2, num_nodes=2)._meeting():
        time.sleep(0.5)
    assert "Node 0 (rank 0) has waited 0.05 s at 127.0.0.1:29511 for node 1 (rank 2)" in caplog.text
    assert "NODE_RANK=1 MASTER_ADDR=ADDRESS_OF_NODE_0 MASTER_PORT=29511" in caplog.text


def test_many_nodes_are_not_all_listed(monkeypatch: Any, caplog: Any) -> None:
    place = {"main_address": "10.0.0.1", "main_port": 7}
    environment = Mock(spec=ClusterEnvironment, **place)
    environment.local_rank.return_value, environment.node_rank.return_value = 0, 3
    monkeypatch.setattr(starting, "LATE_S", 0.05)
    with starting.late_nodes_named(environment, 4, 64):
        time.sleep(0.5)
    assert "Node 3 (rank 12) has waited" in caplog.text
    assert (
        "for node 0 (rank 0), node 1 (rank 4), node 2 (rank 8), node 4 (rank 16), ." in caplog.text
    )
    assert "NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=7" in caplog.text


@pytest.mark.parametrize(("num_nodes", "local_rank"), [(1, 0), (2, 1)])
def test_one_node_and_other_local_ranks_say_nothing(
    num_nodes: int, local_rank: int, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(starting, "LATE_S", 0.05)
    environment = Mock(spec=TorchElasticEnvironment)
    environment.local_rank.return_value = local_rank
    with starting.late_nodes_named(environment, 1, num_nodes):
        time.sleep(0.3)
    assert not caplog.text


def test_nobody_is_named_after_the_meeting(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(starting, "LATE_S", 0.2)
    with starting.late_nodes_named(LightningEnvironment(), 1, 2):
        pass
    time.sleep(0.4)
    assert not caplog.text
