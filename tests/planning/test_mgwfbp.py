"""MG-WFBP's merge rule: a worked example, and never worse than no merging."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import LinkCost, MGWFBPFusion
from lightning_dear.planning.predicting import merged
from lightning_dear.studies.competitors import AllReduceMGWFBP
from tests.planning.models import WORLD_SIZE, chain, chains, links


def _end_s(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[float],
    ready_s: Sequence[float],
    alpha_s: float,
    beta_s: float,
) -> float:
    end_s = 0.0
    for group in groups:
        begin_s = max(end_s, ready_s[group[-1]])
        end_s = begin_s + alpha_s + beta_s * sum(sizes[place] for place in group)
    return end_s


def test_a_worked_example() -> None:
    # t = 2 + size. Backward order:
    # 0: ready 1, begins 1, would end at 1 + 2 + 4 = 7.
    # 1: ready 4. Before 7; 0 has begun (1 < 4), and waiting costs 3 >= alpha: alone, 7 to 10.
    # 2: ready 6. Before 10; 1 has not begun (7 > 6): joins 1, 7 to 7+2+2 = 11.
    # 3: ready 8. Before 11; has begun at 7, but waiting costs 1 < alpha: joins, 8 to 8+2+3 = 13.
    # 4: ready 13. Not before 13: alone, 13 to 16.
    # 5: ready 20. The link is free: alone.
    sizes, ready_s = [4, 1, 1, 1, 1, 1], [1, 4, 6, 8, 13, 20]
    assert merged(sizes, ready_s, alpha_s=2, beta_s=1) == [[0], [1, 2, 3], [4], [5]]


def _by_the_published_rule(
    sizes: Sequence[float], ready_s: Sequence[float], alpha_s: float, beta_s: float
) -> list[list[int]]:
    groups, free_s = [[0]], 0.0
    for place, at_s in enumerate(ready_s[1:], start=1):
        begin_s = max(free_s, ready_s[place - 1])
        end_s = begin_s + alpha_s + beta_s * sum(sizes[one] for one in groups[-1])
        if at_s < end_s and (begin_s > at_s or at_s - begin_s < alpha_s):
            groups[-1].append(place)
        else:
            groups.append([place])
            free_s = end_s
    return groups


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_one_condition_stands_for_all_of_the_published_rule(
    layers: list[tuple[int, int]], alpha_s: int, beta_s: int
) -> None:
    sizes, gaps = zip(*layers, strict=True)
    figures = sizes, [*accumulate(gaps)], alpha_s, beta_s
    assert merged(*figures) == _by_the_published_rule(*figures)


def test_edges_of_the_conditions() -> None:
    # Ready when the first one ends: nothing to gain.
    assert merged([1, 1], [0, 2], alpha_s=1, beta_s=1) == [[0], [1]]
    # Waiting would cost exactly a start.
    assert merged([5, 1], [0, 1], alpha_s=1, beta_s=1) == [[0], [1]]
    assert merged([5, 1], [0, 0.9], alpha_s=1, beta_s=1) == [[0, 1]]
    # Without a start nothing is ever merged that has begun.
    assert merged([5, 5, 5], [0, 1, 2], alpha_s=0, beta_s=1) == [[0], [1, 2]]
    assert merged([], [], alpha_s=1, beta_s=1) == []


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_the_last_exchange_never_ends_later_than_without_merging(
    layers: list[tuple[int, int]], alpha_s: int, beta_s: int
) -> None:
    sizes = [size for size, _ in layers]
    ready_s = [sum(gap for _, gap in layers[: place + 1]) for place in range(len(layers))]
    groups = merged(sizes, ready_s, alpha_s, beta_s)
    assert [place for group in groups for place in group] == list(range(len(layers)))
    alone = [[place] for place in range(len(layers))]
    figures = sizes, ready_s, alpha_s, beta_s
    assert _end_s(groups, *figures) <= _end_s(alone, *figures)


@settings(max_examples=40)
@given(chains(), links)
def test_the_plan_has_the_rules_groups(model: tuple, link: LinkCost) -> None:
    tensors, times = model
    plan = MGWFBPFusion().search(tensors, WORLD_SIZE, times, link).best
    order = sorted(tensors, key=lambda one: (times.ready_s[one.index], one.ready))
    groups = merged(
        [one.numel * one.itemsize for one in order],
        [times.ready_s[one.index] for one in order],
        link.alpha_s,
        link.beta_s / 2,
    )
    expected = {frozenset(order[place].index for place in group) for group in groups}
    assert {frozenset(s.tensor for s in bucket.slices) for bucket in plan.buckets} == expected


def test_the_rule_for_all_reduces_pays_both_halves_at_once_and_predicts_nothing() -> None:
    tensors, times = chain([4, 4], [1e-3] * 2, [1e-3] * 2)
    # A start costs more than the second tensor's wait only if it is an all-reduce's.
    link = LinkCost(alpha_s=4e-4, beta_s=1e-12, all_reduce=LinkCost(alpha_s=2e-3, beta_s=1e-12))
    halves = MGWFBPFusion().search(tensors, WORLD_SIZE, times, link)
    whole = AllReduceMGWFBP().search(tensors, WORLD_SIZE, times, link)
    assert len(halves.best.buckets) == 2
    assert len(whole.best.buckets) == 1
    assert "predicted" in halves.reason
    assert "predicted" not in whole.reason


def test_its_plan_is_used_without_a_contest() -> None:
    tensors, times = chain([1, 1], [1, 1], [1, 1])
    search = MGWFBPFusion().search(tensors, WORLD_SIZE, times, LinkCost(1e-3, 1e-9))
    assert search.next() is None
    search.tell(search.best, 1.0)
    assert search.reason.startswith("mgwfbp: ")
    assert "ms/step" in search.reason
