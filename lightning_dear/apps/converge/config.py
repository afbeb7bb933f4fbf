"""What `conf/converge.yaml` says: entries, the options to try for each, and what they mean."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.nn import Parameter

from lightning_dear.apps.bench.build import build_strategy
from lightning_dear.apps.bench.config import as_override, composed, named, overrides_of
from lightning_dear.engine.trained_parameters import check_momentum
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.studies.convergence import Asked, Metric
from lightning_dear.studies.training import check_broken

_OWN_KEYS = ("name", "reference", "below", "control", "broken", "lr_factors", "dense_shares")
_IN_A_KEY = ("model", "data", "trainer", "strategy")


@dataclass(frozen=True)
class Entry:
    """What is trained.

    Attributes:
        asked: What is asked of it; it has no reference if it is one.
        overrides: Hydra overrides on top of the job's.
        lr: The learning rate that the config has for it.
        lr_factors: Learning rates to try, as multiples of the reference's, or of ``lr`` if it is
            one.
        dense_shares: Of the steps, to try with each of them.
        max_steps: Optimizer steps of a training.
        broken: Name of the bug it is trained with; None: none.
    """

    asked: Asked
    overrides: tuple[str, ...]
    lr: float
    lr_factors: tuple[float, ...]
    dense_shares: tuple[float, ...]
    max_steps: int
    broken: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.asked.entry


@dataclass(frozen=True)
class Options:
    """What is tried for an entry.

    Attributes:
        lr_factor: Of the learning rate it is counted from.
        dense_share: Of the steps, in which nothing is encoded.
    """

    lr_factor: float
    dense_share: float


def entries_of(cfg: DictConfig) -> list[Entry]:
    """Return the entries that ``cfg.entries`` names or spells out, references first.

    Composes each of them with each bucketing and builds its strategy, so that what is wrong shows
    before anything is trained.

    Raises:
        ValueError: For entries without a name or with another's, without a dense one before
            them, and for options of a codec that exclude each other.
    """
    entries: list[Entry] = []
    for one in named(cfg, lambda name: {"compressor": "none" if name == "dense" else name}):
        entries.append(_entry(cfg, one, entries))
        for buckets in buckets_of(cfg).values():
            build_strategy(composed((*entries[-1].overrides, *buckets)))
    return sorted(entries, key=lambda entry: entry.asked.reference is not None)


def _entry(cfg: DictConfig, one: Any, before: Sequence[Entry]) -> Entry:
    name = str(one["name"])
    check_broken(one.get("broken"))
    overrides = overrides_of({key: value for key, value in one.items() if key not in _OWN_KEYS})
    own = composed(overrides)
    codec = instantiate(own.compressor)
    if getattr(codec, "brings_momentum", False):
        _check_momentum(name, codec, own)
    reference = _reference_of(name, one.get("reference"), before, own)
    # Nothing goes dense before votes, which try other learning rates instead.
    has_shares = reference is not None and getattr(codec, "kind", None) != "vote"
    shares = tuple(one.get("dense_shares") or cfg.dense_shares) if has_shares else (0.0,)
    usual = cfg.lr_factors if has_shares else cfg.reference_lr_factors
    factors = one.get("lr_factors") or usual
    _check_entry(name, one, shares, is_reference=reference is None)
    _check_numbers(name, one, {"lr_factors": len(usual), "dense_shares": len(cfg.dense_shares)})
    asked = Asked(name, reference, bool(one.get("control")), one.get("below"))
    lr, max_steps = float(own.optimizer.lr), int(own.trainer.max_steps)
    if max_steps < 1:
        raise ValueError(f"trainer.max_steps must be at least 1, got {max_steps} ({name}).")
    return Entry(asked, overrides, lr, tuple(factors), shares, max_steps, one.get("broken"))


def _check_numbers(name: str, one: Any, numbers: Mapping[str, int]) -> None:
    """Raise ValueError where an entry's own tries are more or fewer than others'."""
    for option, number in numbers.items():
        if one.get(option) and len(one[option]) != number:
            raise ValueError(
                f"Entry {name} has {len(one[option])} {option} and must have {number}; give all as"
                " many tries (votes as many as references)."
            )


def _check_momentum(name: str, codec: Any, cfg: DictConfig) -> None:
    """Raise ValueError for what the strategy would refuse when it is the entry's turn."""
    optimizer = instantiate(cfg.optimizer)([Parameter(torch.zeros(1))])
    try:
        check_momentum(optimizer, ExchangeOptions("gradients", codec=codec))
    except ValueError as error:
        raise ValueError(f"Entry {name}: {error} Add optimizer: sgd_plain to it.") from None


def _check_entry(name: str, one: Any, shares: Sequence[float], *, is_reference: bool) -> None:
    """Raise ValueError for what would be ignored, or found out when it is the entry's turn."""
    of_others = ("below", "control", "broken", "lr_factors", "dense_shares")
    ignored = [key for key in of_others if one.get(key)]
    if is_reference and ignored:
        raise ValueError(
            f"Entry {name} encodes nothing and is a reference: {', '.join(ignored)} has no"
            " effect; leave it out (reference_lr_factors are what references try)."
        )
    if one.get("dense_shares") and tuple(one["dense_shares"]) != shares:
        raise ValueError(
            f"Entry {name} votes, and nothing goes dense before votes: leave its dense_shares out."
        )
    if one.get("control") and one.get("below") is not None:
        raise ValueError(
            f"Entry {name} has both control and below, and a control is compared; leave one out."
        )
    has_schedule = any(str(key).startswith("strategy.compression_schedule") for key in one)
    if has_schedule and any(shares):
        raise ValueError(
            f"Entry {name} has a compression_schedule, which dense_shares would replace: set"
            " dense_shares=[0], and as many reference_lr_factors as lr_factors."
        )


def _reference_of(
    name: str, wanted: str | None, before: Sequence[Entry], cfg: DictConfig
) -> str | None:
    if str(cfg.compressor._target_).endswith(".NoCompression"):
        if wanted is not None:
            raise ValueError(f"Entry {name} encodes nothing, and so has no reference.")
        return None
    dense = [entry.name for entry in before if entry.asked.reference is None]
    reference = wanted or (dense[0] if dense else None)
    if reference not in dense:
        raise ValueError(
            f"Entry {name} is to be compared with {reference}, but the dense entries before it are"
            f" {', '.join(dense) or 'none'}. Name one with reference: ..., or begin with dense."
        )
    return reference


def buckets_of(cfg: DictConfig) -> dict[str, tuple[str, ...]]:
    """Return name -> overrides of every bucketing."""
    buckets: Any = OmegaConf.to_container(cfg.buckets)
    return {str(name): overrides_of(overrides) for name, overrides in buckets.items()}


def metric_of(cfg: DictConfig) -> Metric:
    """Return how the ends of trainings are judged."""
    options: Any = OmegaConf.to_container(cfg.metric, throw_on_missing=True)
    return Metric(**options)


def tries_of(entry: Entry) -> list[Options]:
    """Return the options to choose from."""
    tries = product(entry.lr_factors, entry.dense_shares)
    return [Options(float(factor), float(share)) for factor, share in tries]


def check(cfg: DictConfig) -> None:
    """Raise ValueError for options that leave nothing to compare."""
    if len(cfg.seeds) < 2 or len(set(cfg.seeds)) < len(cfg.seeds):
        raise ValueError(f"seeds must be at least 2 different ones, got {list(cfg.seeds)}.")
    num_tries = len(cfg.reference_lr_factors)
    if (num_tries > 1 and not cfg.tuning_seeds) or set(cfg.tuning_seeds) & set(cfg.seeds):
        raise ValueError(
            f"tuning_seeds must be others than seeds, got {list(cfg.tuning_seeds)}: what is chosen"
            " on a seed ends better on it."
        )
    own, reference = len(cfg.lr_factors) * len(cfg.dense_shares), len(cfg.reference_lr_factors)
    if own == 0 or own != reference:
        raise ValueError(
            f"Entries have {own} tries (lr_factors times dense_shares) and references {reference}"
            " (reference_lr_factors); give both the same."
        )
    if cfg.tuning_buckets not in (None, *cfg.buckets):
        raise ValueError(
            f"Unknown tuning_buckets={cfg.tuning_buckets!r}; valid names: {', '.join(cfg.buckets)}."
        )


def config_of(entry: Entry, buckets: Sequence[str], options: Options, lr: float) -> DictConfig:
    """Compose the config of one training; the seed is not in it.

    Args:
        entry: What is trained.
        buckets: Overrides of its bucketing.
        options: Their dense share counts here, as one of the entry's steps.
        lr: The learning rate.
    """
    overrides = [*entry.overrides, *buckets]
    dense_steps = round(options.dense_share * entry.max_steps)
    if dense_steps:
        target = "lightning_dear.callbacks.CompressionSchedule"
        schedule = {"_target_": target, "dense_steps": dense_steps}
        overrides.append(as_override("strategy.compression_schedule", schedule))
    overrides = [one for one in overrides if not one.startswith("optimizer.lr=")]
    return composed([*overrides, as_override("optimizer.lr", lr)])


def key_of(cfg: DictConfig, *others: Any) -> str:
    """Return a digest of all options that have a say in a training.

    Args:
        cfg: Its config.
        others: What is not in there.
    """
    parts: Any = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in _IN_A_KEY}
    del parts["trainer"]["default_root_dir"]
    text = json.dumps([parts, others], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
