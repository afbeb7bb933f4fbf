"""What a composed job is built of, and what it says about choices that nothing reads."""

from unittest.mock import Mock

import pytest
from hydra.errors import InstantiationException

from lightning_dear.apps.bench.build import build_starter
from lightning_dear.apps.train import train
from lightning_dear.callbacks import TimelineCallback
from lightning_dear.strategy.starting import NODE_VARIABLES
from tests.conf.composing import composed


@pytest.mark.parametrize("strategy", ["dear", "ddp", "single"])
def test_an_ignored_choice_is_warned_about(strategy, tmp_path, caplog):
    with composed(tmp_path, f"strategy={strategy}", "fusion=none") as config:
        train.check(config)
    assert ("fusion is ignored" in caplog.text) is (strategy != "dear")


def test_an_added_option_that_is_misspelt_is_refused(tmp_path, caplog):
    with (
        composed(tmp_path, "strategy=single", "+compresor=int8") as config,
        pytest.raises(ValueError, match="compresor is no option .* Is 'compressor' meant"),
    ):
        train.check(config)
    with composed(tmp_path, "strategy=single", "+zzz=int8") as config:
        train.check(config)
    assert "zzz is no option of dear-train" in caplog.text


@pytest.mark.parametrize(("choice", "warns"), [("default", False), ("timeline", True)])
def test_a_timeline_that_nobody_asked_for_is_not_missed(choice, warns, tmp_path, recwarn):
    with composed(tmp_path, "strategy=ddp", f"callbacks={choice}", "logger=none") as config:
        trainer = train.build_trainer(config)
    (timeline,) = (one for one in trainer.callbacks if isinstance(one, TimelineCallback))
    timeline.on_fit_start(trainer)
    timeline.on_train_end(Mock(strategy=Mock(spec=["timeline"])))
    said = [str(one.message) for one in recwarn if "imeline" in str(one.message)]
    assert len(said) == 2 * warns, said


def test_without_loggers_the_trainer_has_none(tmp_path):
    with composed(tmp_path, "strategy=single", "logger=none") as config:
        assert train.build_trainer(config).loggers == []


@pytest.mark.parametrize("strategy", ["ddp", "dear"])
def test_nodes_that_nobody_starts_are_refused_by_every_program(tmp_path, monkeypatch, strategy):
    for name in NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with (
        composed(tmp_path, f"strategy={strategy}", "cluster.num_nodes=16") as config,
        pytest.raises(
            (ValueError, InstantiationException), match="nothing says that this is one of them"
        ),
    ):
        train.build_trainer(config)
    with (
        composed(tmp_path, "cluster.num_nodes=16") as config,
        pytest.raises(ValueError, match="nothing says that this is one of them"),
    ):
        build_starter(config)
