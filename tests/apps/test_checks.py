import os
from unittest.mock import Mock

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_dear import DearStrategy
from lightning_dear.apps import checks


def test_single_refuses_several_processes():
    checks.check_single_process(Mock(num_devices=1, num_nodes=1), "auto")
    checks.check_single_process(Mock(num_devices=4, num_nodes=2), object())
    for num_devices, num_nodes in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"Set cluster\.ranks_per_host"):
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


@pytest.mark.parametrize("is_ours", [False, True])
def test_each_strategy_is_checked_once(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    seen = Mock()
    monkeypatch.setattr(checks.starting, "check_start", seen)
    strategy = Mock(spec=DearStrategy if is_ours else DDPStrategy, num_nodes=2)
    strategy.cluster_environment, strategy.parallel_devices = object(), [object()]
    checks.check_launch(Mock(strategy=strategy))
    arguments = (strategy.cluster_environment, strategy.parallel_devices, 2)
    assert [one.args for one in seen.call_args_list] == ([] if is_ours else [arguments])
    checks.check_launch(Mock(strategy=object()))
