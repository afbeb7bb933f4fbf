"""A signal that the main thread does not hear is heard all the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_dear.strategy.launchers import call_if_unheard


@pytest.fixture
def deaf() -> Iterator[None]:
    """Handlers that do nothing stand for a main thread that never gets to run them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_without_effect(number: signal.Signals) -> None:
    acted = threading.Event()
    with call_if_unheard(threading.Event(), 0.1, acted.set):
        os.kill(os.getpid(), number)
        assert acted.wait(10.0)


@pytest.mark.usefixtures("deaf")
def test_a_signal_that_is_heard_and_another_signal() -> None:
    acted, heard = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with call_if_unheard(heard, 0.2, acted.set):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not acted.wait(0.4)
        os.kill(os.getpid(), signal.SIGINT)
        heard.set()
        assert not acted.wait(0.4)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.usefixtures("deaf")
def test_later_signals_are_read_and_change_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    num_calls = []
    with call_if_unheard(threading.Event(), 0.1, lambda: num_calls.append(1)):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
    assert num_calls == [1]
    # As a broken pipe would be there.
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_comes_through() -> None:
    acted = threading.Event()

    def interrupt() -> None:
        with call_if_unheard(threading.Event(), 0.2, acted.set):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    signal.signal(signal.SIGINT, before)
    assert not acted.wait(0.4)


def test_it_leaves_nothing_behind() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    with call_if_unheard(threading.Event(), 0.1, lambda: None):
        pass
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > num_files and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert signal.set_wakeup_fd(-1) == -1


def test_somebody_elses_wakeup_stays() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    try:
        with call_if_unheard(threading.Event(), 0.1, lambda: None):
            assert signal.set_wakeup_fd(write_end) == write_end
    finally:
        assert signal.set_wakeup_fd(-1) == write_end
        os.close(read_end)
        os.close(write_end)


def test_outside_the_main_thread_it_does_nothing() -> None:
    entered = []

    def enter() -> None:
        with call_if_unheard(threading.Event(), 0.1, lambda: None):
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered
