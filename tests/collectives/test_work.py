"""A work: what is to be done once its data is here, in which order, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lightning_dear.collectives.background import Background
from lightning_dear.collectives.work import Work


def _noting(seen: list[str], word: str) -> Callable[[], None]:
    return partial(seen.append, word)


def test_the_data_arrives_then_local_work_is_done_in_order_and_once() -> None:
    seen: list[str] = []
    work = Work(_noting(seen, "arrived"), _noting(seen, "own")).then(_noting(seen, "more"))
    assert work.then() is work
    assert not work.is_done
    assert seen == []
    work.wait()
    work.wait()
    assert seen == ["arrived", "own", "more"]
    assert work.is_done


def test_work_that_is_added_behind_the_end_is_done_by_another_wait() -> None:
    seen: list[str] = []
    work = Work(_noting(seen, "arrived"))
    work.wait()
    work.then(_noting(seen, "more"))
    assert not work.is_done
    work.wait()
    assert seen == ["arrived", "more"]


def test_a_call_around_the_arrival_comes_before_local_work() -> None:
    seen: list[str] = []

    def around(arrive: Callable[[], None]) -> None:
        seen.append("before")
        arrive()
        seen.append("behind")

    Work(_noting(seen, "arrived"), _noting(seen, "own")).inside(around).wait()
    assert seen == ["before", "arrived", "behind", "own"]


@pytest.mark.parametrize("where", ["arrival", "finish"])
def test_a_wait_that_has_failed_fails_again(where: str) -> None:
    seen: list[str] = []

    def fail() -> None:
        seen.append("failed")
        raise ValueError("the reason")

    def note() -> None:
        seen.append("noted")

    work = Work(fail) if where == "arrival" else Work(note, fail).then(note)
    for _ in range(2):
        with pytest.raises(ValueError, match="the reason"):
            work.wait()
        assert not work.is_done
    if where == "finish":
        # What was half done is not done once more.
        assert seen == ["noted", "failed"]


def test_another_thread_tells_that_the_data_is_on_the_host() -> None:
    seen: list[str] = []
    background = Background("test")
    work = Work(_noting(seen, "arrived"), _noting(seen, "own"))
    assert not work.is_on_host
    work.await_in(background.submit)
    background.finish()
    assert work.is_on_host
    assert seen == ["arrived"]
    assert not work.is_done
    work.wait()
    assert seen == ["arrived", "own"]
    assert Work.done().is_on_host
