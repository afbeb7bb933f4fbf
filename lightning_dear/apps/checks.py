"""Checks of a composed config that are worth making before any process is started."""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_dear.paths import conf_dir

NODE_VARIABLES = frozenset({"NODE_RANK", "GROUP_RANK"})
"""Any of which says which of several nodes this is, as Lightning's default environment reads it."""

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_devices(accelerator: str, devices: int | str | list[int]) -> None:
    """Check that the GPUs asked for exist.

    Args:
        accelerator: Lightning's name: ``cpu``, ``gpu``, ``cuda``, ``auto``, ...
        devices: A count, ``"auto"``, or a list of indices.

    Raises:
        ValueError: If this machine has fewer GPUs than that.
    """
    if accelerator not in ("gpu", "cuda"):
        return
    available = torch.cuda.device_count()
    needed = _count(devices)
    if needed > available:
        raise ValueError(
            f"The job asks for {needed} GPU(s) on each host, but this machine has {available}. "
            f"Set cluster.devices to at most {available}, or choose a cluster without GPUs "
            "(cluster=local)."
        )


def check_single_process(strategy: Any, devices: int | str | list[int], num_nodes: int) -> None:
    """Check that ``strategy=single`` was not given several devices.

    Raises:
        ValueError: If it was; Lightning would choose another strategy without saying so.
    """
    if strategy == "auto" and (_count(devices), num_nodes) != (1, 1):
        raise ValueError(
            f"strategy=single runs one process, but cluster.devices is {devices} and "
            f"cluster.num_nodes {num_nodes}. Set both to 1, or choose strategy=dear or ddp."
        )


def check_nodes(trainer: Trainer) -> None:
    """Check that somebody has started the other nodes' processes, if there are to be any.

    Raises:
        ValueError: If nobody seems to have: the ranks of this node would wait for the others.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    num_nodes, is_started = trainer.num_nodes, not NODE_VARIABLES.isdisjoint(os.environ)
    if num_nodes == 1 or is_started or not isinstance(environment, LightningEnvironment):
        return
    raise ValueError(
        f"The job has {num_nodes} nodes, but nothing says that this is one of them. Start it with"
        " torchrun or srun (docs/clusters.md), or set NODE_RANK, MASTER_ADDR and MASTER_PORT on"
        " each node; cluster=local runs on this machine alone, and dear-plan predicts a cluster."
    )


def use_interface(name: str | None) -> None:
    """Make gloo and NCCL use one network interface; None leaves the choice to them.

    Sets environment variables of this process, which the ranks it starts inherit.

    Raises:
        ValueError: If this machine has no interface of that name.
    """
    if name is None:
        return
    known = sorted(interface for _, interface in socket.if_nameindex())
    if name not in known:
        raise ValueError(
            f"cluster.interface is {name!r}, but this machine has only {', '.join(known)}."
        )
    for variable in INTERFACE_VARIABLES:
        os.environ[variable] = name


def ignored_groups(overrides: list[str], strategy: Any) -> list[str]:
    """Return the groups that the user chose although the chosen strategy reads none of them.

    Args:
        overrides: Command-line overrides of this job.
        strategy: The strategy's config, unresolved: a mapping, or a name.
    """
    used = str(dict(strategy) if isinstance(strategy, Mapping) else strategy)
    chosen = {item.lstrip("+~").split("=")[0].split(".")[0] for item in overrides}
    return [group for group in ("fusion", "compressor") if group in chosen and group not in used]


def unknown_options(keys: Iterable[str]) -> list[str]:
    """Return those of a job's top-level keys that ``conf/train.yaml`` does not have.

    Hydra lets anyone add them (``+strategi=ddp``), and nothing would read them.
    """
    config = OmegaConf.load(conf_dir() / "train.yaml")
    groups = {str(group) for entry in config.defaults if entry != "_self_" for group in entry}
    return [key for key in keys if key not in {*map(str, config), *groups}]


def options_named(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What below a config's groups has a name, dotted: ``compressor.density``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from [f"{key}.{name}"] if name in value else []
            yield from (f"{key}.{path}" for path in options_named(name, value))


def _count(devices: int | str | list[int]) -> int:
    if isinstance(devices, list):
        return max(devices, default=0) + 1
    if str(devices) in ("auto", "-1"):
        return 1
    return int(devices)
