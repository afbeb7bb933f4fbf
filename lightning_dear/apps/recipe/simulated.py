"""Workloads and networks by name, and fitted values, for the recipes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.plan.config import network_of
from lightning_dear.names import check_name
from lightning_dear.paths import conf_dir
from lightning_dear.simulator import Network, Workload
from lightning_dear.studies.progress import Progress
from lightning_dear.workloads.replay.profile import ModelProfile, load_profile, planned

T = TypeVar("T")

Range = tuple[float, float]


def progress(work: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items of `work`; show on stderr the progress and the time that is left."""
    with closing(Progress(len(work))) as shown:
        for one in work:
            shown.begin(what)
            yield one
            shown.step()


def workloads_of(cfg: DictConfig) -> list[Workload]:
    """Return the models that `cfg.models` names, with seconds multiplied by `cfg.compute_factor`.

    Raises:
        ValueError: If a profile is unknown.
    """
    factor = float(cfg.compute_factor)
    return [workload_of(load_profile(name), factor) for name in listed(cfg, "models")]


def workload_of(profile: ModelProfile, factor: float) -> Workload:
    """Return a profile's model, with forward and backward times multiplied by `factor`."""
    seconds = profile.forward_s + profile.backward_s
    return Workload(profile.name, *planned(profile.with_compute(seconds * factor)))


def fitted(
    of: Callable[[float], float], goal: float, between: Range, what: str, tolerance: float = 2e-12
) -> float:
    """Return the positive number x for which `of(x)` equals a published figure.

    Args:
        of: A monotonic function of one positive number.
        goal: Published figure.
        between: Least and largest number to try.
        what: Name of the quantity `of(x)`, for the error message.
        tolerance: Relative error that x may have.

    Raises:
        ValueError: If `of` does not reach `goal` between them.
    """
    from scipy.optimize import brentq

    def missing(logarithm: float) -> float:
        return of(math.exp(logarithm)) - goal

    ends = [math.log(end) for end in between]
    if missing(ends[0]) * missing(ends[1]) > 0:
        raise ValueError(
            f"{what} is never {goal:g} from {between[0]:g} to {between[1]:g}, the limits of the"
            " fit. Leave out options that differ from the set-up of the published figure."
        )
    return math.exp(brentq(missing, *ends, xtol=tolerance))


def networks_of(cfg: DictConfig, world_size: int | None) -> dict[str, Network]:
    """Return name -> network of `cfg.clusters`, or of `cfg.cluster` if that is given.

    Args:
        cfg: Config of the recipe.
        world_size: Number of ranks. None means as many as the cluster's file has.

    Raises:
        ValueError: If a cluster is unknown, or its file lacks a figure.
    """
    if (given := cfg.get("cluster")) is not None:
        choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        names = {str(choices.get("cluster", "own")): given}
        world_size = _asked_size(world_size)
    else:
        names = {name: load_cluster(name) for name in listed(cfg, "clusters")}
    return {name: network_of(one, world_size=world_size) for name, one in names.items()}


def _asked_size(world_size: int | None) -> int | None:
    """Return None if the command line sets the cluster's nodes or devices, else `world_size`.

    None means as many ranks as the cluster's config has.
    """
    asked = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    names = {word.lstrip("+~").partition("=")[0] for word in asked}
    counts = ("num_nodes", "devices", "num_hosts", "ranks_per_host")
    if not names & {f"cluster.{one}" for one in counts}:
        return world_size
    if "world_size" in names:
        raise ValueError(
            "world_size and cluster.num_hosts or cluster.ranks_per_host are both given. Leave one"
            " of them out. Each sets the number of ranks."
        )
    return None


def load_cluster(name: str) -> DictConfig:
    """Return the config of the cluster `name`.

    Raises:
        ValueError: If no cluster of that name can be simulated; the message lists valid names.
    """
    folder = conf_dir() / "cluster"
    valid = sorted(path.stem for path in folder.glob("*.yaml") if "source:" in path.read_text())
    cluster = OmegaConf.load(folder / f"{check_name('cluster', name, valid)}.yaml")
    assert isinstance(cluster, DictConfig)
    return cluster


def listed(cfg: DictConfig, option: str) -> list[str]:
    """Return the value of an option that is a list of names.

    Raises:
        ValueError: If the value is not a list, or is empty.
    """
    names = cfg[option]
    if isinstance(names, str) or not names:
        raise ValueError(f"{option}={names} must be a list, such as {option}=[{names or '...'}].")
    return [str(name) for name in names]
