"""Reads `conf/bench.yaml`: its entries, its points, and the config of each of them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_dear.names import check_name
from lightning_dear.studies.block import BlockLength

_OWN_KEYS = ("name", "grid", "tuning_steps", "plan_of", "rounds", "warm_up_steps")


@dataclass(frozen=True)
class Entry:
    """One competitor of a comparison.

    Attributes:
        name: Name in the table.
        overrides: Hydra overrides on top of the job's own.
        length: Number of steps of its blocks.
        rounds: Number of rounds, from the first on, in which the entry is measured.
        grid: Alternative further overrides; the fastest one is found first and then used in all
            blocks. Empty means no search.
        tuning_steps: Steps of a first fit, whose last plan all blocks use. 0 means no such fit.
        plan_of: Overrides of that first fit, if a strategy other than the entry's must find the
            plan. Empty means the entry's own overrides.
    """

    name: str
    overrides: tuple[str, ...]
    length: BlockLength
    rounds: int
    grid: tuple[str, ...] = ()
    tuning_steps: int = 0
    plan_of: tuple[str, ...] = ()


def entries_of(cfg: DictConfig) -> list[Entry]:
    """Return the entries that ``cfg.entries`` names or spells out.

    Raises:
        ValueError: For unknown names, names that occur twice, entries without a name, grids of
            several options, and a warm-up that is too short.
    """
    known: Any = OmegaConf.to_container(cfg.competitors)
    entries = named(cfg, lambda name: known[check_name("entry", name, known)])
    return [_entry(cfg, one) for one in entries]


def named(cfg: DictConfig, spelt_out: Callable[[str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``cfg.entries`` as mappings that have a name each.

    Args:
        cfg: Config of the job.
        spelt_out: Returns the settings that a bare name stands for.

    Raises:
        ValueError: For an entry without a name, and for two entries with the same name.
    """
    given: Any = OmegaConf.to_container(cfg.entries) or []
    entries = [{"name": one, **spelt_out(one)} if isinstance(one, str) else one for one in given]
    for one in entries:
        if "name" not in one:
            raise ValueError(f"The entry {one} has no name. Give it one with the key name.")
    names = [str(one["name"]) for one in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"entries has {', '.join(twice)} more than once. Give each its own name.")
    return entries


def _entry(cfg: DictConfig, one: Mapping[str, Any]) -> Entry:
    if len(grid := one.get("grid") or {}) > 1:
        raise ValueError(f"grid of {one['name']} has {', '.join(grid)}. Keep only one option.")
    overrides, plan_of = overrides_of(one, _OWN_KEYS), overrides_of(one.get("plan_of", {}))
    length = BlockLength(one.get("warm_up_steps", cfg.warm_up_steps), cfg.steps)
    rounds, tuning_steps = one.get("rounds", cfg.rounds), one.get("tuning_steps", 0)
    tries = tuple(as_override(key, value) for key, values in grid.items() for value in values)
    return Entry(str(one["name"]), overrides, length, rounds, tries, tuning_steps, plan_of)


def overrides_of(settings: Mapping[Any, Any], but: Collection[str] = ()) -> tuple[str, ...]:
    """Return settings as Hydra overrides, without the keys `but`."""
    return tuple(as_override(str(key), one) for key, one in settings.items() if key not in but)


def as_override(key: str, value: Any) -> str:
    """Return ``key=value`` as Hydra's command line reads it."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item) for item in value) + "]"
    if isinstance(value, str) and not value.replace("_", "a").replace(".", "a").isalnum():
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return value if isinstance(value, str) else json.dumps(value)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the running job's config, composed again with further overrides."""
    job = HydraConfig.get()
    return compose(str(job.job.config_name), merged(job.overrides.task, overrides))


def merged(first: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return ``first`` without the keys that ``later`` sets, and then ``later``.

    Hydra refuses two choices for one config group.
    """
    keys = {_key(one) for one in later}
    return [*(one for one in first if _key(one) not in keys), *later]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


# --- points -------------------------------------------------------------------------------------

Setting = Mapping[str, Any]


def points_of(cfg: DictConfig) -> list[dict[str, Any]]:
    """Return the settings of every comparison; one empty mapping if the config lists no point."""
    points: Any = OmegaConf.to_container(cfg.points) or [{}]
    swept: Any = OmegaConf.to_container(cfg.sweep) if cfg.sweep is not None else {}
    combinations = [dict(zip(swept, chosen, strict=True)) for chosen in product(*swept.values())]
    return [{**point, **combination} for point in points for combination in combinations]


def by_cluster(points: Sequence[Setting]) -> list[tuple[Setting, list[Setting]]]:
    """Group consecutive points that can be measured on the same ranks and links.

    Returns:
        For each group: the settings to start the ranks with, and the points to measure on them.
    """

    def cluster(point: Setting) -> dict[str, Any]:
        own = [key for key in point if key == "model.scale" or key.split(".")[0] == "cluster"]
        return {key: point[key] for key in own}

    return [(settings, list(group)) for settings, group in groupby(points, key=cluster)]


def at_point(point: Setting, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the running job's config with a point's settings and further overrides."""
    return composed(merged(overrides_of(point), overrides))


def label_of(point: Setting) -> str:
    """Return a point's settings as text, for people."""
    return ", ".join(f"{key}={_text(value)}" for key, value in point.items())
