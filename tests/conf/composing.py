"""Composing jobs in this process, as the command line would."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from lightning_dear.paths import conf_dir


@contextmanager
def composed(folder: Path, *overrides: str) -> Iterator[DictConfig]:
    """Yield the job that the overrides name, with `folder` for its files."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("train", list(overrides), return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(folder)
        config.hydra.job.num = 0
    previous = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    job = config.copy()
    with open_dict(job):
        del job["hydra"]
    try:
        yield job
    finally:
        HydraConfig.instance().cfg = previous


def options_of(group: str) -> list[str]:
    """Return the names of a group's files."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
