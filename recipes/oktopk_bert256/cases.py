"""Ok-Topk's recipe: what is trained on how many ranks, and the steps that this takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig

from lightning_dear.apps.recipe.simulated import workload_of
from lightning_dear.compression import SparseAllReduce, resolve_compressor
from lightning_dear.planning import SingleFusion
from lightning_dear.simulator import Workload
from lightning_dear.simulator.ranking import Ranked, alone_s
from lightning_dear.simulator.strategies import Strategy
from lightning_dear.simulator.strategies import planned as by_rule
from lightning_dear.workloads.replay.planned import planned
from lightning_dear.workloads.replay.profile import ModelProfile, load_profile

_NEEDED, _OPTIONAL = ("profile", "world_size", "density"), ("label", "compute_factor")
_SUCH_AS = "{profile: bert_base, world_size: 256, density: 0.01}"
_T = TypeVar("_T")

WORD_BYTES = 4
DENSE, OURS = "none", "oktopk"
"""What travels: all numbers as they are, or what Ok-Topk selects."""

PUBLISHED = (3.29, 12.95)
"""How many times as fast Ok-Topk is for BERT on 256 GPUs, by the paper's abstract."""

_CLAIMED = ("bert_base", 256, "aries")
_CLAIMED_DENSITY = 0.01

AT_ONCE = Strategy(
    "at_once",
    "their schedule: one bucket after backward",
    by_rule(SingleFusion().plan, all_reduces=True),
    compresses="whole",
)
DENSE_AT_ONCE = (AT_ONCE.name, DENSE)


def titled(scheme: str) -> str:
    """Return a scheme's name for people."""
    return "dense" if scheme == DENSE else scheme


@dataclass(frozen=True)
class Case:
    """A model among so many ranks, of which each selects `density` of the gradient's numbers."""

    label: str
    workload: Workload
    world_size: int
    density: float

    @property
    def numel(self) -> int:
        """Of the gradient."""
        return self.workload.nbytes // WORD_BYTES

    def compressor(self, name: str) -> SparseAllReduce:
        """Return the sparse all-reduce of that name at this density.

        Raises:
            ValueError: If there is none, or the density is not in (0, 1].
        """
        made = resolve_compressor(name)
        if not isinstance(made, SparseAllReduce):
            raise ValueError(f"{name} is no sparse all-reduce; docs/compressors.md names those.")
        return made.at_density(self.density)


@dataclass(frozen=True)
class Steps:
    """One case on one cluster: (how it is scheduled, what is sent) -> its step.

    Attributes:
        case: Which.
        cluster: The name of its file.
        is_as_configured: Whether the cluster is as in its file; on the command line it may differ.
        of: Schedule and scheme -> the step.
    """

    case: Case
    cluster: str
    is_as_configured: bool
    of: Mapping[tuple[str, str], Ranked]

    @property
    def alone_s(self) -> float:
        """Seconds of computing, which is all that one rank alone does."""
        return alone_s(self.case.workload)

    @property
    def is_claimed(self) -> bool:
        """Whether the paper's abstract speaks of it, as far as is known of the paper's runs."""
        what = (self.case.workload.name, self.case.world_size, self.cluster)
        is_their_density = math.isclose(self.case.density, _CLAIMED_DENSITY)
        return what == _CLAIMED and is_their_density and self.is_as_configured

    def step_s(self, way: str, scheme: str = DENSE) -> float:
        """Seconds of a step."""
        return self.of[way, scheme].step.step_s

    def times(self, way: str, other: tuple[str, str]) -> float:
        """How many times as fast as `other` Ok-Topk is."""
        return self.step_s(*other) / self.step_s(way, OURS)

    def beyond(self, other: tuple[str, str]) -> float:
        """The same of what a step of `at_once` takes longer than computing."""
        return (self.step_s(*other) - self.alone_s) / (self.step_s("at_once", OURS) - self.alone_s)

    def others(self, way: str) -> list[tuple[str, str]]:
        """Other sparse schemes, the fastest first."""
        keys = [key for key in self.of if key[0] == way and key[1] not in (DENSE, OURS)]
        return sorted(keys, key=lambda key: self.step_s(*key))

    @property
    def compared(self) -> list[tuple[str, str]]:
        """What the paper compares with, by its schedule: dense, and other sparse schemes."""
        return [DENSE_AT_ONCE, *self.others("at_once")]


# --- cases, from a config -------------------------------------------------------------------------


def cases_of(cfg: DictConfig) -> list[Case]:
    """Return the cases of the config, their seconds times both factors.

    Raises:
        ValueError: If they are no list, one makes no sense, or two have the same label.
    """
    if not isinstance(cfg.cases, ListConfig) or not cfg.cases:
        raise ValueError(f"cases must be a list, such as cases=[{_SUCH_AS}].")
    made = [_case(entry, float(cfg.compute_factor)) for entry in cfg.cases]
    if len({case.label for case in made}) < len(made):
        raise ValueError("Two cases have the same label; give each its own.")
    return made


def _case(entry: Any, factor: float) -> Case:
    _check_keys(entry)
    world_size, density = _number(entry, "world_size", int), _number(entry, "density", float)
    if world_size < 2:
        raise ValueError(f"A case has at least 2 ranks, got world_size={world_size}.")
    profile = _profile(str(entry.profile))
    if entry.get("compute_factor") is not None:
        factor *= _number(entry, "compute_factor", float)
    label = entry.get("label") or f"{profile.name}, {world_size} ranks, {density:.2%}"
    return Case(str(label), _computing(profile, factor), world_size, density)


def _check_keys(entry: Any) -> None:
    if not isinstance(entry, DictConfig):
        raise ValueError(f"Each of cases must be such as {_SUCH_AS}, got {entry!r}.")
    if lacking := [name for name in _NEEDED if entry.get(name) is None]:
        raise ValueError(f"A case lacks {', '.join(lacking)}; it needs {', '.join(_NEEDED)}.")
    valid = (*_NEEDED, *_OPTIONAL)
    if unknown := [str(name) for name in entry if name not in valid]:
        raise ValueError(f"Unknown in a case: {', '.join(unknown)}; valid: {', '.join(valid)}.")


def _number(entry: DictConfig, name: str, kind: Callable[[Any], _T]) -> _T:
    try:
        return kind(entry[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} of a case must be a number, got {entry[name]!r}.") from error


def _profile(name: str) -> ModelProfile:
    try:
        return load_profile(name)
    except OSError as error:
        raise ValueError(f"Unknown profile {name!r}: {error.strerror}.") from error


def _computing(profile: ModelProfile, factor: float) -> Workload:
    """What computes `factor` times as long; at 1 the profile as it is, to the last bit."""
    if factor == 1:
        return Workload(profile.name, *planned(profile))
    return workload_of(profile, factor)
