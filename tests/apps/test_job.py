import os

import pytest
import torch
import torch.distributed as dist
from hydra.utils import instantiate

from lightning_dear.apps import job
from tests.conf.composing import composed


def test_a_job_leaves_no_trace(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "before")
    before = dict(os.environ)
    num_threads = torch.get_num_threads()
    with job.isolated_job():
        os.environ.update(LOCAL_RANK="0", OMP_NUM_THREADS="1")
        torch.set_num_threads(num_threads + 1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == num_threads
    assert not dist.is_initialized()


def fail_to_build():
    with pytest.raises(Exception, match="Error in call") as caught:
        instantiate({"part": {"_target_": "torch.nn.Linear", "in_features": "x", "bias": 1}})
    return caught.value


def test_an_error_while_building_names_the_cause_and_the_place():
    message = job.describe(fail_to_build())
    assert message.startswith("TypeError: ")
    assert "out_features" in message
    assert message.endswith("(while building `part`)")


def test_other_errors_are_described_by_type_and_message():
    assert job.describe(ValueError("no such shape")) == "ValueError: no such shape"


def test_an_error_is_one_message_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with composed(tmp_path), pytest.raises(SystemExit) as caught, job.one_message("program"):
        raise ValueError("no such shape")
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "program: ValueError: no such shape"
    assert len(lines) == 2
    # Nothing else was written.
    assert not tmp_path.exists()


def test_the_traceback_stays_beside_what_was_written(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (tmp_path / "config.yaml").touch()
    with composed(tmp_path), pytest.raises(SystemExit), job.one_message("program"):
        raise ValueError("no such shape")
    assert str(tmp_path / "traceback_rank0.txt") in capsys.readouterr().err
    assert "raise ValueError" in (tmp_path / "traceback_rank0.txt").read_text()


def test_the_whole_error_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with composed(tmp_path), pytest.raises(ValueError, match="shape"), job.one_message("program"):
        raise ValueError("no such shape")
