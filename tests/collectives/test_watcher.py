"""A thread that waits for others: whatever happens in it reaches whoever asks."""

from __future__ import annotations

import pytest

from lightning_dear.collectives.background import Watcher


def _fail() -> None:
    raise ValueError("it broke")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["arrive", "record"])
def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for(part: str) -> None:
    watcher = Watcher("test")
    broken = watcher.watch(**{"arrive": lambda: None, part: _fail})
    next_one = watcher.watch(lambda: None)
    with pytest.raises(ValueError, match="it broke"):
        broken.wait()
    next_one.wait()
    assert broken.has_ended
    assert next_one.has_ended
    watcher.finish()
