"""What users see of a failure: started by each launcher, interrupted, and saving on exceptions."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_dear import DearStrategy
from lightning_dear.strategy.checkpoint_io import AtomicCheckpointIO
from lightning_dear.strategy.failures import FailureBoard
from tests.distributed.calls import Raised, Returned
from tests.distributed.harness import observe_ranks, run_ranks
from tests.lightning.fault_script import START_TIMEOUT
from tests.lightning.faults import MESSAGE, OPTIONS, Fault, fit, new_strategy, train
from tests.lightning.fitting import new_trainer
from tests.lightning.nets import Net, data
from tests.lightning.test_registration import _session as processes_of_session

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("fault_script.py"))
FIRST = "Rank {} failed first: ZeroDivisionError: " + MESSAGE
LATE_S = 120.0
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, "popen"]
LAUNCHERS = {
    "popen": [SCRIPT, "popen"],
    "spawn": [SCRIPT, "spawn"],
    "fork": [SCRIPT, "fork"],
    "torchrun": TORCHRUN,
}
slow = pytest.mark.slow


class Job:
    """A script in a session of its own, both ranks of which are watched."""

    def __init__(self, launcher: str, folder: Path, fault: Fault, **env: str) -> None:
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *LAUNCHERS[launcher],
                    str(folder),
                    *map(str, (fault.kind, fault.phase, fault.rank, fault.step)),
                ],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background jobs ignore Ctrl-C, and so would what they start.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    def wait_until_it_strikes(self) -> None:
        end = time.monotonic() + LATE_S
        while "striking" not in self.output.read_text() and time.monotonic() < end:
            time.sleep(0.1)

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed, once no process of it is left."""
        try:
            code = self.process.wait(LATE_S)
            end = time.monotonic() + LATE_S / 4
            while (left := processes_of_session(self.process.pid)) and time.monotonic() < end:
                time.sleep(0.1)
            assert left == [], self.output.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return code, self.output.read_text()


@pytest.mark.parametrize(
    ("launcher", "kind", "rank"),
    [
        ("popen", "raise", 1),
        pytest.param("popen", "raise", 0, marks=slow),
        pytest.param("popen", "kill", 1, marks=slow),
        pytest.param("popen", "kill", 0, marks=slow),
        pytest.param("popen", "hang", 1, marks=slow),
        pytest.param("popen", "hang", 0, marks=slow),
        pytest.param("popen", "collective", 0, marks=slow),
        pytest.param("spawn", "raise", 1, marks=slow),
        pytest.param("spawn", "raise", 0, marks=slow),
        pytest.param("spawn", "kill", 1, marks=slow),
        pytest.param("spawn", "hang", 0, marks=slow),
        pytest.param("fork", "raise", 1, marks=slow),
        pytest.param("fork", "kill", 0, marks=slow),
        pytest.param("torchrun", "raise", 1, marks=slow),
        pytest.param("torchrun", "kill", 0, marks=slow),
        pytest.param("torchrun", "hang", 1, marks=slow),
    ],
)
def test_every_launcher_ends_all_ranks(launcher: str, kind: str, rank: int, tmp_path: Path) -> None:
    code, output = Job(launcher, tmp_path, Fault(kind, "forward", rank, 3)).end()
    assert code != 0, output
    if kind == "raise":
        assert MESSAGE in output
    if kind == "raise" and launcher == "popen":
        assert output.rstrip().splitlines()[-1] == FIRST.format(rank), output
    if kind == "raise" and launcher in ("spawn", "fork"):
        assert output.rstrip().splitlines()[-1] == f"ZeroDivisionError: {MESSAGE}", output
    if kind == "kill" and launcher in ("spawn", "fork"):
        assert f"process {rank} terminated with signal SIGKILL" in output, output
    assert torch.load(tmp_path / "kept.ckpt", weights_only=True)["global_step"] == 2


def test_a_failing_rank_0_lets_ranks_that_wait_for_it_know(tmp_path: Path) -> None:
    fault = Fault("raise", "forward", 0, 3)
    code, output = Job("popen", tmp_path, fault, FAULT_LONG_TIMEOUT="1").end()
    assert code != 0, output
    # Said when rank 1's callbacks see the exception.
    assert f"Rank 1 ends because another rank failed. {FIRST.format(0)}" in output, output
    assert output.rstrip().splitlines()[-1] == FIRST.format(0), output


@pytest.mark.parametrize(
    ("launcher", "kind", "signum"),
    [
        pytest.param("popen", "hang", signal.SIGINT, marks=slow),
        pytest.param("popen", "hang", signal.SIGTERM, marks=slow),
        pytest.param("popen", "pause", signal.SIGINT, marks=slow),
        pytest.param("spawn", "pause", signal.SIGINT, marks=slow),
        pytest.param("torchrun", "pause", signal.SIGINT, marks=slow),
        pytest.param("torchrun", "pause", signal.SIGTERM, marks=slow),
    ],
)
def test_interrupts_leave_no_process(
    launcher: str, kind: str, signum: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C goes to all, SIGTERM to the one that was started; rank 1 may ignore both.

    Collectives would wait much longer than the test does.
    """
    fault = Fault(kind, "forward", 1, 3)
    job = Job(launcher, tmp_path, fault, FAULT_LONG_TIMEOUT="1")
    job.wait_until_it_strikes()
    start_s = time.monotonic()
    if signum == signal.SIGINT:
        os.killpg(job.process.pid, signum)
    else:
        job.process.send_signal(signum)
    code, output = job.end()
    assert code != 0, output
    assert time.monotonic() - start_s < START_TIMEOUT.total_seconds() - 15, output


@slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The first one waits for a step, which does not end since rank 1 sleeps in it."""
    job = Job("popen", tmp_path, Fault("pause", "forward", 1, 3), FAULT_LONG_TIMEOUT="1")
    job.wait_until_it_strikes()
    for _ in range(2):
        time.sleep(1)
        os.killpg(job.process.pid, signal.SIGINT)
    start_s = time.monotonic()
    code, output = job.end()
    assert code != 0, output
    assert time.monotonic() - start_s < 8, output


@slow
@pytest.mark.parametrize("launcher", ["popen", "torchrun", "spawn"])
def test_a_rank_alone_is_asked_to_stop(launcher: str, tmp_path: Path) -> None:
    """As by the end of a spot instance; the others run on as if nothing was."""
    job = Job(launcher, tmp_path, Fault("asked", "forward", 1, 3))
    code, output = job.end()
    assert code == 0, output
    assert "Rank 1 was asked to stop (SIGTERM): all ranks end" in output
    assert "failed first" not in output


class _Stop(Callback):
    """Raises behind the third step, on all ranks or on one."""

    def __init__(self, error: BaseException, rank: int | None) -> None:
        self.error = error
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and self.rank in (None, trainer.global_rank):
            raise self.error


def _stop(folder: Path, error: BaseException, rank: int | None, grace_s: float) -> None:
    FailureBoard.agree.__defaults__ = ("", grace_s)  # type: ignore[assignment]
    train(folder, None, False, _Stop(error, rank), OnExceptionCheckpoint(folder))


def test_ctrl_c_on_all_ranks_still_saves(tmp_path: Path) -> None:
    outcomes = observe_ranks(
        _stop, 2, tmp_path, KeyboardInterrupt(), None, 30.0, init_process_group=False
    )
    for outcome in outcomes:
        assert isinstance(outcome, Raised)
        assert outcome.message == "SystemExit(1)"
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert len(saved["optimizer_states"][0]["state"]) == len(list(Net("gpt").parameters()))


class _Alone(Callback):
    """In the third step rank 0 calls a method that exchanges, and other ranks do not."""

    def __init__(self, method: str) -> None:
        self.method = method

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 0:
            result = getattr(trainer.strategy, self.method)()
            with result if self.method == "whole_gradients" else nullcontext():
                pass


def _call_alone(method: str) -> None:
    # Otherwise all ranks would gather gradients for the hook.
    strategy = new_strategy(gradients_in_hooks=False)
    fit(new_trainer(strategy, _Alone(method), **OPTIONS), None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("method", ["grad_norm", "whole_gradients"])
def test_a_method_that_one_rank_alone_calls_is_found(method: str) -> None:
    outcomes = observe_ranks(_call_alone, 2, method, init_process_group=False)
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        said = outcome.traceback.partition("Ranks may have launched different messages: ")[2]
        assert said.startswith("rank 0 "), outcome.traceback
        assert ", and rank 1 all-gather of bucket 0, float32," in said
        assert "equally often" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_saves_nothing_and_waits_for_nobody(rank: int, tmp_path: Path) -> None:
    outcomes = observe_ranks(
        _stop, 2, tmp_path, ValueError("bad batch"), rank, 1.0, init_process_group=False
    )
    own = outcomes[rank]
    assert isinstance(own, Raised)
    assert f"only ranks [{rank}] of 2 came within 1 s" in own.message
    assert "Resume from the last checkpoint" in own.message
    assert "ValueError: bad batch" in own.message
    other = outcomes[1 - rank]
    assert isinstance(other, Raised), other
    assert "Cannot collect" in other.message or "cannot be saved" in other.message
    assert not (tmp_path / "on_exception.ckpt").exists()


def _second_failure(folder: Path) -> str:
    from lightning_dear.strategy.failure_watch import first_failure

    for error in (ValueError("first attempt"), None):
        callbacks = [] if error is None else [_Stop(error, None)]
        fault = None if error else Fault("raise", "forward", 1, 2)
        with suppress(ValueError, ZeroDivisionError, RuntimeError):
            train(folder, fault, False, *callbacks)
    return str(first_failure())


def test_a_second_fit_sees_nothing_of_the_first(tmp_path: Path) -> None:
    outcomes = observe_ranks(_second_failure, 2, tmp_path, init_process_group=False)
    for outcome in outcomes:
        assert isinstance(outcome, Returned), outcome
        assert pickle.loads(outcome.value) == FIRST.format(1)


COLLECTIVE_TIMEOUT = timedelta(seconds=6)
LINGER_S = 30


def _linger() -> None:
    """Fails, and keeps its sockets open: the others learn of it by the timeout alone."""
    torch.manual_seed(0)
    stop = _Stop(ZeroDivisionError(MESSAGE), 1)
    try:
        new_trainer(DearStrategy(timeout=COLLECTIVE_TIMEOUT), stop).fit(Net("gpt"), data("gpt", 48))
    except ZeroDivisionError:
        with suppress(BaseException):
            time.sleep(LINGER_S)
        raise


@pytest.mark.slow
def test_a_rank_that_fails_but_does_not_go_away() -> None:
    outcomes = observe_ranks(_linger, 3, timeout_s=50, init_process_group=False)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
    for rank in (0, 2):
        assert outcomes[1].time_s - outcomes[rank].time_s > LINGER_S / 4


def _read_after_failure() -> bool:
    """A user who catches the exception may still look at the module."""
    net, stop = Net("gpt"), _Stop(ZeroDivisionError(MESSAGE), 1)
    with suppress(Exception):
        new_trainer(DearStrategy(timeout=COLLECTIVE_TIMEOUT), stop).fit(net, data("gpt", 48))
    return all(bool(parameter.isfinite().all()) for parameter in net.parameters())


def test_the_module_is_readable_after_a_failure() -> None:
    assert run_ranks(_read_after_failure, 3, init_process_group=False) == [True] * 3


def _write_and_die(path: Path) -> None:
    save = torch.save

    def save_half(value: Any, file: Any) -> None:
        save(value, file)
        file.flush()
        os.truncate(file.name, os.path.getsize(file.name) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half
    AtomicCheckpointIO().save_checkpoint({"step": 2, "weights": torch.ones(1000)}, path)


def test_a_writer_that_is_killed_leaves_the_file_before_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1, "weights": torch.ones(1000)}, path)
    observe_ranks(_write_and_die, 1, path, init_process_group=False)
    assert torch.load(path, weights_only=True)["step"] == 1
    # The next one takes over what was left.
    AtomicCheckpointIO().save_checkpoint({"step": 3}, path)
    assert torch.load(path, weights_only=True)["step"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_failed_save_leaves_nothing_beside(tmp_path: Path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        AtomicCheckpointIO().save_checkpoint({"step": lambda: None}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt", storage_options={"a": 1})


def _smaller(net: Net) -> None:
    net.net.layers[2] = torch.nn.Linear(2, 2)


def _shorter(net: Net) -> None:
    net.net.layers = net.net.layers[:2]


def _double(net: Net) -> None:
    net.net.layers[2].double()


def _one_more_buffer(net: Net) -> None:
    net.register_buffer("scale", torch.zeros(3))


def _fit_different_models(change: Any) -> None:
    net = Net()
    if os.environ["RANK"] == "1":
        change(net)
    new_trainer(DearStrategy(timeout=COLLECTIVE_TIMEOUT)).fit(net, data())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_smaller, "rank 1 has 'net.layers.2.weight' (shape (2, 2), torch.float32)"),
        (_shorter, "rank 1 has no more tensors"),
        (_double, "rank 1 has 'net.layers.2.weight' (shape (61, 131), torch.float64)"),
        (_one_more_buffer, "rank 0 has no more tensors, rank 1 has 'scale' (shape (3,),"),
    ],
)
def test_another_model_on_a_rank_is_named_on_all(change: Any, words: str) -> None:
    outcomes = observe_ranks(_fit_different_models, 2, change, init_process_group=False)
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        assert "Ranks hold different models: rank 0 has" in outcome.message
        assert words in outcome.message
