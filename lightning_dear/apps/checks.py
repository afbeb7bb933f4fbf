"""Checks of a job that are made before any process is started."""

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_dear.names import is_meant
from lightning_dear.paths import conf_dir
from lightning_dear.strategy import base, starting

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_single_process(trainer: Trainer, strategy: Any) -> None:
    """Check that ``strategy=single`` was not given several devices.

    Raises:
        ValueError: If it was; Lightning has then silently chosen another strategy.
    """
    if strategy == "auto" and (trainer.num_devices, trainer.num_nodes) != (1, 1):
        raise ValueError(
            f"strategy=single runs one process, but there are {trainer.num_devices} device(s) on"
            f" {trainer.num_nodes} node(s). Set cluster.devices and cluster.num_nodes to 1, or"
            " choose strategy=dear or ddp."
        )


def check_launch(trainer: Trainer) -> None:
    """Check, for strategies that do not do it themselves, how this process was started.

    Raises:
        ValueError: See `starting.check_start`.
    """
    strategy: Any = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    if environment is not None and not isinstance(strategy, base.PipelineStrategy):
        starting.check_start(environment, strategy.parallel_devices, strategy.num_nodes)


def use_interface(name: str | None) -> None:
    """Make gloo and NCCL use one network interface.

    Sets environment variables of this process, which the ranks it starts inherit.

    Args:
        name: Name of the interface. None means that gloo and NCCL choose.

    Raises:
        ValueError: If this machine has no interface of that name.
    """
    if name is None:
        return
    known = sorted(interface for _, interface in socket.if_nameindex())
    if name not in known:
        raise ValueError(
            f"cluster.interface={name!r} is not on this machine. Set one of {', '.join(known)}."
        )
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, name))


def ignored_groups(overrides: list[str], strategy: Any) -> list[str]:
    """Return the config groups that the user chose but the strategy does not read.

    Args:
        overrides: Command-line overrides of this job.
        strategy: Config of the strategy, unresolved: a mapping, or a name.
    """
    used = str(dict(strategy) if isinstance(strategy, Mapping) else strategy)
    chosen = {item.lstrip("+~").split("=")[0].split(".")[0] for item in overrides}
    return [group for group in ("fusion", "compressor") if group in chosen and group not in used]


def unknown_options(keys: Iterable[str]) -> dict[str, str]:
    """Return the top-level keys of a job that ``conf/train.yaml`` does not have.

    Hydra accepts added keys (``+strategi=ddp``), but no code would read them.

    Returns:
        Key -> what `is_meant` says of it.
    """
    config = OmegaConf.load(conf_dir() / "train.yaml")
    groups = {str(group) for entry in config.defaults if entry != "_self_" for group in entry}
    known = {*map(str, config), *groups}
    return {key: is_meant(key, known) for key in keys if key not in known}
