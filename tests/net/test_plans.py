"""Planners make the plans that they made before files moved: see `plans.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.net.finding import find
from tests.net.plans import (
    ALL_WAYS,
    ONLY_SMALL,
    QUICK_WAYS,
    SMALLEST,
    WORLD_SIZES,
    all_plans,
    differences,
    is_recorded,
    planners,
    recorded,
    summary,
)

LARGER = [name for name in find("replay", "PROFILES") if name not in SMALLEST]


def _check(profile: str, world_size: int, planner: str, ways: Sequence[str]) -> None:
    now = all_plans([profile], [world_size], planner, ways)
    before = {
        key: value
        for key, value in recorded().items()
        if key.split("/")[:2] == [profile, planner]
        and key.split("/")[2] in ways
        and key.endswith(f"/{world_size}")
    }
    assert now or planner in ONLY_SMALL
    assert differences(before, now) == []


@pytest.mark.parametrize("profile", SMALLEST)
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != 8)) for one in WORLD_SIZES],
)
@pytest.mark.parametrize("planner", planners())
def test_plans_of_small_profiles_are_those_of_before(
    planner: str, world_size: int, profile: str
) -> None:
    _check(profile, world_size, planner, QUICK_WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("planner", planners())
@pytest.mark.parametrize("profile", [*SMALLEST, *LARGER])
def test_all_plans_are_those_of_before(profile: str, planner: str) -> None:
    for world_size in WORLD_SIZES:
        _check(profile, world_size, planner, ALL_WAYS)


def test_all_is_recorded() -> None:
    profiles = find("replay", "PROFILES")
    assert {key.split("/")[0] for key in recorded()} == set(profiles)
    assert {key.split("/")[1] for key in recorded()} == set(planners())
    missing = [(one, name) for one in profiles for name in planners() if not is_recorded(one, name)]
    assert missing == [], "run `python -m tests.net.plans --missing` in 7283dee"


def test_another_plan_is_noticed() -> None:
    tensors, _ = find("planned", "planned")(find("replay", "load_profile")("vgg16"))
    plan = planners()["threshold"].plan(tensors, 2)
    for changed in (
        replace(plan, reduce_order=plan.reduce_order[::-1]),
        replace(plan, all_reduced=(0,)),
        replace(plan, uncompressed=(1,)),
        replace(plan, buckets=(replace(plan.buckets[0], padded_numel=1), *plan.buckets[1:])),
    ):
        assert summary([changed]) != summary([plan])
    assert summary([replace(plan)]) == summary([plan])
    assert differences({"a": "1"}, {"a": "2"}) == ["a: 1 -> 2"]
    assert differences({"a": "1"}, {}) == ["a: 1 -> None"]
    assert differences({"a/early/2": "1"}, {}) == []
