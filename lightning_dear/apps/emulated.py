"""Runs a Hydra application on an emulated cluster, by starting it again once for each rank."""

import os
import sys
from inspect import signature

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dear import emulation
from lightning_dear.apps import job
from lightning_dear.emulation.launch import HOST_VARIABLE
from lightning_dear.strategy.launchers import job_arguments
from lightning_dear.studies.interrupts import INTERRUPTS

OPTIONS = tuple(signature(emulation.EmulatedCluster).parameters)
"""Options in conf/cluster/emulated.yaml that describe the hosts and their links."""


def restart_on_cluster(cfg: DictConfig, module: str) -> bool:
    """Run the Hydra job ``cfg`` on its cluster, if that is an emulated one.

    Creates the hosts, runs ``python -m module`` on each with this job's overrides and output
    folder, blocks until all ranks have ended, and removes the hosts. Users other than root do all
    this in namespaces of their own.

    Args:
        cfg: Config of the job; ``cfg.cluster`` is one of conf/cluster.
        module: Module whose Hydra ``main`` runs the job. It calls this function, too.

    Returns:
        True if the job has been done on emulated hosts. False means that the caller must do the
        job: the cluster is not emulated, or this process is one of its ranks.

    Raises:
        SystemExit: With the exit code of ``run_on_cluster``, if that is not 0; with 130
            after Ctrl-C, and with 143 after SIGTERM.
        EmulationUnavailable: This machine cannot emulate hosts; the message says why.
        ValueError: An option of the cluster is out of range.
    """
    if "congestion_control" not in cfg.cluster or HOST_VARIABLE in os.environ:
        return False
    if cfg.get("optimized_metric"):
        raise ValueError(
            f"optimized_metric={cfg.optimized_metric} has no effect with cluster=emulated. Leave it"
            " out, or choose cluster=local. Emulated ranks return no metric to a sweeper."
        )
    try:
        if reason := emulation.why_unavailable(as_own_root=True):
            raise emulation.EmulationUnavailable(reason)
        code = _run(cfg, module) if os.geteuid() == 0 else _run_as_own_root(module)
    except KeyboardInterrupt as interrupt:
        code = next(iter(interrupt.args), 130)
    except emulation.EmulationUnavailable as error:
        raise emulation.EmulationUnavailable(
            f"{error}. Or choose cluster=local, which emulates no hosts."
        ) from None
    if code:
        raise SystemExit(code)
    return True


def _run(cfg: DictConfig, module: str) -> int:
    node, config = cfg.cluster, HydraConfig.get()
    arguments = job_arguments(config, 0)
    # Each rank resolves the name with its own RANK, so that each rank has its own log file.
    arguments.append(f"hydra.job.name='{config.job.name}_rank${{oc.env:RANK}}'")
    if node.beta_s_per_byte is None and node.rate_mbit is not None:
        arguments.append(f"cluster.beta_s_per_byte={8e-6 / node.rate_mbit:.6g}")
    hosts = emulation.EmulatedCluster(**{name: node[name] for name in OPTIONS})
    with INTERRUPTS.raised(), hosts as cluster:
        argv, size = [sys.executable, "-m", module, *arguments], node.ranks_per_host
        return emulation.run_on_cluster(cluster, argv, ranks_per_host=size, cwd=config.runtime.cwd)


def _run_as_own_root(module: str) -> int:
    """Start this job again as root of namespaces of its own, and return its exit code. Blocks."""
    config = HydraConfig.get()
    argv = [sys.executable, "-m", module, *job_arguments(config, 0)]
    # If this process is killed, the kernel ends the child.
    command = [*emulation.AS_OWN_ROOT, "setpriv", "--pdeathsig", "TERM", *argv]
    # `run_child` passes signals on: the child then ends its ranks and prints how to go on.
    return job.run_child(command, cwd=config.runtime.cwd)
