"""Starting ranks: the arguments of a child, and the end of all when one fails."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra.conf import ConfigSourceInfo
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from omegaconf import open_dict, read_write

from lightning_dear.paths import conf_dir
from lightning_dear.strategy import launchers
from lightning_dear.strategy.failures import Line
from lightning_dear.strategy.launchers import (
    JobLauncher,
    configure_launcher,
    end_processes,
    job_arguments,
)
from tests.conf.composing import composed

LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


def arguments(folder, *overrides, mode=RunMode.RUN):
    with composed(folder, *overrides):
        config = HydraConfig.get()
        with read_write(config):
            config.mode = mode
            config.job.id = "job 3"
            config.job.num = 3
        return job_arguments(config, local_rank=1)


def test_a_child_gets_the_overrides_of_its_job(tmp_path):
    found = arguments(tmp_path, "seed=7", "experiment=lm", "+hydra.job.env_set.A=b")
    assert {"seed=7", "experiment=lm", "+hydra.job.env_set.A=b", "hydra.mode=RUN"} <= set(found)
    assert found[:2] == ["--config-name", "train"]
    assert found[found.index("--config-path") + 1] == str(conf_dir())


def test_a_child_works_in_the_folder_of_its_job(tmp_path):
    folder = tmp_path / "it's a=b, c"
    found = arguments(folder, "hydra.run.dir=elsewhere", "hydra.job.name=mine")
    assert [item for item in found if item.startswith("hydra.run.dir")] == [
        f"hydra.run.dir='{tmp_path}/it\\'s a=b, c'"
    ]
    assert [item for item in found if "job.name" in item] == ["hydra.job.name='mine_rank1'"]
    assert "hydra.output_subdir=null" in found


def test_a_child_of_a_sweep_runs_one_job_of_it(tmp_path):
    found = arguments(
        tmp_path, "hydra.sweep.dir=x", "hydra.sweeper.max_batch_size=1", mode=RunMode.MULTIRUN
    )
    assert not {"-m", "--multirun"} & set(found)
    assert not [item for item in found if item.startswith("hydra.sweep")]
    assert found[-2:] == ["hydra.job.num=3", "hydra.job.id='job 3'"]


def test_a_child_is_given_what_was_given(tmp_path):
    """Neither a config's name, where there is none, nor what a reference means, but a package."""
    with composed(tmp_path, "task_name=${seed}"):
        config = HydraConfig.get()
        with read_write(config), open_dict(config):
            config.job.config_name = None
            config.runtime.config_sources = [
                ConfigSourceInfo("theirs.conf", "pkg", "main"),
                ConfigSourceInfo("/elsewhere", "file", "lightning-dear"),
            ]
        found = job_arguments(config, local_rank=1)
    assert found[:3] == ["--config-path", "pkg://theirs.conf", "task_name=${seed}"]
    assert not {"None", "--config-name", "/elsewhere"} & set(found)


def test_a_script_that_only_composes_is_repeated_as_it_was_called(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script), "x=1"])
    with composed(tmp_path), read_write(HydraConfig.get()):
        HydraConfig.get().runtime.output_dir = "???"
        assert launchers.child_command(1) == ([sys.executable, str(script), "x=1"], None)


def trainer_of(devices, tmp_path, **options):
    strategy = DDPStrategy(**options)
    Trainer(strategy=strategy, accelerator="cpu", devices=devices, default_root_dir=tmp_path)
    return strategy


def test_the_script_launcher_is_replaced(tmp_path):
    strategy = trainer_of(2, tmp_path)
    configure_launcher(strategy)
    first = strategy.launcher
    assert type(first) is JobLauncher
    assert first.num_processes == 2
    configure_launcher(strategy)
    assert strategy.launcher is first


def test_one_process_needs_no_launcher(tmp_path):
    strategy = trainer_of(1, tmp_path)
    configure_launcher(strategy)
    assert strategy.launcher is None


def test_other_launchers_stay(tmp_path):
    strategy = trainer_of(2, tmp_path, start_method="spawn")
    before = strategy.launcher
    configure_launcher(strategy)
    assert strategy.launcher is before


@pytest.fixture
def make_launcher(monkeypatch):
    """Return a function that makes a launcher whose one child runs a Python statement."""
    for name in LAUNCH_VARIABLES:
        # Set and deleted through monkeypatch, so that the launcher's values go at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launchers, "_launched", [])
    all_made = []

    def make(statement):
        command = [sys.executable, "-c", statement]
        made = JobLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
        monkeypatch.setattr(made, "_start", lambda local_rank: subprocess.Popen(command))
        all_made.append(made)
        return made

    yield make
    for made in all_made:
        # What would run at the end of this process.
        atexit.unregister(made._end_children)


def test_the_result_comes_back_and_children_are_started_once(make_launcher):
    made = make_launcher("pass")
    assert made.launch(lambda a, b: a + b, 1, b=2, trainer=None) == 3
    procs = made.procs
    assert made.launch(lambda: "again") == "again"
    assert made.procs is procs
    assert end_processes(procs, 30.0) == [0]


def test_a_failure_here_ends_hanging_children_with_the_process(make_launcher, monkeypatch):
    monkeypatch.setattr(launchers, "GRACE_S", 0.1)
    made = make_launcher("import time; time.sleep(600)")

    def fail():
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        made.launch(fail)
    # Exception checkpoints are saved from here on, which takes all ranks.
    assert made.procs[0].poll() is None
    made._end_children()
    assert made.procs[0].returncode == -9


def test_the_first_failure_is_printed_last(make_launcher, monkeypatch, capfd):
    monkeypatch.setattr(launchers, "GRACE_S", 30.0)
    monkeypatch.setattr(
        launchers.failure_watch, "first_failure", lambda: Line(1, "cause", "ValueError: bad batch")
    )
    made = make_launcher("import sys; print('noise', file=sys.stderr)")

    def fail():
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        made.launch(fail)
    made._end_children()
    assert capfd.readouterr().err.endswith("Rank 1 failed first: ValueError: bad batch\n")


@pytest.fixture
def exit_codes(monkeypatch):
    """What this process would have ended with; `event` is set once it would."""
    codes, event = [], threading.Event()
    monkeypatch.setattr(launchers.os, "_exit", lambda code: (codes.append(code), event.set()))
    return codes, event


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_rank_0_does_not_succeed_without_the_others(
    make_launcher, monkeypatch, exit_codes, statement
):
    monkeypatch.setattr(launchers, "GRACE_S", 30.0)
    monkeypatch.setattr(launchers, "END_S", 3.0)
    codes, _ = exit_codes
    made = make_launcher(statement)
    made.launch(lambda: None)
    made._end_children()
    assert codes == [1]
    # For the thread that also watches.
    made._is_failing.set()


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_is_over_leaves_no_children(
    make_launcher, monkeypatch, exit_codes, code, is_failing
):
    """And if one has failed, the process will, unless its own failure is known."""
    registered = []
    made = make_launcher(f"raise SystemExit({code})")
    end = launchers.job_end()
    made.launch(lambda: None)
    if is_failing:
        made._is_failing.set()
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    end()
    assert made.procs[0].returncode == code
    # It is not ended now, as the watch would have it.
    assert made._is_failing.is_set()
    assert not set(LAUNCH_VARIABLES) & os.environ.keys()
    if code and not is_failing:
        ((_, reason),) = registered
        assert reason == "Rank 0 was done, but local rank 1 exited with code 3"
    else:
        assert not registered


def test_the_tuner_may_leave_its_trial_without_ending_anybody(make_launcher):
    made = make_launcher("import time; time.sleep(600)")

    def leave():
        raise _TunerExitException

    with pytest.raises(_TunerExitException):
        made.launch(leave)
    assert made.procs[0].poll() is None
    made._is_failing.set()
    end_processes(made.procs, 0.0)


def test_a_failing_child_ends_this_process(make_launcher, monkeypatch, exit_codes):
    monkeypatch.setattr(launchers, "GRACE_S", 0.1)
    codes, ended = exit_codes
    made = make_launcher("raise SystemExit(3)")
    # Stands for a training loop that never communicates and so never notices.
    assert made.launch(ended.wait, 30.0)
    assert codes == [1]


def test_a_launch_after_a_failed_one_is_watched_again(make_launcher, monkeypatch, exit_codes):
    monkeypatch.setattr(launchers, "GRACE_S", 0.1)
    codes, ended = exit_codes
    made = make_launcher("")
    monkeypatch.setattr(
        made,
        "_start",
        lambda local_rank: subprocess.Popen(
            [sys.executable, "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE
        ),
    )

    def fail():
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        made.launch(fail)
    first_heard = made.has_heard_signal

    def child_fails():
        made.procs[0].communicate(b"\n")
        return ended.wait(30.0)

    assert made.launch(child_fails)
    assert codes == [1]
    # Each launch waits for a signal of its own.
    assert first_heard.is_set()
    assert made.has_heard_signal is not first_heard


_CHILD = """
import time
from lightning_dear.strategy import launchers
from lightning_dear.strategy.failures import Line
launchers.GRACE_S = 0.1
launchers.watch_parent()
print("watching", flush=True)
time.sleep(600)
"""


def test_a_child_does_not_outlive_rank_0(tmp_path):
    """Rank 0 dies without a chance to do anything about it."""
    rank_0 = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {_CHILD!r}]\n"
        f"environment = {{**os.environ, {launchers.PARENT_VARIABLE!r}: str(os.getpid())}}\n"
        "child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,\n"
        "                         stderr=subprocess.DEVNULL)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", rank_0], capture_output=True, text=True)
    assert done.returncode == -9
    child, end = int(done.stdout), time.monotonic() + 30
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    is_left = is_running(child)
    if is_left:
        os.kill(child, signal.SIGKILL)
    assert not is_left


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_childs_own_children_are_no_ranks(monkeypatch):
    watched = []
    monkeypatch.setattr(launchers, "_end_after", watched.append)
    monkeypatch.setenv(launchers.PARENT_VARIABLE, "123")
    JobLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    assert watched == [123]
    assert launchers.PARENT_VARIABLE not in os.environ


def test_nobody_outlives_the_time_given():
    start_s = time.monotonic()
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert end_processes([slow], 0.2) == [-9]
    assert time.monotonic() - start_s < 10


def test_a_program_that_cannot_be_repeated_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="use torchrun"):
        launchers.child_command(1)


def test_outside_hydra_the_command_line_is_repeated(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "1"])
    assert launchers.child_command(1) == ([sys.executable, str(script), "--lr", "1"], None)
