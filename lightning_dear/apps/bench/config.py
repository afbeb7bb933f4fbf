"""What `conf/bench.yaml` says: entries, points, and the config that each of them means."""

import json
from collections.abc import Callable, Mapping, Sequence
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
    """One competitor.

    Attributes:
        name: For people.
        overrides: Hydra overrides on top of the job's.
        length: Of its blocks.
        rounds: It takes part in the first so many rounds.
        grid: Alternative further overrides, of which the best is measured first; may be empty.
        tuning_steps: Steps of a fit whose last plan is kept; 0: none.
        plan_of: Overrides of that fit, if another strategy than the entry's is to find the plan.
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
        ValueError: For unknown names, names given twice, entries without a name, grids of several
            options, and too short a warm-up.
    """
    known: Any = OmegaConf.to_container(cfg.competitors)
    entries = named(cfg, lambda name: known[check_name("entry", name, known)])
    return [_entry(cfg, one) for one in entries]


def named(cfg: DictConfig, spelt_out: Callable[[str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return all of ``cfg.entries`` as mappings with a name.

    Args:
        cfg: The job.
        spelt_out: Name -> what it stands for.

    Raises:
        ValueError: For entries without a name, or with another's.
    """
    given: Any = OmegaConf.to_container(cfg.entries) or []
    entries = [{"name": one, **spelt_out(one)} if isinstance(one, str) else one for one in given]
    for one in entries:
        if "name" not in one:
            raise ValueError(f"The entry {one} has no name; add name: ...")
    names = [str(one["name"]) for one in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"entries has {', '.join(twice)} more than once; give each its own name.")
    return entries


def _entry(cfg: DictConfig, one: Mapping[str, Any]) -> Entry:
    settings = {key: value for key, value in one.items() if key not in _OWN_KEYS}
    grid = one.get("grid") or {}
    if len(grid) > 1:
        raise ValueError(f"A grid has one option, this one has {', '.join(grid)}.")
    return Entry(
        name=str(one["name"]),
        overrides=overrides_of(settings),
        length=BlockLength(one.get("warm_up_steps", cfg.warm_up_steps), cfg.steps),
        rounds=one.get("rounds", cfg.rounds),
        grid=tuple(as_override(key, value) for key, values in grid.items() for value in values),
        tuning_steps=one.get("tuning_steps", 0),
        plan_of=overrides_of(one.get("plan_of", {})),
    )


def overrides_of(settings: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return settings as Hydra overrides."""
    return tuple(as_override(str(key), value) for key, value in settings.items())


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
    """Compose the running job again with further overrides; what it does not touch stays."""
    job = HydraConfig.get()
    config_name = job.job.config_name
    assert config_name is not None
    return compose(config_name, merged(job.overrides.task, overrides))


def merged(first: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return both, without what ``later`` overrides again: Hydra refuses two members of a group."""
    keys = {_key(one) for one in later}
    return [*(one for one in first if _key(one) not in keys), *later]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


# --- points -------------------------------------------------------------------------------------

Setting = Mapping[str, Any]


def points_of(cfg: DictConfig) -> list[dict[str, Any]]:
    """Return the settings of every comparison to make; one without settings if none is listed."""
    points: Any = OmegaConf.to_container(cfg.points) or [{}]
    swept: Any = OmegaConf.to_container(cfg.sweep) if cfg.sweep is not None else {}
    combinations = [dict(zip(swept, chosen, strict=True)) for chosen in product(*swept.values())]
    return [{**point, **combination} for point in points for combination in combinations]


def by_cluster(points: Sequence[Setting]) -> list[tuple[Setting, list[Setting]]]:
    """Group points, in order, by what needs other ranks or other links.

    Returns:
        For each group: the settings to start the ranks with, and the points to compare on them.
    """

    def cluster(point: Setting) -> dict[str, Any]:
        own = [key for key in point if key == "model.scale" or key.split(".")[0] == "cluster"]
        return {key: point[key] for key in own}

    return [(settings, list(group)) for settings, group in groupby(points, key=cluster)]


def at_point(point: Setting, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the running job again, with a point's settings and further overrides."""
    return composed(merged(overrides_of(point), overrides))


def label_of(point: Setting) -> str:
    """Return a point's settings for people."""
    return ", ".join(f"{key}={_text(value)}" for key, value in point.items())
