"""A log of launches gives equal numbers on ranks that launch alike, and names the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from lightning_dear.collectives.launch_log import (
    NORM_TAG,
    TAGS_OF_ONE_OPTIMIZER,
    LastLaunches,
    LaunchLog,
    Logged,
    difference,
    divergence,
)
from lightning_dear.collectives.work import STATE_TAGS
from lightning_dear.collectives.world import World
from lightning_dear.engine.notes import Digest

REDUCES, GATHERS = 0, 1
FLAGS_TAG = 1 << 29


def launch(tag: int, group: int = REDUCES, *, elements: int = 8, has_tag: bool = True) -> Logged:
    call = "all_gather" if group else "reduce_scatter"
    return Logged(call, group, torch.float32, elements, tag, has_tag)


def log_of(launches: Sequence[Logged], *, matches_by_tag: bool = True) -> LaunchLog:
    log = LaunchLog(matches_by_tag=matches_by_tag)
    for one in launches:
        log.add(one)
    return log


def by_order(*tags: int) -> LaunchLog:
    return log_of([launch(tag, has_tag=False) for tag in tags], matches_by_tag=False)


tags, groups = st.integers(0, 9), st.sampled_from([REDUCES, GATHERS])
of_buckets = st.lists(st.builds(launch, tags, groups), max_size=20)


@given(of_buckets, st.randoms())
def test_by_tag_no_order_counts(launches: list[Logged], random: Any) -> None:
    other = [*launches]
    random.shuffle(other)
    assert log_of(launches).total(0) == log_of(other).total(0)


@given(of_buckets, tags, groups)
def test_one_launch_more_is_another_number(launches: list[Logged], tag: int, group: int) -> None:
    more = log_of([*launches, launch(tag, group)])
    assert log_of(launches).total(0) != more.total(0)


@given(st.lists(tags, max_size=20), st.lists(tags, max_size=20))
def test_by_order_the_same_launches_in_another_order_differ(
    own: list[int], others: list[int]
) -> None:
    assert (by_order(*own).total(0) == by_order(*others).total(0)) == (own == others)


@pytest.mark.parametrize("other", [launch(3, elements=9), launch(3)._replace(dtype=torch.int8)])
def test_another_length_or_type_is_another_number(other: Logged) -> None:
    assert log_of([launch(3)]).total(0) != log_of([other]).total(0)


def test_a_message_without_a_tag_is_in_order_even_where_others_match_by_tag() -> None:
    first, second = launch(3, has_tag=False), launch(4, has_tag=False)
    assert log_of([first, second]).total(0) != log_of([second, first]).total(0)


def test_a_gather_of_state_may_come_before_a_reduction_or_after_it() -> None:
    """A checkpoint between backward and step: a rank that used less reduces the bucket later."""
    state = launch(STATE_TAGS, GATHERS)
    assert log_of([launch(0), state]).total(0) == log_of([state, launch(0)]).total(0)
    assert log_of([launch(0), state]).total(0) != log_of([launch(0)]).total(0)


def test_launches_of_another_optimizer_do_not_count() -> None:
    other = launch(TAGS_OF_ONE_OPTIMIZER)
    assert log_of([launch(0), other]).total(0) == log_of([launch(0)]).total(0)
    assert log_of([launch(0), other]).total(1) == log_of([other]).total(1)


def test_the_last_launches_tell_whose_order_they_keep() -> None:
    of_buckets = [launch(0), launch(0), launch(TAGS_OF_ONE_OPTIMIZER), launch(3, has_tag=False)]
    last = log_of([*of_buckets, launch(FLAGS_TAG)]).last()
    assert [rest for _, *rest in last] == [[1, 0], [2, 0], [1, 1], [1, -1], [1, 0]]
    assert last[0][0] == last[1][0] == str(launch(0))


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (3, "bucket 3"),
        (TAGS_OF_ONE_OPTIMIZER, "bucket 0 of optimizer 1"),
        (2 * TAGS_OF_ONE_OPTIMIZER + 5, "bucket 5 of optimizer 2"),
        (NORM_TAG, "the gradient norm"),
        (STATE_TAGS, f"tag {STATE_TAGS}"),
        (FLAGS_TAG, f"tag {FLAGS_TAG}"),
    ],
)
def test_a_launch_is_named_as_users_know_it(tag: int, name: str) -> None:
    said = str(Logged("all_gather", 1, torch.float64, 2, tag, has_tag=True))
    assert said == f"all-gather of {name}, float64, 2 elements, group 1"


def told(logs: Sequence[LaunchLog], *, matches_by_tag: bool) -> str | None:
    return difference([log.report(0) for log in logs], matches_by_tag=matches_by_tag)


def test_the_first_launch_in_another_order_is_named() -> None:
    assert told([by_order(0, 1, 2), by_order(0, 2, 1)], matches_by_tag=False) == (
        "launch 2 is reduce-scatter of bucket 1, float32, 8 elements, group 0 on rank 0;"
        " reduce-scatter of bucket 2, float32, 8 elements, group 0 on rank 1"
    )
    said = told([by_order(0, 1), by_order(0)], matches_by_tag=False)
    assert said is not None
    assert said.endswith("; nothing on rank 1")


def test_a_launch_of_one_rank_alone_is_named() -> None:
    logs = [log_of([launch(0), launch(5)]), log_of([launch(0)])]
    assert told(logs, matches_by_tag=True) == (
        "reduce-scatter of bucket 5, float32, 8 elements, group 0 was launched"
        " 1 times on rank 0, 0 times on rank 1"
    )


def test_no_difference_is_told_if_there_is_none_or_it_is_too_old() -> None:
    assert told([by_order(0, 1)] * 2, matches_by_tag=False) is None
    assert told([log_of([launch(0)])] * 2, matches_by_tag=True) is None
    late = [by_order(first, *range(100)) for first in (7, 8)]
    assert late[0].total(0) != late[1].total(0)
    assert told(late, matches_by_tag=False) is None


SUM, NORM, WEIGHTS = ("sum", 3, 0), ("norm", 1, 0), ("weights", 1, 0)


def test_two_ranks_that_wait_for_each_other_are_named() -> None:
    last = {0: [SUM, NORM], 1: [SUM, WEIGHTS], 2: [SUM]}
    said = divergence(last)
    assert said is not None
    assert said.startswith("Ranks may have launched different messages: rank 0 norm, and rank 1 we")
    of_all = divergence({0: [SUM, ("norm", 1, -1)], 1: [SUM, ("other", 1, 1)]})
    assert of_all is not None


@pytest.mark.parametrize(
    "last",
    [
        {},
        {0: [SUM], 1: [SUM]},
        # A rank is behind.
        {0: [SUM, NORM], 1: [SUM]},
        # A rank's list begins later: it may have launched the other rank's second norm before.
        {0: [SUM, ("norm", 2, 0)], 1: [SUM, WEIGHTS]},
        # Two optimizers.
        {0: [SUM, NORM], 1: [SUM, ("other", 1, 1)]},
    ],
)
def test_ranks_that_may_launch_alike_are_not_named(last: dict[int, LastLaunches]) -> None:
    assert divergence(last) is None


class Differ(Exception):  # noqa: N818
    """Raised where a digest finds a difference."""


@dataclass
class Number(Digest):
    """A digest of a given number."""

    number: int

    def __post_init__(self) -> None:
        collectives: Any = SimpleNamespace(world=World(0, 2))
        super().__init__(collectives)

    @override
    def value(self) -> int:
        return self.number

    @override
    def explain(self, counted: Any) -> None:
        raise Differ


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=4), st.booleans())
def test_a_digest_explains_if_and_only_if_numbers_differ(numbers: list[int], is_one: bool) -> None:
    numbers = numbers[:1] * 3 if is_one else numbers
    maxima = [*map(max, *(Number(number).say() for number in [*numbers, numbers[0]]))]
    assert len(maxima) == Digest.NUM_BYTES
    if len({*numbers}) == 1:
        Number(numbers[0]).hear(maxima)
    else:
        with pytest.raises(Differ):
            Number(numbers[0]).hear(maxima)
