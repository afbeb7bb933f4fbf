"""Reads `conf/converge.yaml`: its entries, the options to try for each, and their configs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.bench import build, config
from lightning_dear.engine.trained_parameters import check_momentum
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.studies.convergence import Asked

_OWN_KEYS = ("name", "reference", "below", "control", "lr_factors", "dense_shares")
_IN_A_KEY = ("model", "data", "trainer", "strategy")


@dataclass(frozen=True)
class Options:
    """Options that may be tried for an entry.

    Attributes:
        lr_factor: The learning rate divided by that of the entry's reference, or, if the entry is
            itself a reference, by the config's.
        dense_share: Share of the steps, at the beginning, in which nothing is encoded.
    """

    lr_factor: float
    dense_share: float


@dataclass(frozen=True, kw_only=True)
class Entry(Asked):
    """A configuration to train, and how its end is judged. A reference has no reference itself.

    Attributes:
        overrides: Hydra overrides on top of the job's own.
        lr: Learning rate in the entry's config.
        tries: Options to choose from, at least one.
        max_steps: Number of optimizer steps of a training.
    """

    overrides: tuple[str, ...]
    lr: float
    tries: tuple[Options, ...]
    max_steps: int


def entries_of(cfg: DictConfig) -> list[Entry]:
    """Return the entries that ``cfg.entries`` names or spells out, references first.

    Composes each entry with each bucketing and builds its strategy, so that errors show before any
    training begins.

    Raises:
        ValueError: For an entry that has no name or another entry's, has no dense entry before it,
            has options without effect, or has more or fewer tries than the references; and for
            options of a compressor that exclude each other.
    """
    entries: list[Entry] = []
    for one in config.named(cfg, lambda name: {"compressor": "none" if name == "dense" else name}):
        entries.append(_entry(cfg, one, entries))
        for buckets in buckets_of(cfg).values():
            build.build_strategy(config.composed((*entries[-1].overrides, *buckets)))
    return sorted(entries, key=lambda entry: entry.reference is not None)


def _entry(cfg: DictConfig, one: Any, before: Sequence[Entry]) -> Entry:
    name = str(one["name"])
    overrides = config.overrides_of(one, _OWN_KEYS)
    own = config.composed(overrides)
    codec = instantiate(own.compressor)
    is_dense = str(own.compressor._target_).endswith(".NoCompression")
    votes = getattr(codec, "kind", None) == "vote"
    _check_effects(name, one, is_dense=is_dense, votes=votes)
    if getattr(codec, "brings_momentum", False):
        _check_momentum(name, codec, own)
    if (max_steps := int(own.trainer.max_steps)) < 1:
        raise ValueError(f"Entry {name} has trainer.max_steps={max_steps}. Choose 1 or more.")
    return Entry(
        name=name,
        reference=None if is_dense else _reference_of(name, one.get("reference"), before),
        is_control=bool(one.get("control")),
        below=one.get("below"),
        overrides=overrides,
        lr=float(own.optimizer.lr),
        tries=_tries_of(cfg, one, goes_dense=not (is_dense or votes)),
        max_steps=max_steps,
    )


def _check_effects(name: str, one: Any, *, is_dense: bool, votes: bool) -> None:
    """Raise ValueError for keys of an entry that would be ignored."""
    given = {key for key in _OWN_KEYS[1:] if one.get(key)}
    if is_dense and given:
        raise ValueError(
            f"Entry {name} encodes nothing and is a reference: {', '.join(sorted(given))} has no"
            " effect. Leave it out. References try reference_lr_factors."
        )
    if votes and "dense_shares" in given:
        raise ValueError(
            f"Entry {name} votes and has dense_shares. Leave them out. Votes have no dense steps."
        )
    if {"control", "below"} <= given:
        raise ValueError(f"Entry {name} has both control and below. Leave one of these keys out.")


def _check_momentum(name: str, codec: Any, cfg: DictConfig) -> None:
    """Raise ValueError for an optimizer that the strategy would refuse with this compressor.

    The strategy itself would do so only when the entry is trained, perhaps hours later.
    """
    optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(1))])
    try:
        check_momentum(optimizer, ExchangeOptions("gradients", compressor=codec))
    except ValueError as error:
        raise ValueError(f"Entry {name}: {error} Add optimizer: sgd_plain to the entry.") from None


def _reference_of(name: str, wanted: str | None, before: Sequence[Entry]) -> str:
    dense = [entry.name for entry in before if entry.reference is None]
    if not dense:
        raise ValueError(
            f"Entry {name} has no dense entry before it to be compared with. Put dense before it."
        )
    if (reference := wanted or dense[0]) not in dense:
        raise ValueError(
            f"Entry {name} is to be compared with {reference}, but the dense entries before it are"
            f" {', '.join(dense)}. Set its key reference to one of them."
        )
    return reference


def _tries_of(cfg: DictConfig, one: Any, *, goes_dense: bool) -> tuple[Options, ...]:
    """Return the options to choose from; every entry has the same number of them."""
    name = one["name"]
    usual = cfg.lr_factors if goes_dense else cfg.reference_lr_factors
    shares = (one.get("dense_shares") or cfg.dense_shares) if goes_dense else (0,)
    if any(shares) and any(str(key).startswith("strategy.compression_schedule") for key in one):
        raise ValueError(
            f"Entry {name} has a compression_schedule, which dense_shares would replace. Give it"
            " dense_shares: [0], and as many lr_factors as there are reference_lr_factors."
        )
    tries = product(one.get("lr_factors") or usual, shares)
    options = tuple(Options(float(factor), float(share)) for factor, share in tries)
    if len(options) != len(cfg.reference_lr_factors):
        raise ValueError(
            f"Entry {name} has {len(options)} tries (lr_factors times dense_shares; votes have no"
            f" shares) and references {len(cfg.reference_lr_factors)} (reference_lr_factors). Set"
            " these keys so that both are equal. An entry with more tries would have an advantage."
        )
    return options


def buckets_of(cfg: DictConfig) -> dict[str, tuple[str, ...]]:
    """Return name -> overrides of every bucketing. Tries use the last bucketing only."""
    buckets: Any = OmegaConf.to_container(cfg.buckets)
    return {str(name): config.overrides_of(overrides) for name, overrides in buckets.items()}


def config_of(entry: Entry, buckets: Sequence[str], options: Options, lr: float) -> DictConfig:
    """Compose the config of one training, without its seed.

    Args:
        entry: Entry to train.
        buckets: Overrides of the bucketing.
        options: Only their dense share is used; it becomes a number of the entry's steps.
        lr: Learning rate.
    """
    overrides = [*entry.overrides, *buckets]
    if dense_steps := round(options.dense_share * entry.max_steps):
        target = "lightning_dear.callbacks.CompressionSchedule"
        schedule = {"_target_": target, "dense_steps": dense_steps}
        overrides.append(config.as_override("strategy.compression_schedule", schedule))
    return config.composed(config.merged(overrides, [config.as_override("optimizer.lr", lr)]))


def key_of(cfg: DictConfig, *others: Any) -> str:
    """Return a digest of all options on which the result of a training depends.

    Args:
        cfg: Config of the training.
        others: Further options that are not in the config.
    """
    parts: Any = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in _IN_A_KEY}
    del parts["trainer"]["default_root_dir"]
    return hashlib.sha256(json.dumps([parts, others], sort_keys=True).encode()).hexdigest()[:12]
