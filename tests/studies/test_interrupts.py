"""SIGINT and SIGTERM end a process in good order, wherever its main thread is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from lightning_dear.paths import conf_dir
from lightning_dear.studies.interrupts import INTERRUPTS, SIGNALS

BEGIN = """
import os, signal, sys, time
from lightning_dear.studies.interrupts import INTERRUPTS

number = int(sys.argv[1])

def finish(heard):
    time.sleep(0.3)
    print("kept", heard)

with INTERRUPTS.call(finish):
"""

IN_A_DESTRUCTOR = """
    class Stubborn:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    Stubborn()
    time.sleep(100)
"""

AS_ANOTHER_FAILURE = """
    os.kill(os.getpid(), number)
    time.sleep(0.1)
    raise ValueError("the other ranks are gone")
"""

AFTER_ANOTHER_HANDLER = """
    def handler(number, frame):
        sys.exit(1)

    signal.signal(number, handler)
    os.kill(os.getpid(), number)
    time.sleep(100)
"""

TWICE = """
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    "then", [IN_A_DESTRUCTOR, AS_ANOTHER_FAILURE, AFTER_ANOTHER_HANDLER, TWICE]
)
def test_a_signal_is_never_lost(then: str, number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + then, str(int(number))],
        cwd=conf_dir().parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        # Whoever runs the tests in the background makes their processes ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout) == (128 + number, f"kept {int(number)}\n"), done.stderr
    assert done.stderr == ""


def heard_by(heard: list[int]) -> list[int]:
    """What has been heard, once there is something."""
    deadline_s = time.monotonic() + 20
    while not heard and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return heard


def test_the_innermost_is_called_and_all_is_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    outer: list[int] = []
    inner: list[int] = []
    with INTERRUPTS.call(outer.append, ends=False):
        with INTERRUPTS.call(inner.append, ends=False):
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard_by(inner) == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard_by(outer) == [signal.SIGTERM]
    assert inner == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_who_supervises_others_gets_an_exception_with_the_exit_code() -> None:
    def supervise() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    with pytest.raises(KeyboardInterrupt) as caught, INTERRUPTS.raised():
        supervise()
    assert caught.value.args == (143,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
