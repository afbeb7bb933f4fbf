"""The harness itself: what comes back, and how a rank that fails, hangs or dies is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import Died, Hung, Raised, Returned, Stopped
from tests.distributed.harness import RanksFailed, distributed, observe_ranks, run_ranks


def _scaled_rank(factor: int, offset: int = 0) -> torch.Tensor:
    tensor = torch.tensor([dist.get_rank() * factor + offset])
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    assert [int(other) for other in gathered] == [
        rank * factor + offset for rank in range(dist.get_world_size())
    ]
    return tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_ranks(_scaled_rank, world_size, 10, offset=1)
    assert [int(result) for result in results] == [rank * 10 + 1 for rank in range(world_size)]


def _raise_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise KeyError("the very rank")
    dist.barrier()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failing_rank_is_reported_with_its_traceback(failing: int) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_raise_on, 3, failing)
    assert time.monotonic() - start < 10
    assert caught.value.rank == failing
    message = str(caught.value)
    assert message.startswith(f"_raise_on: rank {failing} of 3 raised KeyError('the very rank')")
    assert 'raise KeyError("the very rank")' in message
    assert "test_harness.py" in message
    others = [o for rank, o in enumerate(caught.value.outcomes) if rank != failing]
    assert all(isinstance(outcome, Stopped) for outcome in others)


def _raise_behind_clean_up() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()
    finally:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            time.sleep(0.2)


def test_cause_is_reported_and_not_the_lost_connection_that_was_seen_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_raise_behind_clean_up, 2)
    assert caught.value.rank == 1
    outcomes = caught.value.outcomes
    assert isinstance(outcomes[0], Raised)
    assert isinstance(outcomes[1], Raised)
    assert outcomes[0].time_s < outcomes[1].time_s


def _compare() -> None:
    values = [dist.get_rank(), 7]
    assert values == [0, 7]


def test_assertions_in_ranks_show_their_values() -> None:
    with pytest.raises(RanksFailed, match=r"assert \[1, 7\] == \[0, 7\]"):
        run_ranks(_compare, 2)


def _wait_for_ever() -> None:
    threading.Event().wait()


def _hang_on(hanging: tuple[int, ...]) -> None:
    if dist.get_rank() in hanging:
        _wait_for_ever()


@pytest.mark.parametrize("hanging", [(0,), (1, 2)])
def test_hanging_ranks_are_killed_and_reported_with_their_stacks(hanging: tuple[int, ...]) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_hang_on, 3, hanging, timeout_s=1)
    assert time.monotonic() - start < 8
    for rank, outcome in enumerate(caught.value.outcomes):
        assert isinstance(outcome, Hung if rank in hanging else Returned)
    message = str(caught.value)
    for rank in range(3):
        assert (f"rank {rank} of 3 hung: killed after 1 s" in message) == (rank in hanging)
    assert message.count("in _wait_for_ever") == len(hanging)


def _hang_in_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def test_rank_that_hangs_inside_a_collective_shows_its_stack() -> None:
    with pytest.raises(
        RanksFailed, match=r"in all_reduce\n(.*\n)+.*in _hang_in_collective"
    ) as caught:
        run_ranks(_hang_in_collective, 2, timeout_s=1)
    assert caught.value.rank == 0


def _hang_without_answer() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_stopped_rank_is_killed_though_it_shows_no_stack() -> None:
    with pytest.raises(RanksFailed, match="did not answer the request for its stack"):
        run_ranks(_hang_without_answer, 1, timeout_s=1)


def _die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.Signals[how])
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "rank 1 of 2 exited with code 7 before it returned"),
        ("SIGKILL", "rank 1 of 2 was killed by SIGKILL"),
        ("SIGSEGV", r"rank 1 of 2 was killed by SIGSEGV(.*\n)+.*in _die"),
    ],
)
def test_dying_rank_is_reported_with_its_exit(how: str, words: str) -> None:
    with pytest.raises(RanksFailed, match=words) as caught:
        run_ranks(_die, 2, how)
    assert caught.value.rank == 1


def _exit_early() -> None:
    sys.exit(0)


def test_sys_exit_in_a_rank_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"raised SystemExit\(0\)"):
        run_ranks(_exit_early, 1)


def test_observed_ranks_run_on_after_a_failure() -> None:
    outcomes = observe_ranks(_die, 2, "SIGKILL", timeout_s=20)
    assert isinstance(outcomes[0], Raised)
    assert isinstance(outcomes[1], Died)
    assert outcomes[1].exit_code == -signal.SIGKILL


def _print() -> None:
    print("by Python")
    os.write(2, b"by the descriptor\n")


def test_what_ranks_print_is_the_tests_own_output(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_print, 1)
    assert capfd.readouterr() == ("by Python\n", "by the descriptor\n")


def _unpicklable() -> object:
    return threading.Lock()


def test_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="cannot pickle '_thread.lock'"):
        run_ranks(_unpicklable, 1)


def _settings() -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "directory": os.getcwd(),
        "given": os.environ["GIVEN"],
        "patched": os.environ["PATCHED"],
        "rank": os.environ["RANK"],
        "world_size": os.environ["WORLD_SIZE"],
        "initialised": dist.is_initialized(),
        "siblings": len(os.listdir(f"/proc/{os.getppid()}/task")),
    }


def test_ranks_get_the_callers_surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setenv("PATCHED", "yes")
    monkeypatch.chdir(tmp_path)
    for rank, settings in enumerate(run_ranks(_settings, 2, env={"GIVEN": "1"})):
        assert settings == {
            "threads": 1,
            "directory": str(tmp_path),
            "given": "1",
            "patched": "yes",
            "rank": str(rank),
            "world_size": "2",
            "initialised": True,
            "siblings": 1,
        }


def _initialise_from_environment() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank()


def test_ranks_may_initialise_the_process_group_themselves() -> None:
    assert run_ranks(_initialise_from_environment, 2, init_process_group=False) == [0, 1]


def _start_sleeper() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_processes_started_by_ranks_end_with_the_call() -> None:
    for pid in run_ranks(_start_sleeper, 2):
        end = time.monotonic() + 5
        while _is_running(pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_call_that_is_interrupted_ends_its_ranks() -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(_wait_for_ever, 2)
    timer.join()
    assert time.monotonic() - start < 10
    assert len(run_ranks(_scaled_rank, 2, 1)) == 2


def test_local_function_and_wrong_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="top of an importable module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ValueError, match="one host per rank: 0 for 2 ranks"):
        run_ranks(_scaled_rank, 2, 1, hosts=[])
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(_scaled_rank, 0, 1)


@distributed(world_sizes=(1, 3))
@pytest.mark.parametrize("value", [2, 5])
def test_decorated_body_runs_on_every_rank(value: int, world_size: int) -> None:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    assert dist.get_world_size() == world_size
    assert int(tensor) == value * world_size


@distributed(world_sizes=(2,))
def _decorated_that_fails() -> None:
    assert dist.get_rank() == 0


def test_decorated_body_that_fails_fails_the_test() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 raised AssertionError"):
        _decorated_that_fails(world_size=2)


_numbers: list[int] = []


def _leave(how: str) -> tuple[int, int, float, bool]:
    """A process number, what earlier calls left in a module, a random number, and an old variable.

    What it leaves itself is in the module, in the environment and, if asked, in torch.
    """
    _numbers.append(1)
    seen = os.getpid(), len(_numbers), torch.rand(()).item(), "LEFT" in os.environ
    os.environ["LEFT"] = "1"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert int(tensor) == dist.get_world_size()
    if how == "dtype":
        torch.set_default_dtype(torch.float64)
    if how == "raise" and dist.get_rank() == 1:
        raise KeyError("the very rank")
    if how == "hang" and dist.get_rank() == 1:
        _wait_for_ever()
    if how == "die" and dist.get_rank() == 1:
        os._exit(7)
    return seen


def test_ranks_that_are_kept_serve_the_next_call_of_their_number() -> None:
    first, second, other, third = (
        run_ranks(_leave, world_size, "", keeps_ranks=True) for world_size in (2, 2, 3, 2)
    )
    assert [rank[:2] for rank in second] == [(pid, 2) for pid, *_ in first]
    assert [rank[:2] for rank in third] == [(pid, 3) for pid, *_ in first]
    assert len({pid for pid, *_ in first + other}) == 5
    for left, right in zip(first, third, strict=True):
        assert left[2:] == right[2:]
    assert run_ranks(_leave, 2, "")[0][1] == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"rank 1 of 2 raised KeyError"),
        ("hang", "(?s)rank 1 of 2 hung: killed after 1 s.*in _wait_for_ever"),
        ("die", "rank 1 of 2 exited with code 7"),
        ("dtype", ""),
    ],
)
def test_ranks_that_failed_or_were_changed_are_replaced(how: str, words: str) -> None:
    before = run_ranks(_leave, 2, "", keeps_ranks=True)
    if words:
        with pytest.raises(RanksFailed, match=words):
            run_ranks(_leave, 2, how, keeps_ranks=True, timeout_s=1)
    else:
        run_ranks(_leave, 2, how, keeps_ranks=True)
    after = run_ranks(_leave, 2, "", keeps_ranks=True)
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after)
    assert [rank[1] for rank in after] == [1, 1]
    assert not _is_running(before[0][0])
    assert not _is_running(before[1][0])
