import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_dear.apps import checks


def test_single_refuses_several_processes():
    checks.check_single_process(Mock(num_devices=1, num_nodes=1), "auto")
    checks.check_single_process(Mock(num_devices=4, num_nodes=2), object())
    for num_devices, num_nodes in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"Set cluster\.devices"):
            checks.check_single_process(Mock(num_devices=num_devices, num_nodes=num_nodes), "auto")


def test_an_interface_is_given_to_both_libraries(monkeypatch):
    for name in checks.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "before")
    checks.use_interface("lo")
    assert [os.environ[name] for name in checks.INTERFACE_VARIABLES] == ["lo", "lo"]


def test_an_unknown_interface_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'eth99'.*\blo\b"):
        checks.use_interface("eth99")


def test_no_interface_changes_nothing():
    before = dict(os.environ)
    checks.use_interface(None)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        (["fusion=none"], ["fusion"]),
        (["fusion.bucket_cap_mb=1", "+compressor=none"], ["fusion", "compressor"]),
        (["seed=1"], []),
    ],
)
def test_choices_that_nothing_reads_are_found(overrides, ignored):
    assert checks.ignored_groups(overrides, {"_target_": "DDPStrategy"}) == ignored
    dear = {"_target_": "DearStrategy", "fusion": "${fusion}", "compressor": "${compressor}"}
    assert checks.ignored_groups(overrides, dear) == []


def test_options_that_do_not_exist_are_found():
    known = ["strategy", "fusion", "callbacks", "seed", "task_name"]
    assert checks.unknown_options([*known, "strategi"]) == {"strategi": " Is 'strategy' meant?"}


def test_nodes_that_nobody_starts_are_not_waited_for(monkeypatch) -> None:
    for name in checks.NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def check(num_nodes: int, **strategy: object) -> None:
        checks.check_nodes(Mock(num_nodes=num_nodes, strategy=SimpleNamespace(**strategy)))

    with pytest.raises(ValueError, match=r"has 16 nodes, but nothing says.*torchrun"):
        check(16, cluster_environment=LightningEnvironment())
    check(1, cluster_environment=LightningEnvironment())
    check(16, cluster_environment=TorchElasticEnvironment())
    check(16)
    monkeypatch.setenv("NODE_RANK", "0")
    check(16, cluster_environment=LightningEnvironment())
