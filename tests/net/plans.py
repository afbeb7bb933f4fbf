"""Every planner's plans of every recorded profile, as short digests.

    python -m tests.net.plans --write          # makes plans.json again
    python -m tests.net.plans --missing        # adds what it lacks; run it in 7283dee
    python -m tests.net.plans                  # compares all of it: status 1 if a plan differs

Times are those of the profile, the link and the codec cost what is written below, and plans that a
search wants to have measured take what is predicted. So all of it is pure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tests.net.finding import find

FILE = Path(__file__).parent / "plans.json"
WORLD_SIZES = (2, 4, 8, 64)
SMALLEST = ("lstm", "vgg16")
"""Profiles with the fewest layers."""

ONLY_SMALL = ("auto, all shares",)
"""Planners that take minutes for the other profiles."""

ALPHA_S, BETA_S = 2e-4, 1 / 1.25e8
"""Of a 1 Gb/s link."""

MAX_MEASURED = 64
"""Plans that one search may want to have measured."""


def _link() -> Any:
    cost = find("planning", "LinkCost")
    return cost(ALPHA_S, BETA_S, all_reduce=cost(3e-4, 1 / 1.1e8))


def _codecs() -> Any:
    """As of int8: a byte an element, encoding at about 1 GB/s."""
    linear = find("planning", "Linear")
    cost = find("planning", "CodecCost")(
        encode=linear(5e-5, 4e-9),
        decode_sum=linear(5e-5, 2e-9),
        encode_shard=linear(3e-5, 2e-9),
        decode=linear(3e-5, 1e-9),
        reduce_bytes=linear(4.0, 1.0),
        gather_bytes=linear(4.0, 1.0),
    )
    plain = find("planning", "CodecCost")(encode=linear(2e-5), encode_shard=linear(2e-5))
    return find("planning", "CodecCosts")(cost, plain, may_mix=True)


def planners() -> dict[str, Any]:
    """Name -> planner: all of the registry, and some with other options."""
    table = find("registry", "FUSIONS")
    made = {name: planner() for name, planner in table.items()}
    made["threshold, 2 MiB"] = table["threshold"](bucket_cap_mb=2.0, first_bucket_cap_mb=0.5)
    made["auto, all shares"] = table["auto"](num_steps=120, all_reduced_share=1)
    made["mergecomp, 9 pieces"] = table["mergecomp"](max_pieces=9)
    return made


QUICK_WAYS = ("start", "search", "compressed")
ALL_WAYS = (*QUICK_WAYS, "uncut", "early")
"""How a planner is asked: what it starts with, or for its search under several conditions."""


def ways_of(planner: Any, times: Any, ways: Sequence[str]) -> list[str]:
    """Those of `ways` that say something of this planner."""
    if not hasattr(planner, "search"):
        return ["start"]
    left_out = set()
    if type(planner).__name__ == "BayesianFusion":
        # It looks at no times.
        left_out = {"uncut", "early", "compressed"}
    if not getattr(planner, "plans_for_codecs", False):
        left_out.add("compressed")
    if "allows_early" not in {field.name for field in fields(times)}:
        left_out.add("early")
    return [way for way in ways if way not in left_out]


def _conditions(times: Any, way: str) -> Any:
    names = {field.name for field in fields(times)}
    changed: dict[str, Any] = {"allows_early": False} if "allows_early" in names else {}
    if way == "early":
        changed = {}
    elif way == "uncut":
        changed |= {"allows_cuts": False, "step_s": 0.01, "late_step_s": 0.02}
    elif way == "compressed":
        changed |= {"allows_all_reduce": False}
    return replace(times, **changed)


def plans_of(
    planner: Any, way: str, tensors: Sequence[Any], times: Any, world_size: int
) -> Iterator[Any]:
    """Yields the plans that a planner makes: those that it wants measured, and the one it takes."""
    if way == "start":
        yield planner.plan(tensors, world_size)
        return
    times, link = _conditions(times, way), _link()
    costs = [link, _codecs()] if way == "compressed" else [link]
    search = planner.search(tensors, world_size, times, *costs)
    for _ in range(MAX_MEASURED):
        plan = search.next()
        if plan is None:
            break
        yield plan
        search.tell(plan, find("planning", "predict")(plan, tensors, times, *costs).step_s)
    yield search.best


def content(plan: Any) -> dict[str, Any]:
    """All of a plan by value. What may go one day is there only where it says something."""
    early = {"early": list(plan.early)} if getattr(plan, "early", ()) else {}
    return {
        "name": plan.name,
        "world_size": plan.world_size,
        "buckets": [
            {
                "family": bucket.family,
                "padded_numel": bucket.padded_numel,
                "slices": [[s.tensor, s.start, s.stop, s.offset] for s in bucket.slices],
            }
            for bucket in plan.buckets
        ],
        "reduce_order": list(plan.reduce_order),
        "gather_order": list(plan.gather_order),
        "all_reduced": list(plan.all_reduced),
        "uncompressed": list(plan.uncompressed),
        **early,
    }


def digest(value: Any) -> str:
    """A short hash of what JSON can hold."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def summary(plans: Sequence[Any]) -> str:
    """`<digest> <buckets of the last plan> of <plans>`."""
    return f"{digest([content(one) for one in plans])} {len(plans[-1].buckets)} of {len(plans)}"


def all_plans(
    profiles: Sequence[str],
    world_sizes: Sequence[int] = WORLD_SIZES,
    planner: str | None = None,
    ways: Sequence[str] = ALL_WAYS,
) -> dict[str, str]:
    """`profile/planner/way/ranks` -> summary. Of large profiles quick ways only."""
    found = {}
    for profile in profiles:
        tensors, times = find("planned", "planned")(find("replay", "load_profile")(profile))
        for name, one in planners().items():
            if planner not in (None, name) or (name in ONLY_SMALL and profile not in SMALLEST):
                continue
            for way in ways_of(one, times, ways if profile in SMALLEST else QUICK_WAYS):
                for world_size in world_sizes:
                    plans = list(plans_of(one, way, tensors, times, world_size))
                    found[f"{profile}/{name}/{way}/{world_size}"] = summary(plans)
    return found


def recorded() -> dict[str, str]:
    """What plans.json says."""
    content: dict[str, str] = json.loads(FILE.read_text())
    return content


def is_recorded(profile: str, planner: str) -> bool:
    """Whether plans.json has plans of this planner for this profile, or is not meant to."""
    if planner in ONLY_SMALL and profile not in SMALLEST:
        return True
    return any(key.split("/")[:2] == [profile, planner] for key in recorded())


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """One line for each plan that is another one, or missing.

    Plans with early buckets may be gone altogether.
    """
    has_early = any("/early/" in key for key in now)
    lines = []
    for key in sorted({*before, *now}):
        if "/early/" in key and not has_early:
            continue
        if before.get(key) != now.get(key):
            lines.append(f"{key}: {before.get(key)} -> {now.get(key)}")
    return lines


def main() -> int:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    # The small ones first: what is there when somebody loses patience is of use.
    profiles = sorted(find("replay", "PROFILES"), key=lambda name: name not in SMALLEST)
    pairs = [(profile, planner) for profile in profiles for planner in planners()]
    found = recorded() if options.missing else {}
    if options.missing:
        pairs = [pair for pair in pairs if not is_recorded(*pair)]
    writes = options.write or options.missing
    with ProcessPoolExecutor(2) as pool:
        parts = [pool.submit(all_plans, [profile], WORLD_SIZES, one) for profile, one in pairs]
        for part in as_completed(parts):
            found.update(part.result())
            if writes:
                FILE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    if writes:
        print(f"{len(found)} plans written to {FILE}")
        return 0
    lines = differences(recorded(), found)
    print("\n".join([*lines, f"{len(found)} plans, {len(lines)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
