"""The replay as a job of `dear-train`."""

import pytest

from lightning_dear.apps import job
from lightning_dear.apps.train import train
from tests.conf.composing import composed


@pytest.mark.parametrize("strategy", ["single", "dear"])
def test_a_replay_is_fitted_and_tested(strategy, tmp_path):
    choices = ("model=replay", "data=replay", f"strategy={strategy}", "cluster=single_process")
    quick = ("trainer.fast_dev_run=true", "trainer.enable_progress_bar=false")
    model = ("model.profile=lstm", "model.scale=1000", "model.compute_s=0.01")
    with composed(tmp_path, *choices, *quick, *model) as config, job.isolated_job():
        assert train.train(config) == {}
