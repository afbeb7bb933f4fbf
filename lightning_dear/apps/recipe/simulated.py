"""Steps of profiles on clusters, by name, as the recipes need them."""

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


def progress(work: Sequence[T], what: str) -> Iterator[T]:
    """`work`, and on stderr how far it is and how much time is left."""
    with closing(Progress(len(work))) as shown:
        for one in work:
            shown.begin(what)
            yield one
            shown.step()


def workloads_of(cfg: DictConfig) -> list[Workload]:
    """Return the profiles that `cfg.models` names, and their seconds times `cfg.compute_factor`.

    Raises:
        ValueError: If there is no such profile.
    """
    factor = float(cfg.compute_factor)
    return [workload_of(load_profile(name), factor) for name in listed(cfg, "models")]


def workload_of(profile: ModelProfile, factor: float) -> Workload:
    """Return a profile's model, computing `factor` times as long as the profile says."""
    seconds = profile.forward_s + profile.backward_s
    return Workload(profile.name, *planned(profile.with_compute(seconds * factor)))


def fitted(
    of: Callable[[float], float],
    goal: float,
    low: float,
    high: float,
    what: str,
    tolerance: float = 2e-12,
) -> float:
    """Return where a quantity of one positive number is what was published.

    Args:
        of: Number -> quantity; it rises all the way, or falls all the way.
        goal: What was published.
        low: Where to look.
        high: Up to where.
        what: The quantity, for the message.
        tolerance: By which share the number may be wrong.

    Raises:
        ValueError: If it is nowhere between `low` and `high`.
    """
    from scipy.optimize import brentq

    def missing(logarithm: float) -> float:
        return of(math.exp(logarithm)) - goal

    ends = math.log(low), math.log(high)
    if missing(ends[0]) * missing(ends[1]) > 0:
        raise ValueError(f"{what} is {goal:g} nowhere between {low:g} and {high:g}.")
    return math.exp(brentq(missing, *ends, xtol=tolerance))


def networks_of(cfg: DictConfig, world_size: int | None) -> dict[str, Network]:
    """Return the networks of `cfg.clusters`, or that of `cfg.cluster` if one is given.

    Args:
        cfg: The recipe's.
        world_size: Ranks in all; None: as the cluster's file says.

    Raises:
        ValueError: If a cluster is unknown, or its file lacks something.
    """
    given = cfg.get("cluster")
    if given is not None:
        choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
        names = {str(choices.get("cluster", "own")): given}
        world_size = _asked_size(world_size)
    else:
        names = {name: load_cluster(name) for name in listed(cfg, "clusters")}
    return {name: network_of(one, world_size=world_size) for name, one in names.items()}


def _asked_size(world_size: int | None) -> int | None:
    """None, for the cluster's own, where its size was asked for on the command line."""
    asked = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    names = {word.lstrip("+~").partition("=")[0] for word in asked}
    if not names & {"cluster.num_nodes", "cluster.devices"}:
        return world_size
    if "world_size" in names:
        raise ValueError(
            "world_size and cluster.num_nodes or cluster.devices say both how many ranks there"
            " are; leave one of them out."
        )
    return None


def load_cluster(name: str) -> DictConfig:
    """Return the cluster of that name.

    Raises:
        ValueError: If there is none that can be simulated; the message lists those.
    """
    folder = conf_dir() / "cluster"
    valid = sorted(path.stem for path in folder.glob("*.yaml") if "source:" in path.read_text())
    cluster = OmegaConf.load(folder / f"{check_name('cluster', name, valid)}.yaml")
    assert isinstance(cluster, DictConfig)
    return cluster


def listed(cfg: DictConfig, option: str) -> list[str]:
    """Return the names of an option.

    Raises:
        ValueError: If they are no list, or none.
    """
    names = cfg[option]
    if isinstance(names, str) or not names:
        raise ValueError(f"{option} must be a list of names, such as {option}=[{names or '...'}].")
    return [str(name) for name in names]
