"""A thread that waits for others: whatever happens in it reaches whoever asks."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_dear.collectives.background import Background


def _fail() -> None:
    raise ValueError("it broke")


@pytest.mark.timeout(20)
def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for() -> None:
    background = Background("test")
    broken = background.submit(_fail)
    next_one = background.submit(lambda: 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="it broke"):
            broken.result()
    assert next_one.result() == 3
    assert broken.done()
    background.finish()


@pytest.mark.timeout(20)
def test_its_thread_starts_with_the_first_call_and_ends_with_it() -> None:
    before = set(threading.enumerate())
    background = Background("test")
    assert set(threading.enumerate()) == before
    background.submit(lambda: None).result()
    (thread,) = set(threading.enumerate()) - before
    del background
    thread.join(timeout=5)
    assert not thread.is_alive()


@pytest.mark.timeout(20)
def test_what_is_given_while_it_ends_is_run() -> None:
    background, entered, leave = Background("test"), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert leave.wait(5)

    background.submit(slow)
    assert entered.wait(5)
    ending = threading.Thread(target=background.finish)
    ending.start()
    time.sleep(0.1)  # until it waits for the thread
    late = background.submit(lambda: 7)
    leave.set()
    assert late.result(5) == 7
    ending.join(5)
    assert not ending.is_alive()
    background.finish()
